# SPDX-License-Identifier: BSD-3-Clause
"""qnn_runner: a program without Python."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import executorch_qnn as qnn
from executorch_qnn import _native

from .programs import Method, Plan, int32
from .programs import Step as StepModel

RUNNER = Path(_native.__file__).parent / "bin" / "qnn_runner"
MakeFile = Callable[..., Path]


def run(*args: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RUNNER, *map(str, args)], capture_output=True, text=True, timeout=60)


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    (folder / "input_0.bin").write_bytes(int32(7, 8, 9, 10).numpy().tobytes())
    return folder


def test_it_runs_and_writes_raw_outputs(
    program_file: MakeFile, null_qnn: str, inputs: Path, tmp_path: Path
) -> None:
    args = ("--model", program_file(), "--qnn-libraries", null_qnn, "--outputs", tmp_path / "out")
    for given in (inputs, inputs / "input_0.bin"):
        result = run(*args, "--inputs", given)
        assert (result.returncode, result.stderr) == (0, "")
        output = (tmp_path / "out" / "output_0.bin").read_bytes()
        assert torch.frombuffer(bytearray(output), dtype=torch.int32).tolist() == [8, 8, 9, 10]


def test_state_goes_through_repeats_and_files_that_sessions_understand(
    program_file: MakeFile, null_qnn: str, inputs: Path, tmp_path: Path
) -> None:
    args = ("--model", program_file(), "--qnn-libraries", null_qnn, "--inputs", inputs)
    state = tmp_path / "state"
    assert run(*args, "--repeat", 3, "--state-out", state).returncode == 0
    assert run(*args, "--state-in", state, "--state-out", state).returncode == 0
    session = qnn.load(program_file(), qnn_libraries=null_qnn)
    session.load_state(state)
    assert session.read_state("n").tolist() == [4, 0, 0, 0]
    session.save_state(state)
    assert run(*args, "--state-in", state).returncode == 0


def test_a_state_that_cannot_be_saved_leaves_the_old_file(
    program_file: MakeFile, null_qnn: str, inputs: Path, tmp_path: Path
) -> None:
    args = ("--model", program_file(), "--qnn-libraries", null_qnn, "--inputs", inputs)
    state = tmp_path / "state"
    assert run(*args, "--state-out", state).returncode == 0
    old = state.read_bytes()
    limited = ["sh", "-c", 'ulimit -f 0; exec "$@"', "sh", RUNNER, *args, "--state-in", state]
    done = subprocess.run(
        [str(arg) for arg in [*limited, "--state-out", state]], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert f"cannot write {state}: File too large" in done.stderr
    assert state.read_bytes() == old
    assert sorted(path.name for path in tmp_path.iterdir()) == ["inputs", "state"]
    for path in (tmp_path, tmp_path / "no" / "state", "/dev/null"):
        done = run(*args, "--state-out", path)
        assert done.returncode == 1
        assert str(path) in done.stderr


def test_it_lists_methods_and_prints_times(
    program_file: MakeFile, null_qnn: str, inputs: Path
) -> None:
    listed = run("--model", program_file(), "--list")
    assert listed.stdout == "forward(int32[1, 4]) -> int32[1, 4]\n"
    args = ("--model", program_file(), "--qnn-libraries", null_qnn, "--inputs", inputs)
    timed = run(*args, "--repeat", 5, "--print-times").stdout.splitlines()
    assert timed[0].startswith("load ")
    assert timed[1].endswith("of 5")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "--model is missing"),
        (("--model",), "--model needs a value"),
        (("--model", "x", "--what"), "no option --what"),
        (("--model", "x", "--repeat", "0"), "--repeat takes a number"),
        (("--model", "x", "--repeat", "2x"), "--repeat takes a number"),
    ],
)
def test_bad_usage_is_2(args: tuple[str, ...], message: str) -> None:
    result = run(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert "usage: qnn_runner" in result.stderr


def test_failures_are_1_and_say_why(
    program_file: MakeFile, null_qnn: str, inputs: Path, tmp_path: Path
) -> None:
    short = tmp_path / "short.bin"
    short.write_bytes(b"123")
    good = ("--model", program_file(), "--qnn-libraries", null_qnn)
    damaged = tmp_path / "damaged.pte"
    damaged.write_bytes(program_file().read_bytes()[:-1000])
    for args, message in (
        (("--model", tmp_path / "no.pte"), "No such file"),
        (("--model", damaged, "--inputs", inputs), "no intact .pte file"),
        ((*good, "--method", "other"), "no method other; it has forward"),
        (good, "takes 1 inputs, got 0 files"),
        ((*good, "--inputs", short), "short.bin has 3 bytes, int32[1, 4] takes 16"),
        ((*good, "--inputs", tmp_path / "none.bin"), "cannot read"),
        ((*good, "--inputs", inputs, "--state-in", short), "no state file"),
        ((*good, "--inputs", inputs, "--outputs", short), "cannot write"),
        (("--model", program_file(), "--qnn-libraries", tmp_path, "--inputs", inputs), "no QNN"),
    ):
        result = run(*args)
        assert (result.returncode, result.stdout) == (1, "")
        assert message in result.stderr


def test_the_model_stands_for_what_the_graph_does() -> None:
    # The other tests rely on it: without the delegate the program would compute something else.
    assert StepModel()(int32(1, 0, 0, 0)).tolist() == [[2, 0, 0, 0]]
    assert Plan({"forward": Method(StepModel(), (int32(),))}).behaviour == 2
