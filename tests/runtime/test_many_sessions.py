# SPDX-License-Identifier: BSD-3-Clause
"""Many sessions on the simulator: what they share, what they cost, what they leave behind."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn

from .test_session import rss
from .test_simulator import Accumulator, lowered  # noqa: F401 (a fixture)

MIB = 1 << 20
Lower = Callable[..., Path]


class Heavy(nn.Module):
    """8 MiB of weights, 2 KiB of state."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(1024, 4096, bias=False)
        self.register_buffer("calls", torch.zeros(1, 1024))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(x)
        return self.linear(self.calls)


class Ring(nn.Module):
    """Three buffers of three kinds: an accumulator, a delay line, an integer counter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.full((1, 64), 0.5))
        self.register_buffer("line", torch.zeros(8, 64))
        self.register_buffer("n", torch.zeros(1, dtype=torch.int32))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        oldest = self.line[:1] + 0.0
        self.line.copy_(torch.cat([self.line[1:], x]))
        self.a.add_(x)
        self.n.add_(1)
        return self.a + oldest, oldest * 1.0, self.n + 0


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@contextmanager
def flat(part: float) -> Iterator[None]:
    """Neither memory nor descriptors grow inside, apart from that part of the memory."""
    before, files = rss(), descriptors()
    yield
    grown = rss() - before
    print(f"RSS {before / MIB:.1f} MiB, grown by {grown / MIB:+.2f} ({grown / before:+.2%})")
    assert grown < part * before
    assert descriptors() == files


def test_weights_and_context_are_there_once(lowered: Lower, qnn_libraries: str) -> None:  # noqa: F811
    file = lowered(Heavy(), torch.zeros(1, 1024))
    x = torch.full((1, 1024), 0.25)
    first = qnn.load(file, qnn_libraries=qnn_libraries)
    want = first(x)
    first.reset_state()
    before = rss()
    sessions = [qnn.load(file, qnn_libraries=qnn_libraries) for _ in range(10)]
    sessions += [session.fork() for session in sessions]
    grown = (rss() - before) / len(sessions)
    print(f"a session takes {grown / 1024:.0f} KiB")
    assert grown < MIB / 2, "a copy of the weights has 8 MiB"
    addresses = {session.state()["calls"].address for session in [first, *sessions]}
    assert len(addresses) == 21
    for i, session in enumerate(sessions[:3]):
        for _ in range(i):
            session(x)
    for i, session in enumerate(sessions[:3]):
        assert session.read_state("calls")[0, 0] == 0.25 * i
    for session in (first, sessions[0], sessions[-1]):
        torch.testing.assert_close(session(x), want, rtol=0, atol=0)


def run_a_while(make: Callable[[], qnn.Session], seed: int, calls: int) -> list[str]:
    """Steps a session of `Ring`, forked and reloaded on the way; returns what was wrong."""
    session, model, wrong = make(), Ring(), []
    generator = torch.Generator().manual_seed(seed)
    for call in range(calls):
        # Multiples of 1/8 stay exact in fp16.
        x = torch.randint(-4, 5, (1, 64), generator=generator) / 8
        for got, want in zip(session(x), model(x), strict=True):
            if not torch.equal(got, want):
                wrong.append(f"seed {seed}, call {call}: {got} instead of {want}")
        if call % 10 == 4:
            session = session.fork()
        if call % 25 == 24:
            session, model = make(), Ring()
    return wrong


def test_eight_threads_with_a_session_each_get_right_values(
    lowered: Lower,  # noqa: F811
    qnn_libraries: str,
) -> None:
    file = lowered(Ring(), torch.zeros(1, 64))
    wrong: list[str] = []

    def work(seed: int) -> None:
        wrong.extend(run_a_while(lambda: qnn.load(file, qnn_libraries=qnn_libraries), seed, 60))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[:3]


def test_a_fork_while_the_parent_runs_has_all_of_a_call_or_nothing(
    lowered: Lower,  # noqa: F811
    qnn_libraries: str,
) -> None:
    file = lowered(Ring(), torch.zeros(1, 64))
    parent = qnn.load(file, qnn_libraries=qnn_libraries)
    x = torch.full((1, 64), 0.125)
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            parent(x)
            if parent.read_state("n") == 100:
                parent.reset_state()

    runner = threading.Thread(target=run)
    runner.start()
    try:
        for _ in range(20):
            twin = parent.fork()
            calls = int(twin.read_state("n"))
            assert (twin.read_state("a") == 0.5 + 0.125 * calls).all()
            filled = (twin.read_state("line") == 0.125).sum(dim=0)
            assert (filled == min(calls, 8)).all()
            model = Ring()
            for _ in range(calls):
                model(x)
            torch.testing.assert_close(twin(x), model(x), rtol=0, atol=0)
    finally:
        done.set()
        runner.join()


PRINT_WHILE_LOADING = """
import os, sys, threading, torch, executorch_qnn as qnn

session = qnn.load(sys.argv[1], qnn_libraries=sys.argv[2])
del session  # the next one loads the context again
done = threading.Event()

def load():
    for _ in range(20):
        qnn.load(sys.argv[1], qnn_libraries=sys.argv[2])
    done.set()

thread = threading.Thread(target=load)
thread.start()
lines = 0
while not done.is_set():
    os.write(1, b"line\\n")
    lines += 1
thread.join()
print(lines, file=sys.stderr)
"""


def test_what_other_threads_print_while_a_session_loads_is_not_lost(
    lowered: Lower,  # noqa: F811
    qnn_libraries: str,
) -> None:
    file = lowered(Heavy(), torch.zeros(1, 1024))
    done = subprocess.run(
        [sys.executable, "-c", PRINT_WHILE_LOADING, file, qnn_libraries],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "line\n" * int(done.stderr.split()[-1])


@pytest.mark.parametrize(
    "cycles",
    [pytest.param(200, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.long)],
)
def test_many_cycles_and_a_hundred_forks_leave_nothing(
    cycles: int,
    lowered: Lower,  # noqa: F811
    qnn_libraries: str,
) -> None:
    big = lowered(Accumulator(1, 1024, 256), torch.zeros(1, 1, 1))  # 512 KiB of state
    small = lowered(Ring(), torch.zeros(1, 64))

    def cycle(i: int) -> None:
        if i % 2:
            session = qnn.load(big, qnn_libraries=qnn_libraries)
            assert session(torch.ones(1, 1, 1))[0, 0, 0] == 3
        else:
            session = qnn.load(small, qnn_libraries=qnn_libraries)
            assert session(torch.ones(1, 64))[2] == 1

    for i in range(100):
        cycle(i)
    with flat(0.02):
        for i in range(cycles):
            cycle(i)

    def forks(count: int) -> None:
        session = qnn.load(big, qnn_libraries=qnn_libraries)
        for i in range(count):
            session(torch.zeros(1, 1, 1))
            session = session.fork() if i % 2 else [session.fork(), session.fork()][1]
        assert session.read_state("a")[0, 0, 0] == 0.5

    forks(20)
    with flat(0.02):
        forks(100)
