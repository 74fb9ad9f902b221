# SPDX-License-Identifier: BSD-3-Clause
"""Buffers that are one tensor under several names, that have awkward names, or get one value."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn

from .models import Model, _noise
from .test_ownership import RAMP, Check, check, owners, steps

__all__ = ["check"]  # a fixture


class Sub(nn.Module):
    def __init__(self, **buffers: Tensor) -> None:
        super().__init__()
        for name, value in buffers.items():
            self.register_buffer(name, value)


class TwoNames(nn.Module):
    """One tensor under two names, written through both."""

    def __init__(self, persistent: bool = True) -> None:
        super().__init__()
        t = RAMP.clone()
        self.register_buffer("a", t, persistent=persistent)
        self.register_buffer("b", t)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.a.add_(x)
        y = self.b * 2.0
        self.b.mul_(0.5)
        return y, self.a + 0.25


class OneSubmoduleTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = Sub(t=RAMP.clone())
        self.q = self.p

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.p.t.add_(x)
        self.q.t.mul_(0.5)
        return self.p.t * 1.0, self.q.t * 2.0


class OneBufferInTwoSubmodules(OneSubmoduleTwice):
    def __init__(self) -> None:
        super().__init__()
        self.q = Sub(t=self.p.t)


class ParameterAsBuffer(nn.Module):
    """A buffer that is a parameter's memory."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(RAMP.clone())
        self.register_buffer("a", self.w.data)

    def __deepcopy__(self, memo: Any) -> ParameterAsBuffer:
        return ParameterAsBuffer()  # a copied parameter shares its memory with nothing

    def forward(self, x: Tensor) -> Tensor:
        self.a.mul_(0.5)
        return x * self.w


class WrittenParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(RAMP.clone(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.w.mul_(0.5).add_(x)
        return self.w * 2.0


class Halves(nn.Module):
    """Two buffers in disjoint parts of one allocation."""

    def __init__(self) -> None:
        super().__init__()
        both = torch.stack([RAMP, -RAMP])
        self.register_buffer("a", both[0])
        self.register_buffer("b", both[1])

    def forward(self, x: Tensor) -> Tensor:
        self.a.add_(x)
        self.b.sub_(self.a)
        return self.a * self.b


class Collisions(nn.Module):
    """Names that torch.export turns into one identifier, builtins, and lists."""

    def __init__(self) -> None:
        super().__init__()
        self.a = Sub(b_c=RAMP.clone(), b_c_1=RAMP * 2)
        self.a_b = Sub(c=RAMP * 3, c_1=RAMP * 4)
        self.input = Sub(sum=RAMP.clone(), id=RAMP * 2)
        self.items = nn.ModuleList([Sub(h=RAMP * i) for i in range(3)])
        self.register_buffer("list", RAMP.clone(), persistent=False)
        self.register_buffer("qnn_state_guard", RAMP.clone())
        self.register_buffer("full", RAMP.clone())

    def forward(self, clone: Tensor) -> Tensor:
        x = clone
        for i, b in enumerate(self.buffers()):
            before = b.clone()
            b.mul_(0.5).add_(x * (0.1 * i))
            x = torch.tanh(before + b * 0.25)
        self.full.zero_()
        return x


@pytest.mark.parametrize(
    "make",
    [
        TwoNames,
        lambda: TwoNames(persistent=False),
        OneSubmoduleTwice,
        OneBufferInTwoSubmodules,
        ParameterAsBuffer,
        WrittenParameter,
        Halves,
        Collisions,
    ],
    ids=lambda make: getattr(make, "__name__", "lambda"),
)
def test_names_and_memory_are_as_in_eager(make: Callable[[], nn.Module], check: Check) -> None:
    model = make()
    program = check.forward(model, *steps(3, 4))
    found = owners(program)
    assert {owner for owner, _ in found.values()} == {"delegate"}
    if any(True for _ in model.buffers()):
        assert list(found) == [name for name, _ in model.named_buffers()]


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", RAMP.clone())
        self.register_buffer("row", self.whole[1])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(x)
        return self.row * 2.0


class OnlyRow(nn.Module):
    def __init__(self, row: Tensor) -> None:
        super().__init__()
        self.register_buffer("row", row)

    def forward(self, x: Tensor) -> Tensor:
        return self.row * x


def test_buffers_that_overlap_are_refused_by_name() -> None:
    model = Overlapping()
    with pytest.raises(qnn.LoweringError, match="'whole' and 'row' share memory"):
        qnn.lower(model, (torch.ones(3, 4),), target="SM8650")
    methods = {
        "write": (Model(lambda s, x: s.whole.add_(x) * 1.0), (torch.ones(3, 4),)),
        "read": (OnlyRow(model.row), (torch.ones(4),)),
    }
    methods["write"][0].register_buffer("whole", model.whole)
    with pytest.raises(qnn.LoweringError, match="'whole' and 'row' share memory"):
        qnn.lower(methods, target="SM8650")


# -- one value in several buffers -----------------------------------------------------------------


def same_value(s: Model, x: Tensor) -> Tensor:
    n = x * 2.0 + s.c
    s.a.copy_(n)
    s.b.copy_(n)
    return n + s.a


def chained(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    s.c.copy_(s.b.add_(x))
    s.a.copy_(s.c.view(3, 4))
    return s.a, s.b * 1.0


def cleared(s: Model, x: Tensor) -> Tensor:
    y = s.a + s.b * s.c
    s.a.zero_()
    s.b.zero_()
    s.c.copy_(x)
    return y


def from_input(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    y = s.a - s.b
    s.a.copy_(x)
    s.b.copy_(x)
    return y, x


def from_each_other(s: Model, x: Tensor) -> Tensor:
    y = s.a + s.b * 2.0 + s.c * 3.0
    s.a.copy_(s.b)
    s.c.copy_(s.b)
    s.b.add_(x)
    return y


def itself(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(s.a)
    s.b.copy_(s.a)
    s.c.mul_(0.5)
    return s.b + s.c + x


def rotated(s: Model, x: Tensor) -> Tensor:
    y = s.a + s.b * 2.0 + s.c * 3.0 + x
    t = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(s.c)
    s.c.copy_(t)
    return y


def broadcast(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(x[:1])
    s.b.view(1, 3, 4).copy_(x)
    s.c[1:].copy_(s.a[:2])
    return s.a + s.b + s.c


def assigned(s: Model, x: Tensor) -> Tensor:
    s.a = s.a * 0.5 + x
    s.b = s.a
    return s.b * s.c


def stored_views(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    n = torch.relu(x)
    s.a.copy_(n.t().reshape(3, 4))
    s.b.copy_(n)
    return s.a.view(-1), s.b.t()


@pytest.mark.parametrize(
    "update",
    [
        same_value,
        chained,
        cleared,
        from_input,
        from_each_other,
        itself,
        rotated,
        broadcast,
        assigned,
        stored_views,
    ],
)
def test_updates_are_one_parallel_assignment(update: Callable[..., Any], check: Check) -> None:
    program = check.forward(Model(update, a=RAMP, b=-RAMP, c=RAMP + 1.0), *steps(3, 4))
    assert {owner for owner, _ in owners(program).values()} == {"delegate"}


@pytest.mark.parametrize("seed", range(3))
def test_thirty_two_buffers_in_any_order(seed: int, check: Check) -> None:
    rng = random.Random(seed)
    plan = [(rng.randrange(32), rng.randrange(32), rng.choice("+*=~c")) for _ in range(48)]

    def update(s: Model, x: Tensor) -> Tensor:
        for target, source, how in plan:
            a, b = s.get_buffer(f"s{target}"), s.get_buffer(f"s{source}")
            if how == "+":
                a.mul_(0.5).add_(b * 0.25)
            elif how == "*":
                a.mul_(torch.tanh(b + x))
            elif how == "=":
                a.copy_(b)
            elif how == "~":
                old = a.clone()
                a.copy_(b)
                b.copy_(old)
            else:
                a.copy_(torch.tanh(b + x))
            x = x * 0.5 + a * 0.1
        return x

    buffers = {f"s{i}": _noise(i, 3, 4) * 0.5 for i in range(32)}
    check.forward(Model(update, **buffers), *steps(3, 4, n=6))


def test_thirty_two_buffers_around_cpu_islands(check: Check) -> None:
    rng = random.Random(7)
    plan = [(rng.randrange(32), rng.randrange(32)) for _ in range(24)]

    def update(s: Model, x: Tensor) -> Tensor:
        for i, (target, source) in enumerate(plan):
            a, b = s.get_buffer(f"s{target}"), s.get_buffer(f"s{source}")
            old = b.clone()
            a.mul_(0.5).add_(b * 0.25 + x)
            x = (torch.cosh(torch.tanh(a)) if i % 6 == 5 else torch.tanh(a)) * 0.5 + old * 0.1
        return x

    buffers = {f"s{i}": _noise(i, 3, 4) * 0.5 for i in range(32)}
    check.forward(Model(update, **buffers), *steps(3, 4, n=6))
