# SPDX-License-Identifier: BSD-3-Clause
"""The command as a user sees it: exit codes, streams and documents."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "executorch_qnn.cli"]
HOW_TO_GET = "pip install"


def run(
    *arguments: str | os.PathLike[str], cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        env={**os.environ, **environment},
        check=False,
        timeout=600,
    )


@pytest.fixture
def no_libraries(tmp_path: Path) -> dict[str, str]:
    """An environment in which no QNN library can be found."""
    # An empty package of that name, first on the path, hides the installed one.
    package = tmp_path / "hidden" / "onnxruntime_qnn"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    return {"PYTHONPATH": str(package.parent), "QNN_SDK_ROOT": "", "LD_LIBRARY_PATH": ""}


def test_help_is_fast_because_it_imports_nothing_heavy() -> None:
    def cpu_seconds() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    took = []
    for _ in range(3):
        before = cpu_seconds()
        assert run("--help").returncode == 0
        took.append(cpu_seconds() - before)
    assert min(took) < 0.2
    code = "import sys, executorch_qnn.cli as c; c.build_parser(); print(*sys.modules)"
    modules = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    assert not {"torch", "numpy", "executorch", "tqdm", "executorch_qnn._native"} & set(modules)


@pytest.mark.parametrize(
    "arguments",
    [(), ("nonsense",), ("lower",), ("targets", "--nonsense"), ("inspect",), ("run", "--json")],
)
def test_a_wrong_command_line_exits_with_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "usage:" in done.stderr


def test_targets_lists_the_table() -> None:
    document = json.loads(run("targets", "--json").stdout)
    target = next(entry for entry in document["targets"] if entry["name"] == "SM8650")
    assert target["soc_model"] == 57
    assert target["htp_arch"] == 75
    assert "SM8650" in run("targets").stdout


def test_an_unknown_target_fails_with_the_names_of_the_known(tmp_path: Path) -> None:
    done = run("lower", "m:f", "-o", tmp_path / "m.pte", "--target", "SM1", "--json")
    assert done.returncode == 1
    assert json.loads(done.stdout)["error"]["type"] == "UnknownTarget"
    assert "SM8650" in done.stderr


def test_a_missing_file_is_one_clear_message(tmp_path: Path) -> None:
    for arguments in (("inspect",), ("run",), ("llm", "generate", "--prompt", "x")):
        done = run(*arguments, tmp_path / "missing.pte", "--json")
        assert done.returncode == 1
        assert "missing.pte" in json.loads(done.stdout)["error"]["message"]
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize("where", ["adb", "adb:123", "ssh:board"])
def test_running_on_a_device_is_refused_clearly(where: str, tmp_path: Path) -> None:
    done = run("run", tmp_path / "m.pte", "--on", where)
    assert done.returncode == 1
    assert f"--on {where}" in done.stderr
    assert "not supported yet" in done.stderr


def test_an_unknown_place_is_bad_usage(tmp_path: Path) -> None:
    assert run("run", tmp_path / "m.pte", "--on", "moon").returncode == 2


def test_a_function_reference_that_names_nothing_is_bad_usage(
    tmp_path: Path, qnn_libraries: str
) -> None:
    (tmp_path / "mine.py").write_text("def wrong():\n    return 3\n")
    libraries = ("--qnn-libraries", qnn_libraries)
    for reference in ("mine", "mine:missing", "nothing_of_that_name:f", "no.py:f", "mine:wrong"):
        done = run("lower", reference, "-o", tmp_path / "m.pte", *libraries, cwd=tmp_path)
        assert done.returncode == 2, done.stderr


def test_every_command_that_needs_the_libraries_says_how_to_get_them(
    tmp_path: Path, no_libraries: dict[str, str]
) -> None:
    (tmp_path / "mine.py").write_text("def f():\n    return 3\n")
    program = tmp_path / "m.pte"
    program.write_bytes(b"\0\0\0\0ET12" + bytes(100))
    for arguments in (
        ("doctor",),
        ("lower", "mine:f", "-o", tmp_path / "out.pte"),
        ("inspect", program),
        ("run", program),
        ("llm", "export", "--model", "smollm2-135m", "-o", tmp_path / "out.pte"),
        ("llm", "generate", program, "--prompt", "x"),
    ):
        done = run(*arguments, "--json", cwd=tmp_path, **no_libraries)
        assert done.returncode == 1, arguments
        assert "LibraryNotFound" in done.stdout, arguments
        assert HOW_TO_GET in done.stdout, arguments
        json.loads(done.stdout)


def test_an_explicit_folder_is_the_only_one_looked_at(tmp_path: Path) -> None:
    done = run("doctor", "--qnn-libraries", tmp_path, "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert document["libraries"]["candidates"] == []
    assert str(tmp_path) in document["problems"][0]["problem"]


def test_doctor_tells_what_is_used(qnn_libraries: str) -> None:
    done = run("doctor", "--qnn-libraries", qnn_libraries, "--json")
    document = json.loads(done.stdout)
    assert document["problems"] == []
    assert done.returncode == 0
    used = Path(document["libraries"]["used"]["folder"])
    assert used == Path(qnn_libraries).resolve()
    assert document["libraries"]["used"]["build_id"].startswith("v2.")
    assert document["libraries"]["candidates"][0]["how"] == "argument"
    assert document["target"]["ok"]
    assert document["delegate"]["id"] == "QnnDelegate"
    text = run("doctor", "--qnn-libraries", qnn_libraries).stdout
    assert document["libraries"]["used"]["build_id"] in text
    assert text.rstrip().endswith("usable")
