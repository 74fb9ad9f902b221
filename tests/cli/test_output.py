# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import io
import subprocess
import sys

import pytest

from executorch_qnn.cli import output


def test_native_prints_on_descriptor_1_do_not_reach_stdout() -> None:
    code = """
import os
from executorch_qnn.cli.output import Output, standard_output
with standard_output() as stdout:
    os.write(1, b"noise of a library\\n")
    print("text")
    Output(stdout, json=True, verbose=False).result({"a": 1}, "")
os.write(1, b"after\\n")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["text", "{", '"a":', "1", "}", "after"]
    assert done.stderr == "noise of a library\n"


def test_text_is_streamed_and_a_document_is_printed_once() -> None:
    stream = io.StringIO()
    out = output.Output(stream, json=False, verbose=False)
    out.write("a")
    out.result({"x": 1}, "b")
    assert stream.getvalue() == "ab\n"
    stream = io.StringIO()
    out = output.Output(stream, json=True, verbose=False)
    out.write("a")
    out.result({"x": 1}, "b")
    assert stream.getvalue() == '{\n "x": 1\n}\n'


def test_a_long_stage_is_told_on_stderr(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_SHOW_STAGE_AFTER_S", 0.0)
    out = output.Output(io.StringIO(), json=False, verbose=False)
    with out.stage("one") as rename:
        rename("two")
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["one", "two"]


def test_a_short_stage_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    with output.Output(io.StringIO(), json=False, verbose=False).stage("one"):
        pass
    assert capsys.readouterr().err == ""


def test_tables_are_aligned() -> None:
    assert output.table([("a", 10), ("bbb", 2)], header=("x", "y")) == "x    y\na    10\nbbb  2"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.0 GiB")],
)
def test_sizes_for_people(count: int, expected: str) -> None:
    assert output.human_bytes(count) == expected
