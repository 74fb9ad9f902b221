# SPDX-License-Identifier: BSD-3-Clause
"""State that several partitions, several methods, or delegates and the CPU touch.

Every program runs through our session and through ExecuTorch's own runtime, call by call against
eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn

from .models import Model, _noise

Inputs = tuple[Tensor, ...]
Methods = dict[str, tuple[nn.Module, Inputs]]
Calls = Sequence[tuple[str, Inputs]]


@dataclass(frozen=True)
class Check:
    """Lowers methods and compares each call of a program with eager, in both runtimes."""

    folder: Path
    qnn_libraries: str

    def __call__(self, methods: Methods, calls: Calls, **options: Any) -> qnn.Program:
        eager = copy.deepcopy(methods)  # one copy of all, so that shared modules stay shared
        program = qnn.lower(methods, target="SM8650", qnn_libraries=self.qnn_libraries, **options)
        path = self.folder / "program.pte"
        program.save(path)
        session = qnn.load(path, qnn_libraries=self.qnn_libraries)
        stock = self._stock(path)
        for i, (name, inputs) in enumerate(calls):
            with torch.no_grad():
                want = pytree.tree_map(torch.clone, eager[name][0](*inputs))
            assert_close(session.run(name, *inputs), want, f"call {i}, {name}")
            assert_close(stock(name, inputs), want, f"call {i}, {name}, stock runtime")
        for module, _ in eager.values():
            for fqn, value in module.named_buffers():
                if fqn in session.state():
                    assert_close(session.read_state(fqn), value, f"buffer {fqn}")
        return program

    def forward(self, model: nn.Module, *calls: Inputs, **options: Any) -> qnn.Program:
        methods = {"forward": (model.eval(), calls[0])}
        return self(methods, [("forward", c) for c in calls], **options)

    def _stock(self, path: Path) -> Callable[[str, Inputs], Any]:
        from executorch.runtime import Runtime

        qnn.register(self.qnn_libraries)
        program = Runtime.get().load_program(path)
        methods = {name: program.load_method(name) for name in program.method_names}
        return lambda name, inputs: methods[name].execute(inputs)


def assert_close(got: Any, want: Any, where: str) -> None:
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want), where
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), where
        torch.testing.assert_close(
            g,
            w,
            rtol=4e-3,
            atol=8e-3,
            msg=lambda m: f"{where}: {m}",  # noqa: B023
        )


@pytest.fixture
def check(tmp_path: Path, qnn_libraries: str) -> Check:
    return Check(tmp_path, qnn_libraries)


def steps(*shape: int, n: int = 4) -> Iterator[Inputs]:
    return ((_noise(i, *shape),) for i in range(n))


def owners(program: qnn.Program, method: str = "forward") -> dict[str, tuple[str, str]]:
    """Buffer to its owner and binding."""
    return {s.fqn: (s.owner, s.binding) for s in program.report.methods[method].state}


def reason(program: qnn.Program, fqn: str, method: str = "forward") -> str:
    return next(s.reason for s in program.report.methods[method].state if s.fqn == fqn)


RAMP = torch.arange(12.0).reshape(3, 4) / 8
cpu = torch.cosh  # has no row in the op table


# -- several partitions ---------------------------------------------------------------------------


def read_then_written(s: Model, x: Tensor) -> Tensor:
    """Case 14: what is read here goes through the CPU into what is written there."""
    u = cpu(torch.tanh(x + s.a))
    s.a.copy_(torch.sigmoid(u * 0.5))
    return u * 2.0


def read_beside(s: Model, x: Tensor) -> Tensor:
    """No data lead from the reader behind the CPU op to the writer: only the order of calls."""
    late = cpu(torch.tanh(x)) * 0.25 + s.a
    s.a.mul_(0.5).add_(x)
    return late


def read_after(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The old value is needed behind a CPU op that needs the new one."""
    old = s.a.clone()
    s.a.mul_(0.5).add_(x)
    return cpu(torch.tanh(s.a)) * 0.25 + old * 2.0, s.a - x


def written_only_by_itself(s: Model, x: Tensor) -> Tensor:
    """The writing partition reads nothing of the buffer and returns nothing."""
    y = cpu(torch.tanh(x)) * 0.5 + s.a
    s.a.copy_(cpu(torch.tanh(y)) * 0.25)
    return cpu(torch.tanh(y))


def crossed(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each buffer's old value is needed behind a CPU op that needs the other's new value."""
    a, b = s.a.clone(), s.b.clone()
    s.a.mul_(0.5).add_(x)
    s.b.mul_(0.25).sub_(x)
    return cpu(torch.tanh(s.b)) * 0.2 + a, cpu(torch.tanh(s.a)) * 0.2 + b


def swapped_far(s: Model, x: Tensor) -> Tensor:
    """Swapped, and both read behind a CPU op."""
    y = cpu(torch.tanh(x)) * 0.2
    out = y * s.a - s.b
    a = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(a)
    return out


def rotated(s: Model, x: Tensor) -> Tensor:
    y = cpu(torch.tanh(x)) * 0.2 + s.b
    a = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(s.c)
    s.c.copy_(a + x)
    return y + s.c


def old_returned(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.a.clone()
    s.a.copy_(cpu(torch.tanh(x + s.b)) * 0.5 + s.b)
    s.b.copy_(old)
    return old, s.a * 1.0


def shifted_far(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two regions that change places, read by another delegate."""
    before = s.a * 1.0
    y = cpu(torch.tanh(x)) * 0.1
    s.a.copy_(torch.cat([s.a[1:], y[:1] * 1.0]))
    return before, s.a * 1.0


def chain(s: Model, x: Tensor) -> Tensor:
    for name in "abc":
        b = getattr(s, name)
        x = cpu(torch.tanh(x + b)) * 0.3
        b.mul_(0.5).add_(x)
    return x


@pytest.mark.parametrize(
    "update",
    [
        read_then_written,
        read_beside,
        read_after,
        written_only_by_itself,
        crossed,
        swapped_far,
        rotated,
        old_returned,
        shifted_far,
        chain,
    ],
)
def test_a_buffer_in_several_partitions_is_one_slot(
    update: Callable[..., Any], check: Check
) -> None:
    model = Model(update, a=RAMP, b=-RAMP, c=RAMP + 1.0)
    program = check.forward(model, *steps(3, 4, n=5))
    assert len(program.report.methods["forward"].delegates) > 1
    assert {owner for owner, _ in owners(program).values()} == {"delegate"}
    assert program.executorch.buffer.count(b"a_copy") == 0
