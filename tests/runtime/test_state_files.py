# SPDX-License-Identifier: BSD-3-Clause
"""Saved state: whole or not there, for its own program only, whatever happens to the writer."""

from __future__ import annotations

import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import executorch_qnn as qnn
from executorch_qnn import _native
from executorch_qnn.seal import program_sha256

from .programs import FLOAT32, Method, Plan, Step, counter, int32, state
from .test_runner import RUNNER

MakeFile = Callable[..., Path]


@pytest.fixture
def session(program_file: MakeFile, null_qnn: str) -> qnn.Session:
    return qnn.load(program_file(), qnn_libraries=null_qnn)


def value(session: qnn.Session, fqn: str = "n") -> int:
    return int(session.read_state(fqn)[0])


def resealed(file: bytes) -> bytes:
    """The file with the checksum that it should have."""
    crc = zlib.crc32(file[16:], zlib.crc32(file[:12]))
    return file[:12] + struct.pack("<I", crc) + file[16:]


def test_a_file_says_what_is_in_it(
    session: qnn.Session, program_file: MakeFile, tmp_path: Path
) -> None:
    session.save_state(tmp_path / "state")
    assert _native.inspect_state(tmp_path / "state") == {
        "version": (1, 0),
        "program_sha256": program_sha256(program_file()),
        "nbytes": (tmp_path / "state").stat().st_size,
        "state": [
            {
                "fqn": "n",
                "shape": (4,),
                "scalar_type": 4,
                "stored_dtype": 0x032,
                "nbytes": 16,
                "encoding": None,
            }
        ],
    }


