# SPDX-License-Identifier: BSD-3-Clause
"""What does not fit, is damaged or is missing gives an error in words, and nothing else happens."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn

from .programs import Method, Plan, Step, int32

MakeFile = Callable[..., Path]


@pytest.fixture
def session(program_file: MakeFile, null_qnn: str) -> qnn.Session:
    return qnn.load(program_file(), qnn_libraries=null_qnn)


# ------------------------------------------------------------------------------------- calls


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ((), "takes 1 inputs, got 0"),
        ((int32(), int32()), "takes 1 inputs, got 2"),
        ((int32().long(),), r"input 0 .* must be int32\[1, 4\], got int64\[1, 4\]"),
        ((int32().float(),), r"got float32\[1, 4\]"),
        ((torch.zeros(1, 5, dtype=torch.int32),), r"must be int32\[1, 4\], got int32\[1, 5\]"),
        ((torch.zeros(1, 3, dtype=torch.int32),), r"int32\[1, 3\]"),
        ((torch.zeros(4, 1, dtype=torch.int32),), r"got int32\[4, 1\]"),
        ((torch.zeros(4, dtype=torch.int32),), r"got int32\[4\]"),
        ((torch.zeros(0, 4, dtype=torch.int32),), r"int32\[0, 4\]"),
        ((torch.zeros(1, 8, dtype=torch.int32)[:, ::2],), r"not contiguous .*strides \(8, 2\)"),
        ((torch.zeros(1, 4, dtype=torch.complex64),), "complex64"),
        ((torch.zeros(1, 4, dtype=torch.int32, device="meta"),), "is on meta"),
        ((torch.zeros(1, 4, dtype=torch.int32).to_sparse(),), "not contiguous"),
        ((3,), r"must be int32\[1, 4\], got an int"),
        ((True,), "got a bool"),
        ((None,), "got None"),
        (("text",), "must be a tensor or a number, got str"),
    ],
)
def test_inputs_that_do_not_fit_are_named_and_nothing_runs(
    session: qnn.Session, inputs: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(qnn.StateError, match=message):
        session(*inputs)
    assert session.read_state("n").tolist() == [0, 0, 0, 0]
    session(int32())


def test_inputs_may_nest_and_be_views_that_are_dense(session: qnn.Session) -> None:
    rows = torch.arange(8, dtype=torch.int32).reshape(2, 4)
    assert session([rows[1:]]).tolist() == [[5, 5, 6, 7]]
    assert session({"x": (rows[:1],)}).tolist() == [[1, 1, 2, 3]]


def test_scalar_inputs_are_passed_as_they_are(program_file: MakeFile, null_qnn: str) -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, n: int, f: float, flag: bool) -> Tensor:
            return x + x

    plan = Plan({"forward": Method(Scaled(), (int32(), 3, 0.5, True))})
    session = qnn.load(program_file("scalars", plan), qnn_libraries=null_qnn)
    assert session(int32(), 3, 0.5, True).tolist() == [[1, 0, 0, 0]]
    for wrong in ((int32(), 3.0, 0.5, True), (int32(), 3, 1, True), (int32(), int32(), 0.5, True)):
        with pytest.raises(qnn.StateError, match=r"input [12] of method forward must be"):
            session(*wrong)


def test_a_failure_of_qnn_carries_its_words_and_the_session_goes_on(
    program_file: MakeFile, null_qnn: str
) -> None:
    plan = Plan({"forward": Method(Step(), (int32(),))}, behaviour=1)
    session = qnn.load(program_file("failing", plan), qnn_libraries=null_qnn)
    for _ in range(2):
        with pytest.raises(qnn.DeviceError, match="the null graph fails as asked"):
            session(int32())


# ------------------------------------------------------------------------------------- files


def test_a_missing_or_foreign_file_is_named(tmp_path: Path, null_qnn: str) -> None:
    with pytest.raises(qnn.QnnError, match=r"nowhere\.pte: No such file"):
        qnn.load(tmp_path / "nowhere.pte", qnn_libraries=null_qnn)
    with pytest.raises(qnn.QnnError, match="directory"):
        qnn.load(tmp_path, qnn_libraries=null_qnn)
    foreign = tmp_path / "foreign.pte"
    for content in (b"", b"x", b"PK\3\4" + bytes(500), b"\0" * 5000):
        foreign.write_bytes(content)
        with pytest.raises(qnn.QnnError, match=r"foreign\.pte"):
            qnn.load(foreign, qnn_libraries=null_qnn)


def test_a_thousand_damaged_files_are_refused(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    good = program_file().read_bytes()
    path, rng = tmp_path / "damaged.pte", random.Random(0)
    for _ in range(1000):
        damaged = bytearray(good)
        for _ in range(rng.choice([1, 1, 2, 8])):
            # The seal's own magic, too: it is the content that must not be believed then.
            damaged[rng.randrange(len(good) - 64)] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(qnn.IncompatiblePayload, match=r"damaged\.pte"):
            qnn.load(path, qnn_libraries=null_qnn)


def test_a_truncated_file_is_refused_with_and_without_its_seal(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    good = program_file().read_bytes()
    path, rng = tmp_path / "cut.pte", random.Random(0)
    for size in (1, 8, 63, 64, 65, *(rng.randrange(66, len(good) - 200) for _ in range(200))):
        path.write_bytes(good[:size])
        with pytest.raises(qnn.IncompatiblePayload, match=r"cut\.pte"):
            qnn.load(path, qnn_libraries=null_qnn)


def test_a_file_without_a_seal_loads_and_a_damaged_context_is_still_found(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    plain = program_file("plain", sealed=False)
    assert qnn.load(plain, qnn_libraries=null_qnn)(int32()).tolist() == [[1, 0, 0, 0]]
    content = bytearray(plain.read_bytes())
    content[content.index(b"NULLQNN1") + 9] ^= 1
    path = tmp_path / "context.pte"
    path.write_bytes(content)
    with pytest.raises(qnn.IncompatiblePayload, match="SHA-256"):
        qnn.load(path, qnn_libraries=null_qnn)


def test_a_damaged_or_newer_payload_is_refused(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    plain = program_file("plain", sealed=False).read_bytes()
    at = plain.index(b"ETQNNDLG")
    for offset, message in ((0, "ETQNNDLG"), (8, "upgrade executorch-qnn"), (40, "checksum")):
        content = bytearray(plain)
        content[at + offset] ^= 2
        path = tmp_path / "payload.pte"
        path.write_bytes(content)
        with pytest.raises(qnn.IncompatiblePayload, match=message):
            qnn.load(path, qnn_libraries=null_qnn)


def test_a_program_of_newer_libraries_is_refused(program_file: MakeFile, null_qnn: str) -> None:
    plan = Plan(
        {"forward": Method(Step(), (int32(),))},
        change=lambda payload: replace(payload, core_api=(2, 99), build_id="v2.99"),
    )
    with pytest.raises(qnn.IncompatiblePayload, match=r"v2\.99.*use newer QNN libraries"):
        qnn.load(program_file("newer", plan), qnn_libraries=null_qnn)


def test_without_libraries_the_error_says_where_was_looked(
    program_file: MakeFile, tmp_path: Path
) -> None:
    with pytest.raises(qnn.LibraryNotFound, match=r"(?s)forward.*Looked at.*pip install"):
        qnn.load(program_file(), qnn_libraries=tmp_path)


def test_a_program_without_delegates_needs_no_libraries(
    program_file: MakeFile, tmp_path: Path
) -> None:
    class Xor(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.bitwise_xor(x, 5)

    file = program_file("cpu", Plan({"forward": Method(Xor(), (int32(),))}))
    session = qnn.load(file, qnn_libraries=tmp_path)
    assert session(int32(1, 2, 3, 4)).tolist() == [[4, 7, 6, 1]]
    assert session.state() == {}


def test_the_file_may_be_removed_while_a_session_lives(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    path = tmp_path / "gone.pte"
    shutil.copy(program_file(), path)
    session = qnn.load(path, qnn_libraries=null_qnn)
    path.unlink()
    session.save_state(tmp_path / "state")  # the digest was taken at load
    twin = session.fork()
    assert twin(int32()).tolist() == [[1, 0, 0, 0]]


SANITIZED = Path(__file__).parents[2] / "build/cpp-sanitized/qnn_runner"


@pytest.mark.skipif(not SANITIZED.exists(), reason="scripts/test --sanitize builds it")
def test_damage_is_refused_under_sanitizers(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    (tmp_path / "in.bin").write_bytes(int32().numpy().tobytes())
    state, path = tmp_path / "state", tmp_path / "damaged.pte"
    command = [SANITIZED, "--qnn-libraries", null_qnn, "--inputs", tmp_path / "in.bin"]

    def run(*args: object) -> tuple[int, str]:
        result = subprocess.run([*command, *map(str, args)], capture_output=True, text=True)
        assert "Sanitizer" not in result.stderr, result.stderr
        assert "runtime error" not in result.stderr, result.stderr
        return result.returncode, result.stderr

    good, rng = program_file().read_bytes(), random.Random(1)
    assert run("--model", program_file(), "--state-out", state) == (0, "")
    good_state = state.read_bytes()
    for _ in range(60):
        damaged = bytearray(good)
        damaged[rng.randrange(len(good) - 64)] ^= 1 << rng.randrange(8)
        path.write_bytes(
            damaged if rng.random() < 0.7 else good[: rng.randrange(1, len(good) - 200)]
        )
        assert run("--model", path)[0] == 1
        damaged = bytearray(good_state)
        damaged[rng.randrange(12, len(good_state))] ^= 1 << rng.randrange(8)
        state.write_bytes(damaged)
        assert run("--model", program_file(), "--state-in", state)[0] == 1
