# SPDX-License-Identifier: BSD-3-Clause
"""A model of the user's through `lower`, `inspect` and `run`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from executorch_qnn.cli import main

MODELS = """
import torch


class RunningSum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("total", torch.full((1, 8), 0.5))

    def forward(self, x):
        self.total.add_(x)
        return self.total * 2


def running_sum():
    return RunningSum(), (torch.ones(1, 8),)


class Mean(RunningSum):
    def forward(self, x):
        return super().forward(x) / 8


def mean():
    return Mean(), (torch.ones(1, 8),)


def named():
    return {"add": running_sum()}
"""


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


Command = Callable[..., Done]


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: object) -> Done:
        code = main([str(argument) for argument in arguments])
        return Done(code, *capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, qnn_libraries: str) -> Path:
    """A folder with `models.py` and the program of `running_sum` in `sum.pte`."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "models.py").write_text(MODELS)
    lower = ["lower", f"{folder}/models.py:running_sum", "-o", f"{folder}/sum.pte"]
    assert main([*lower, "--qnn-libraries", qnn_libraries]) == 0
    np.savez(folder / "ones.npz", x=np.ones((1, 8), np.float32))
    return folder


def test_lower_reports_what_became_of_the_model(
    folder: Path, command: Command, qnn_libraries: str
) -> None:
    output = folder / "named.pte"
    arguments = ("lower", f"{folder}/models.py:named", "-o", output, "--target", "SM8550")
    done = command(*arguments, "--qnn-libraries", qnn_libraries, "--json")
    assert done.code == 0
    assert done.document["bytes"] == output.stat().st_size
    assert done.document["target"] == "SM8550"
    method = done.document["report"]["methods"]["add"]
    assert len(method["delegates"]) == 1
    assert method["cpu_ops"] == []
    assert [(state["fqn"], state["owner"]) for state in method["state"]] == [("total", "delegate")]


def test_lower_refuses_what_it_cannot_quantize(
    folder: Path, command: Command, qnn_libraries: str
) -> None:
    arguments = ("lower", f"{folder}/models.py:named", "-o", folder / "q.pte", "--quantize", "1a1w")
    done = command(*arguments, "--qnn-libraries", qnn_libraries, "--json")
    assert done.code == 1
    assert "1a1w" in done.document["error"]["message"]
    assert not (folder / "q.pte").exists()


def test_inspect_lists_delegates_state_and_contexts(
    folder: Path, command: Command, qnn_libraries: str
) -> None:
    done = command("inspect", folder / "sum.pte", "--qnn-libraries", qnn_libraries, "--json")
    assert done.code == 0
    (method,) = done.document["methods"]
    assert method["name"] == "forward"
    assert method["inputs"] == [{"dtype": "float32", "shape": [1, 8]}]
    assert method["cpu_ops"] == []
    (delegate,) = method["delegates"]
    assert (delegate["id"], delegate["target"]) == ("QnnDelegate", "SM8650")
    (state,) = done.document["state"]
    assert (state["fqn"], state["dtype"], state["shape"]) == ("total", "float32", [1, 8])
    assert (state["stored_as"], state["bytes"]) in (("float16", 16), ("float32", 32))
    assert state["initial"] != "zeros"
    (context,) = done.document["contexts"]
    assert (context["soc_model"], context["htp_arch"]) == (57, 75)
    assert context["build_id"] == delegate["build_id"]
    assert [graph["name"] for graph in context["graphs"]] == [delegate["graph"]]

    text = command("inspect", folder / "sum.pte", "--qnn-libraries", qnn_libraries).out
    for part in ("forward(float32[1, 8]) -> float32[1, 8]", "QnnDelegate", "total", "v75"):
        assert part in text


