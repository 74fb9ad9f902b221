# SPDX-License-Identifier: BSD-3-Clause
"""Sessions on the real libraries: values at the boundary, memory, threads, buffers of the host."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn

from .test_session import rss

INF = float("inf")
NAN = float("nan")


class Accumulator(nn.Module):
    """A buffer that starts at 0.5."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.register_buffer("a", torch.full(shape, 0.5))

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(x)
        return self.a * 2.0


class HostBuffer(nn.Module):
    """`h` is written by an op that only the CPU has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.full((2,), 0.25))
        self.register_buffer("d", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(torch.cosh(self.h) + x)
        self.d.add_(x)
        return self.h + self.d


class TwoPartitions(nn.Module):
    """An op of the CPU between two partitions; the second one takes `at` as int32."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("a", torch.zeros(1, 4))
        self.register_buffer("b", torch.zeros(1, 4))
        self.register_buffer("table", torch.arange(8.0).reshape(8, 1), persistent=False)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.a.add_(x)
        self.b.add_(torch.cosh(self.a))
        return self.b + self.table[at] * 1.0


@pytest.fixture(scope="module")
def lowered(tmp_path_factory: pytest.TempPathFactory, qnn_libraries: str) -> Callable[..., Path]:
    """Lowers a model and says where its file is."""
    folder = tmp_path_factory.mktemp("lowered")

    def lower(model: nn.Module, *inputs: Any) -> Path:
        path = folder / f"{len(list(folder.iterdir()))}.pte"
        qnn.lower(model.eval(), inputs, target="SM8650", qnn_libraries=qnn_libraries).save(path)
        return path

    return lower


@pytest.fixture(scope="module")
def accumulator(lowered: Callable[..., Path]) -> Path:
    return lowered(Accumulator(1, 4), torch.zeros(1, 4))


def test_nan_and_infinity_are_legal_and_stay_where_they_are(
    accumulator: Path, qnn_libraries: str
) -> None:
    session = qnn.load(accumulator, qnn_libraries=qnn_libraries)
    y = session(torch.tensor([[NAN, INF, -INF, 1.0]]))
    assert y[0, 0].isnan()
    assert y[0, 3] == 3.0
    assert session.read_state("a")[0, 0].isnan()
    y = session(torch.ones(1, 4))
    assert y[0, 0].isnan()
    assert y[0, 3] == 5.0
    session.reset_state()
    assert session(torch.ones(1, 4)).tolist() == [[3.0] * 4]
    # The boundary itself keeps them bit by bit; what an op makes of infinity is the NPU's business.
    session.write_state("a", torch.tensor([[NAN, INF, -INF, -0.0]]))
    assert str(session.read_state("a").tolist()) == "[[nan, inf, -inf, -0.0]]"


def test_finite_values_stay_finite(accumulator: Path, qnn_libraries: str) -> None:
    session = qnn.load(accumulator, qnn_libraries=qnn_libraries)
    session.write_state("a", torch.zeros(1, 4))
    session(torch.tensor([[-1e9, 3e38, 65519.0, 1e-9]]))
    assert session.read_state("a").tolist() == [[-65504.0, 65504.0, 65504.0, 0.0]]


