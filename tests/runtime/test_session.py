# SPDX-License-Identifier: BSD-3-Clause
"""Sessions on the null provider: what they own, share, copy and give back."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import executorch_qnn as qnn

from .programs import DOUBLE_BUFFER, FLOAT32, Method, OnBothSides, Plan, Step, counter, int32, state

MakeFile = Callable[..., Path]


def value(session: qnn.Session, fqn: str = "n") -> int:
    return int(session.read_state(fqn)[0])


@pytest.fixture
def file(program_file: MakeFile) -> Path:
    return program_file()


@pytest.fixture
def session(file: Path, null_qnn: str) -> qnn.Session:
    return qnn.load(file, qnn_libraries=null_qnn)


def test_a_call_returns_what_the_graph_computes(session: qnn.Session) -> None:
    y = session(int32(7, 8, 9, 10))
    assert y.dtype == torch.int32
    assert y.tolist() == [[8, 8, 9, 10]]
    assert session.run("forward", int32()).tolist() == [[1, 0, 0, 0]]
    assert y.tolist() == [[8, 8, 9, 10]], "outputs are fresh tensors"


def test_cpu_ops_run_around_the_delegate_and_outputs_keep_their_structure(
    program_file: MakeFile, null_qnn: str
) -> None:
    plan = Plan({"forward": Method(OnBothSides(), (int32(),))})
    session = qnn.load(program_file("mixed", plan), qnn_libraries=null_qnn)
    outputs = session(int32(2, 3, 4, 5))
    # Without a tree in the file they come as a tuple, in the order of the method's outputs.
    assert [t.tolist() for t in outputs] == [[[8, 4, 10, 8]], [[4, 2, 5, 4]]]


def test_an_in_place_buffer_has_one_address_and_no_byte_of_it_is_copied(
    session: qnn.Session,
) -> None:
    copied = session._native.state_bytes_copied
    addresses = set()
    for _ in range(5):
        session(int32())
        info = session.state()["n"]
        assert info.binding == "in_place"
        assert info.address == info.input_address == info.output_address != 0
        addresses.add(info.address)
    assert len(addresses) == 1
    assert session._native.state_bytes_copied == copied
    assert value(session) == 5


def test_state_info_describes_the_buffer(session: qnn.Session) -> None:
    info = session.state()["n"]
    assert (info.shape, info.dtype, info.stored) == ((4,), torch.int64, "int32")
    assert (info.nbytes, info.encoding) == (16, None)


def test_a_double_buffer_moves_and_keeps_its_value(program_file: MakeFile, null_qnn: str) -> None:
    plan = Plan({"forward": Method(Step(), (int32(),), (counter("d", DOUBLE_BUFFER),))})
    session = qnn.load(program_file("double", plan), qnn_libraries=null_qnn)
    seen = []
    for call in range(1, 5):
        session(int32())
        assert value(session, "d") == call
        info = session.state()["d"]
        assert info.input_address != info.output_address
        seen.append(info.address)
    assert seen[0] == seen[2] != seen[1] == seen[3]


def test_initial_values_are_there_at_load_and_after_reset(
    program_file: MakeFile, null_qnn: str
) -> None:
    initial = bytes([9, 0, 0, 0, 255, 255, 255, 255, 3, 0, 0, 0, 0, 0, 0, 0])
    states = (counter(initial="start"), counter("z"))
    plan = Plan({"forward": Method(Step(), (int32(),), states)}, {"start": initial})
    file = program_file("initial", plan)
    for _ in range(2):
        session = qnn.load(file, qnn_libraries=null_qnn)
        assert session.read_state("n").tolist() == [9, -1, 3, 0]
        assert session.read_state("z").tolist() == [0, 0, 0, 0]
        session(int32())
        assert (value(session), value(session, "z")) == (10, 1)
        session.reset_state()
        assert (value(session), value(session, "z")) == (9, 0)


def test_state_can_be_written(session: qnn.Session) -> None:
    session.write_state("n", torch.tensor([[5, 6], [7, 8]]).T.reshape(4))
    session(int32())
    assert session.read_state("n").tolist() == [6, 7, 6, 8]


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(4, dtype=torch.int32),
        torch.zeros(5, dtype=torch.int64),
        torch.zeros(2, 2, dtype=torch.int64),
        torch.full((4,), 2**31),
    ],
)
def test_a_write_that_does_not_fit_changes_nothing(
    session: qnn.Session, values: torch.Tensor
) -> None:
    session.write_state("n", torch.arange(4))
    with pytest.raises(qnn.StateError, match="n"):
        session.write_state("n", values)
    assert session.read_state("n").tolist() == [0, 1, 2, 3]


def test_an_unknown_buffer_is_named_with_those_there_are(session: qnn.Session) -> None:
    for call in (session.read_state, lambda name: session.write_state(name, torch.zeros(1))):
        with pytest.raises(qnn.StateError, match=r"'k'; the program has n"):
            call("k")


def test_sessions_of_one_file_are_independent(file: Path, null_qnn: str) -> None:
    a, b = (qnn.load(file, qnn_libraries=null_qnn) for _ in range(2))
    a(int32()), a(int32()), b(int32())
    assert (value(a), value(b)) == (2, 1)
    assert a.state()["n"].address != b.state()["n"].address


def test_sessions_may_end_in_any_order(file: Path, null_qnn: str) -> None:
    for order in itertools.permutations("abc"):
        sessions = {"a": qnn.load(file, qnn_libraries=null_qnn)}
        sessions["b"] = qnn.load(file, qnn_libraries=null_qnn)
        sessions["c"] = sessions["a"].fork()
        for calls, name in enumerate(order, start=1):
            for session in sessions.values():
                session(int32())
                assert value(session) == calls
            del session, sessions[name]


def test_a_fork_starts_from_the_state_and_goes_its_own_way(session: qnn.Session) -> None:
    session(int32()), session(int32())
    twin = session.fork()
    assert value(twin) == 2
    twin(int32())
    assert (value(session), value(twin)) == (2, 3)
    session.reset_state()
    assert value(twin) == 3
    twin.reset_state()
    assert value(twin) == 0


def test_methods_share_their_buffers(program_file: MakeFile, null_qnn: str) -> None:
    method = Method(Step(), (int32(),))
    file = program_file("methods", Plan({"prefill": method, "decode": method}))
    session = qnn.load(file, qnn_libraries=null_qnn)
    assert session.methods == ["decode", "prefill"] or session.methods == ["prefill", "decode"]
    session.run("prefill", int32()), session.run("decode", int32())
    assert list(session.state()) == ["n"]
    assert value(session) == 2
    with pytest.raises(qnn.StateError, match=r"no method 'forward'; the program has"):
        session(int32())


def test_partitions_of_a_method_share_their_buffers(program_file: MakeFile, null_qnn: str) -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = torch.bitwise_xor(x + x, 0)
            return y + y

    session = qnn.load(
        program_file("two", Plan({"forward": Method(Two(), (int32(),))})), qnn_libraries=null_qnn
    )
    assert session(int32()).tolist() == [[2, 0, 0, 0]]
    assert value(session) == 2


# ------------------------------------------------------------------------------------- files


def test_saved_state_is_restored_in_another_session(
    session: qnn.Session, file: Path, null_qnn: str, tmp_path: Path
) -> None:
    for _ in range(3):
        session(int32())
    session.save_state(tmp_path / "state")
    other = qnn.load(file, qnn_libraries=null_qnn)
    other.load_state(tmp_path / "state")
    assert value(other) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["state"], "no temporary file is left"


def test_state_of_another_program_is_refused(
    session: qnn.Session, program_file: MakeFile, null_qnn: str, tmp_path: Path
) -> None:
    plan = Plan({"forward": Method(Step(), (int32(1, 1, 1, 1),), (counter("n"), counter("m")))})
    other = qnn.load(program_file("other", plan), qnn_libraries=null_qnn)
    other(int32())
    other.save_state(tmp_path / "state")
    with pytest.raises(qnn.StateError, match="another program"):
        session.load_state(tmp_path / "state")
    assert value(session) == 0


def test_a_damaged_state_file_leaves_the_state_alone(session: qnn.Session, tmp_path: Path) -> None:
    session(int32())
    path = tmp_path / "state"
    session.save_state(path)
    good = path.read_bytes()
    session(int32())
    for damaged in (good[:-1], good[:20], b"", b"nonsense", good[:-1] + bytes([good[-1] ^ 1])):
        path.write_bytes(damaged)
        with pytest.raises(qnn.QnnError, match="state"):
            session.load_state(path)
        assert value(session) == 2


# ------------------------------------------------------------------------------------- lifetime


def rss() -> int:
    """Resident bytes of this process, without what malloc keeps for later."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_a_thousand_loads_and_unloads_grow_nothing(program_file: MakeFile, null_qnn: str) -> None:
    big = state("big", FLOAT32, 0x232, (1 << 20,))
    plan = Plan({"forward": Method(Step(), (int32(),), (big,))})
    file = program_file("big", plan)
    for i in range(1000):
        session = qnn.load(file, qnn_libraries=null_qnn)
        if i % 50 == 0:
            session(int32())
        if i == 200:
            before = rss()
        del session
    assert rss() - before < 2 << 20, "one of 800 leaked states of 4 MiB would show"


def test_sessions_run_in_parallel_and_calls_on_one_wait(file: Path, null_qnn: str) -> None:
    shared, own = qnn.load(file, qnn_libraries=null_qnn), []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            mine = qnn.load(file, qnn_libraries=null_qnn)
            own.append(mine)
            for i in range(100):
                assert mine(int32(i, i, 0, 0)).tolist() == [[i + 1, i, 0, 0]]
                assert shared(int32(i, 1, 0, 0)).tolist() == [[i + 1, 1, 0, 0]]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    # The null graph adds one to a byte.
    assert [value(s) for s in own] == [100] * 4
    assert value(shared) == 400 % 256