def test_inspect_needs_no_libraries_for_all_but_the_contexts(
    folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", "")
    done = command("inspect", folder / "sum.pte", "--no-contexts", "--json")
    assert done.code == 0
    assert [state["fqn"] for state in done.document["state"]] == ["total"]
    assert "build_id" not in done.document["contexts"][0]


def test_inspect_refuses_damaged_files_clearly(folder: Path, command: Command) -> None:
    whole = (folder / "sum.pte").read_bytes()
    payload = whole.index(b"ETQNNDLG")
    context_byte = len(whole) // 2
    cases = {
        "empty": (b"", "not an ExecuTorch program"),
        "text": (b"hello" * 100, "not an ExecuTorch program"),
        "cut": (whole[: len(whole) // 2], "cut short"),
        "payload": (flipped(whole, payload + 40), "damaged"),
        "newer": (flipped(whole, payload + 9), "upgrade executorch-qnn"),
        "context": (flipped(whole, context_byte), "does not match the hash"),
    }
    for name, (content, message) in cases.items():
        file = folder / f"{name}.pte"
        file.write_bytes(content)
        done = command("inspect", file, "--no-contexts")
        assert done.code == 1, name
        assert message in done.out + done.err, name
        assert "Traceback" not in done.err, name


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


def test_run_carries_state_in_a_file(folder: Path, command: Command, qnn_libraries: str) -> None:
    arguments = ("run", folder / "sum.pte", "--inputs", folder / "ones.npz")
    arguments += ("--qnn-libraries", qnn_libraries, "--json")
    first = command(*arguments, "--state-out", folder / "state")
    assert first.code == 0
    assert first.document["state"] == ["total"]
    assert first.document["outputs"][0]["first"] == [3.0] * 8
    again = command(*arguments)
    assert again.document["outputs"][0]["first"] == [3.0] * 8
    second = command(
        *arguments, "--state-in", folder / "state", "--outputs", folder / "outputs.npz"
    )
    assert second.document["outputs"][0]["first"] == [5.0] * 8
    with np.load(folder / "outputs.npz") as outputs:
        np.testing.assert_array_equal(outputs["output_0"], np.full((1, 8), 5, np.float32))


def test_run_may_write_the_state_that_it_reads(
    folder: Path, command: Command, qnn_libraries: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    arguments = ("run", folder / "sum.pte", "--inputs", folder / "ones.npz")
    arguments += ("--qnn-libraries", qnn_libraries, "--json", "--state-out", state)
    values = [command(*arguments).document["outputs"][0]["first"][0]]
    for _ in range(3):
        done = command(*arguments, "--state-in", state)
        assert done.document["state_file"] == str(state)
        values.append(done.document["outputs"][0]["first"][0])
    assert values == [3.0, 5.0, 7.0, 9.0]
    assert list(tmp_path.iterdir()) == [state]


def test_inspect_tells_what_a_saved_state_holds(
    folder: Path, command: Command, qnn_libraries: str, tmp_path: Path
) -> None:
    state = tmp_path / "state"
    run = ("run", folder / "sum.pte", "--inputs", folder / "ones.npz", "--state-out", state)
    assert command(*run, "--qnn-libraries", qnn_libraries).code == 0
    program = command("inspect", folder / "sum.pte", "--no-contexts", "--json").document
    done = command("inspect", state, "--json")
    assert done.code == 0
    assert done.document["format"] == "1.0"
    assert done.document["program_sha256"] == program["sha256"]
    assert done.document["bytes"] == state.stat().st_size
    (buffer,) = done.document["state"]
    assert (buffer["fqn"], buffer["dtype"], buffer["shape"]) == ("total", "float32", [1, 8])
    assert buffer["stored_as"] == program["state"][0]["stored_as"]
    assert buffer["encoding"] is None
    text = command("inspect", state).out
    for part in ("saved state, format 1.0", program["sha256"], "total", "float32[1, 8]"):
        assert part in text
    state.write_bytes(state.read_bytes()[:-1])
    done = command("inspect", state, "--json")
    assert done.code == 1
    assert done.document["error"]["type"] == "StateError"


def test_run_refuses_a_state_that_does_not_fit_and_keeps_the_old_file(
    folder: Path, command: Command, qnn_libraries: str, tmp_path: Path
) -> None:
    libraries = ("--qnn-libraries", qnn_libraries, "--json")
    lower = ("lower", f"{folder}/models.py:mean", "-o", tmp_path / "mean.pte")
    assert command(*lower, *libraries).code == 0
    inputs = ("--inputs", folder / "ones.npz", *libraries)
    sum_state, mean_state = tmp_path / "sum", tmp_path / "mean"
    assert command("run", folder / "sum.pte", *inputs, "--state-out", sum_state).code == 0
    assert command("run", tmp_path / "mean.pte", *inputs, "--state-out", mean_state).code == 0
    good = sum_state.read_bytes()
    bad = {
        "flipped": flipped(good, len(good) - 3),
        "cut": good[:-3],
        "empty": b"",
        "renamed": good.replace(b"total", b"other"),
    }
    for name, content in bad.items():
        (tmp_path / name).write_bytes(content)
    kept = tmp_path / "kept"
    kept.write_bytes(b"the old file")
    for name, part in (
        ("mean", "saved with another program file"),
        ("flipped", "damaged"),
        ("cut", "should have"),
        ("empty", "no state file"),
        ("renamed", "damaged"),
        ("missing", "No such file"),
    ):
        state = ("--state-in", tmp_path / name, "--state-out", kept)
        done = command("run", folder / "sum.pte", *inputs, *state)
        assert done.code == 1, name
        assert part in done.document["error"]["message"], name
        assert str(tmp_path / name) in done.document["error"]["message"], name
        assert "Traceback" not in done.err, name
        assert kept.read_bytes() == b"the old file"


def test_run_says_where_it_cannot_save(
    folder: Path, command: Command, qnn_libraries: str, tmp_path: Path
) -> None:
    inputs = ("--inputs", folder / "ones.npz", "--qnn-libraries", qnn_libraries, "--json")
    for path in (tmp_path, tmp_path / "no" / "state", Path("/dev/null"), Path("/proc/state")):
        done = command("run", folder / "sum.pte", *inputs, "--state-out", path)
        assert done.code == 1, path
        assert f"{path}:" in done.document["error"]["message"]
        assert "Traceback" not in done.err
    assert not Path("/dev/null").is_file()
    assert list(tmp_path.iterdir()) == []


def test_run_refuses_inputs_that_do_not_fit(
    folder: Path, command: Command, qnn_libraries: str
) -> None:
    libraries = ("--qnn-libraries", qnn_libraries, "--json")
    np.savez(folder / "short.npz", x=np.ones((1, 7), np.float32))
    np.savez(folder / "double.npz", x=np.ones((1, 8)))
    np.savez(folder / "two.npz", x=np.ones((1, 8), np.float32), y=np.ones(1))
    np.save(folder / "single.npy", np.ones(1))
    for name, part in (
        ("short.npz", "7"),
        ("double.npz", "float64"),
        ("two.npz", "2"),
        ("single.npy", "numpy.savez"),
        ("models.py", "no .npz file"),
        ("missing.npz", "missing.npz"),
    ):
        done = command("run", folder / "sum.pte", "--inputs", folder / name, *libraries)
        assert done.code == 1, name
        assert part in done.document["error"]["message"], name
        assert "Traceback" not in done.err, name


def test_run_names_the_methods_that_there_are(
    folder: Path, command: Command, qnn_libraries: str
) -> None:
    arguments = ("run", folder / "sum.pte", "--method", "backward", "--qnn-libraries")
    done = command(*arguments, qnn_libraries)
    assert done.code == 1
    assert "backward" in done.err
    assert "forward" in done.err