def test_a_buffer_starts_from_its_value_on_any_heap(accumulator: Path, qnn_libraries: str) -> None:
    script = (
        "import sys, torch, executorch_qnn as qnn\n"
        "for _ in range(2):\n"
        "    session = qnn.load(sys.argv[1], qnn_libraries=sys.argv[2])\n"
        "    print(session(torch.ones(1, 4)).tolist())"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(accumulator), qnn_libraries],
        env=os.environ | {"MALLOC_PERTURB_": "128"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == 2 * "[[3.0, 3.0, 3.0, 3.0]]\n"


def test_loading_and_unloading_grows_nothing(
    lowered: Callable[..., Path], qnn_libraries: str
) -> None:
    file = lowered(Accumulator(1, 2048, 1024), torch.zeros(1, 1, 1))
    for i in range(60):
        session = qnn.load(file, qnn_libraries=qnn_libraries)
        if i % 10 == 0:
            session(torch.zeros(1, 1, 1))
        del session
        if i == 20:
            before = rss()
    assert rss() - before < 1 << 20, "the state alone has 4 MiB"


def test_sessions_in_threads_give_the_values_they_give_alone(
    accumulator: Path, qnn_libraries: str
) -> None:
    wrong: list[str] = []

    def work(step: float) -> None:
        session = qnn.load(accumulator, qnn_libraries=qnn_libraries)
        for i in range(1, 50):
            y = session(torch.full((1, 4), step))
            if y.tolist() != [[1 + 2 * i * step] * 4]:
                wrong.append(f"step {step}, call {i}: {y.tolist()}")

    threads = [threading.Thread(target=work, args=(step,)) for step in (0.5, 1.0, 2.0, -1.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_buffer_that_the_cpu_touches_is_the_session_s_too(
    lowered: Callable[..., Path], qnn_libraries: str, tmp_path: Path
) -> None:
    file = lowered(HostBuffer(), torch.zeros(2))
    ctypes.CDLL(None).malloc_trim(0)
    session = qnn.load(file, qnn_libraries=qnn_libraries)
    assert list(session.state()) == ["d", "h"]
    assert [info.binding == "host" for info in session.state().values()] == [False, True]
    x, model = torch.tensor([0.5, -1.0]), HostBuffer()
    wants, values = [], []
    for _ in range(3):
        wants.append(model(x).clone())
        values.append(model.h.clone())

    def check(session: qnn.Session, calls: int) -> None:
        torch.testing.assert_close(session(x), wants[calls - 1], rtol=4e-3, atol=4e-3)
        assert_h(session, calls)

    def assert_h(session: qnn.Session, calls: int) -> None:
        want = values[calls - 1] if calls else torch.full((2,), 0.25)
        torch.testing.assert_close(session.read_state("h"), want, rtol=4e-3, atol=4e-3)

    check(session, 1)
    check(session, 2)
    session.save_state(tmp_path / "state")
    twin = session.fork()
    check(twin, 3)
    assert_h(session, 2)
    session.reset_state()
    assert_h(session, 0)
    check(session, 1)
    session.load_state(tmp_path / "state")
    check(session, 3)
    session.write_state("h", torch.full((2,), 0.25))
    session.write_state("d", torch.zeros(2))
    check(session, 1)
    check(qnn.load(file, qnn_libraries=qnn_libraries), 1)


def test_a_nested_buffer_of_the_host_starts_from_its_value(
    lowered: Callable[..., Path], qnn_libraries: str
) -> None:
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.ModuleList([HostBuffer()])

        def forward(self, x: Tensor) -> Tensor:
            return self.inner[0](x) * 0.5

    session = qnn.load(lowered(Nested(), torch.zeros(2)), qnn_libraries=qnn_libraries)
    assert session.state()["inner.0.h"].binding == "host"
    for twin in (session, session.fork()):
        assert twin.read_state("inner.0.h").tolist() == [0.25, 0.25]
    x, model = torch.tensor([0.5, -1.0]), Nested()
    for _ in range(2):
        torch.testing.assert_close(session(x), model(x), rtol=4e-3, atol=4e-3)


def test_a_value_that_only_the_second_partition_refuses_leaves_all_buffers_alone(
    lowered: Callable[..., Path], qnn_libraries: str
) -> None:
    file = lowered(TwoPartitions(), torch.zeros(1, 4), torch.tensor([0]))
    session = qnn.load(file, qnn_libraries=qnn_libraries)
    assert "host" not in {info.binding for info in session.state().values()}
    x, model = torch.full((1, 4), 0.5), TwoPartitions()
    for call in range(3):
        before = {fqn: session.read_state(fqn) for fqn in session.state()}
        for wide in (2**31, -(2**40)):
            with pytest.raises(qnn.StateError, match=r"does not fit into 32 bits$"):
                session(x, torch.tensor([wide]))
            for fqn, value in before.items():
                assert torch.equal(session.read_state(fqn), value), fqn
        at = torch.tensor([call])
        torch.testing.assert_close(session(x, at), model(x, at), rtol=4e-3, atol=4e-3)