def test_the_name_of_a_program_does_not_depend_on_its_seal(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    sealed, plain = program_file(), tmp_path / "plain.pte"
    plain.write_bytes(sealed.read_bytes()[:-64])
    assert program_sha256(plain) == program_sha256(sealed)
    session = qnn.load(plain, qnn_libraries=null_qnn)
    plain.unlink()
    plain.write_bytes(b"another file")  # the one that was loaded is still mapped
    session.save_state(tmp_path / "state")
    assert _native.inspect_state(tmp_path / "state")["program_sha256"] == program_sha256(sealed)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_a_damaged_file_is_refused_and_nothing_changes(
    session: qnn.Session, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "state"
    session.write_state("n", torch.tensor([1, 2, 3, 4]))
    session.save_state(path)
    good = path.read_bytes()
    session.write_state("n", torch.tensor([5, 6, 7, 8]))
    kind = data.draw(st.sampled_from(["cut", "flip", "extend", "zero"]))
    at = data.draw(st.integers(0, len(good) - 1))
    if kind == "cut":
        bad = good[:at]
    elif kind == "extend":
        bad = good + data.draw(st.binary(min_size=1, max_size=9))
    elif kind == "zero":
        bad = bytes(at) + good[at:]
    else:
        bad = good[:at] + bytes([good[at] ^ 1 << data.draw(st.integers(0, 7))]) + good[at + 1 :]
    if bad == good:
        return
    path.write_bytes(bad)
    with pytest.raises(qnn.StateError, match="cannot load state from"):
        session.load_state(path)
    assert session.read_state("n").tolist() == [5, 6, 7, 8]


def test_each_bit_of_a_file_matters(session: qnn.Session, tmp_path: Path) -> None:
    path = tmp_path / "state"
    session.save_state(path)
    good = path.read_bytes()
    session(int32())
    for bit in range(8 * len(good)):
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(qnn.StateError):
            session.load_state(path)
    assert value(session) == 1


@pytest.mark.parametrize(("at", "version"), [(8, "2.0"), (10, "1.1")])
def test_a_newer_version_is_refused_though_it_is_intact(
    session: qnn.Session, tmp_path: Path, at: int, version: str
) -> None:
    path = tmp_path / "state"
    session.save_state(path)
    newer = bytearray(path.read_bytes())
    newer[at] += 1
    path.write_bytes(resealed(bytes(newer)))
    with pytest.raises(qnn.StateError, match=rf"format is {version}, this version reads 1\.0"):
        session.load_state(path)


def test_an_intact_file_with_other_buffers_is_refused(session: qnn.Session, tmp_path: Path) -> None:
    path = tmp_path / "state"
    session.save_state(path)
    good = path.read_bytes()
    at = good.index(b"\1\0\0\0n")  # the name, behind its length
    for bad, message in (
        (good[: at + 4] + b"m" + good[at + 5 :], "buffer m is not in this program"),
        (good[: at - 4] + bytes(4), "buffer n is not in the file"),
        (good + b"1234", "do not add up"),
    ):
        path.write_bytes(resealed(bad[:16] + struct.pack("<Q", len(bad)) + bad[24:]))
        with pytest.raises(qnn.StateError, match=message):
            session.load_state(path)
    assert value(session) == 0


def test_a_file_that_is_missing_is_named(session: qnn.Session, tmp_path: Path) -> None:
    with pytest.raises(qnn.QnnError, match=r"nowhere: No such file"):
        session.load_state(tmp_path / "nowhere")
    with pytest.raises(qnn.QnnError, match="directory"):
        session.load_state(tmp_path)


# ------------------------------------------------------------------------------------- writing


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond that: like a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_leaves_the_old_file_alone(
    program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    states = (counter(), state("big", FLOAT32, 0x232, (1 << 16,)))
    file = program_file("wide", Plan({"forward": Method(Step(), (int32(),), states)}))
    session = qnn.load(file, qnn_libraries=null_qnn)
    path = tmp_path / "state"
    session.save_state(path)
    old = path.read_bytes()
    session(int32())
    for size in (0, 100, 4096, 200_000):
        with (
            largest_file(size),
            pytest.raises(qnn.QnnError, match=rf"cannot write {path}: File too large"),
        ):
            session.save_state(path)
        assert path.read_bytes() == old
        assert list(tmp_path.iterdir()) == [path]
    session.save_state(path)
    session.reset_state()
    session.load_state(path)
    assert value(session) == 1


def test_only_files_are_replaced(session: qnn.Session, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    for path in (fifo, tmp_path, Path("/dev/null")):
        with pytest.raises(qnn.QnnError, match=f"cannot write {path}"):
            session.save_state(path)
        assert not path.is_file()
    with pytest.raises(qnn.QnnError, match="Not a directory"):
        session.save_state(Path("/dev/null/state"))


def test_the_mode_is_that_of_other_files_and_stays(session: qnn.Session, tmp_path: Path) -> None:
    path, other = tmp_path / "state", tmp_path / "other"
    other.touch()
    session.save_state(path)
    assert path.stat().st_mode == other.stat().st_mode
    path.chmod(0o600)
    session.save_state(path)
    assert path.stat().st_mode & 0o777 == 0o600


SAVE_UNTIL_KILLED = """
import os, random, signal, sys, time
import torch, executorch_qnn as qnn

program, libraries, path, rounds = *sys.argv[1:4], int(sys.argv[4])
session = qnn.load(program, qnn_libraries=libraries)
started = time.perf_counter()
for _ in range(3):
    session.save_state(path)
seconds = (time.perf_counter() - started) / 3
rng, last, left = random.Random(6), 0, 0
for _ in range(rounds):
    child = os.fork()
    if child == 0:
        for number in range(last + 1, 1 << 20):
            session.write_state("big", torch.full((1 << 19,), float(number)))
            session.save_state(path)
    time.sleep(rng.random() * 5 * seconds)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    session.load_state(path)
    values = session.read_state("big")
    assert bool((values == values[0]).all()), "two states in one file"
    assert values[0] >= last, "an older file came back"
    last = int(values[0])
    for name in os.listdir(os.path.dirname(path)):
        if name != "state":
            assert name.startswith(".state.") and name.endswith(".tmp"), name
            left += 1
            os.unlink(os.path.join(os.path.dirname(path), name))
assert last > 0
print(rounds, "writers killed,", last, "states saved,", left, "temporary files")
"""


@pytest.mark.parametrize(
    "rounds", [20, pytest.param(200, marks=pytest.mark.slow)], ids="{} times".format
)
def test_a_session_killed_while_it_saves_leaves_the_old_or_the_new_file(
    program_file: MakeFile, null_qnn: str, tmp_path: Path, rounds: int
) -> None:
    states = (state("big", FLOAT32, 0x232, (1 << 19,)),)
    file = program_file("killed", Plan({"forward": Method(Step(), (int32(),), states)}))
    arguments = [str(file), null_qnn, str(tmp_path / "state"), str(rounds)]
    done = subprocess.run(
        [sys.executable, "-c", SAVE_UNTIL_KILLED, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)


@pytest.mark.parametrize(
    "rounds", [20, pytest.param(200, marks=pytest.mark.slow)], ids="{} times".format
)
def test_a_step_of_the_runner_that_is_killed_has_happened_or_not(
    program_file: MakeFile, null_qnn: str, tmp_path: Path, rounds: int
) -> None:
    states = (counter(), state("big", FLOAT32, 0x232, (1 << 19,)))
    file = program_file("stepped", Plan({"forward": Method(Step(), (int32(),), states)}))
    path, inputs = tmp_path / "state", tmp_path / "x.bin"
    inputs.write_bytes(bytes(16))
    session = qnn.load(file, qnn_libraries=null_qnn)
    session.save_state(path)
    command = [RUNNER, "--model", file, "--qnn-libraries", null_qnn, "--inputs", inputs]
    command += ["--state-in", path, "--state-out", path]
    started = time.perf_counter()
    subprocess.run(command, check=True)
    seconds = time.perf_counter() - started
    rng, count, killed = random.Random(7), 1, 0
    for _ in range(rounds):
        runner = subprocess.Popen(command)
        time.sleep(rng.random() * seconds * 1.1)
        runner.kill()
        code = runner.wait()
        assert code in (0, -signal.SIGKILL)
        killed += code != 0
        session.load_state(path)
        assert value(session) in ([(count + 1) % 256] if code == 0 else [count, (count + 1) % 256])
        count = value(session)
    assert killed > 0
