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
    assert state["stored_as"] == "float16"
    assert state["bytes"] == 16
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
