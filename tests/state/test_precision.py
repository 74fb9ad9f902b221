# SPDX-License-Identifier: BSD-3-Clause
"""What is added up over many calls is held in fp32, and stays as exact as eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn

from .models import Model


def average(s: Model, x: Tensor) -> Tensor:
    s.a.mul_(0.999).add_(x, alpha=0.001)
    return s.a * 2


def average_by_difference(s: Model, x: Tensor) -> Tensor:
    s.a.add_((x - s.a) * 0.001)
    return s.a * 2


def average_by_lerp(s: Model, x: Tensor) -> Tensor:
    s.a.lerp_(x, 0.001)
    return s.a * 2


def total(s: Model, x: Tensor) -> Tensor:
    s.a += x * x
    return s.a * 0.5


def count(s: Model, x: Tensor) -> Tensor:
    s.a += 1
    return x + 1


def count_down(s: Model, x: Tensor) -> Tensor:
    s.a -= 0.25
    return x + 1


def only_added(s: Model, x: Tensor) -> Tensor:
    s.a.add_(x)
    return x * 2


def integrator(s: Model, x: Tensor) -> Tensor:
    """The step depends on the state in a way that is not linear."""
    s.a.copy_(s.a + 0.01 * (torch.tanh(x) - torch.tanh(s.a)))
    return s.a / 2


ADDED = [average, average_by_difference, average_by_lerp, total, count, count_down, only_added,
         integrator]  # fmt: skip


def decaying(s: Model, x: Tensor) -> Tensor:
    s.a.mul_(0.5).add_(x)
    return s.a * 2


def replaced(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(torch.tanh(s.a) + x)
    return s.a * 2


def lowered(model: nn.Module, folder: Path, libraries: str, **options: Any) -> Any:
    program = qnn.lower(model.eval(), (torch.ones(4, 6),), target="SM8650",
                        qnn_libraries=libraries, **options)  # fmt: skip
    program.save(folder / "model.pte")
    (state,) = program.report.methods["forward"].state
    return state, qnn.load(folder / "model.pte", qnn_libraries=libraries)


def noise(i: int) -> Tensor:
    return torch.rand(4, 6, generator=torch.Generator().manual_seed(i)) + 0.5


@pytest.mark.parametrize("update", ADDED, ids=lambda f: f.__name__)
def test_three_hundred_steps_lose_nothing(
    update: Callable[..., Any], tmp_path: Path, qnn_libraries: str
) -> None:
    start = torch.full((4, 6), 2040.0 if update in (count, count_down) else 3.0)
    model = Model(update, a=start)
    state, session = lowered(model, tmp_path, qnn_libraries)
    assert (state.owner, state.stored, state.binding) == ("delegate", "float32", "accumulate")
    eager = copy.deepcopy(model)
    for i in range(300):
        with torch.no_grad():
            want = eager(noise(i))
        got = session(noise(i))
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3, msg=f"call {i}")
    moved = (eager.a - start).norm()
    assert moved > 0
    # Each step is as exact as fp16 is; the state is as exact as the steps.
    assert (session.read_state("a") - eager.a).norm() < 2e-3 * moved


@pytest.mark.parametrize("update", [decaying, replaced], ids=lambda f: f.__name__)
def test_what_forgets_is_held_as_it_is_computed(
    update: Callable[..., Any], tmp_path: Path, qnn_libraries: str
) -> None:
    state, _ = lowered(Model(update, a=torch.zeros(4, 6)), tmp_path, qnn_libraries)
    assert (state.stored, state.binding) == ("float16", "in_place")


def test_the_rule_can_be_overridden_for_a_buffer(tmp_path: Path, qnn_libraries: str) -> None:
    narrow = Model(total, a=torch.zeros(4, 6))
    state, _ = lowered(narrow, tmp_path, qnn_libraries, state_dtype={"a": torch.float16})
    assert (state.stored, state.binding) == ("float16", "in_place")
    wide = Model(replaced, a=torch.rand(4, 6))
    state, session = lowered(wide, tmp_path, qnn_libraries, state_dtype={"a": torch.float32})
    assert (state.stored, state.binding) == ("float32", "copied")
    eager = copy.deepcopy(wide)
    for i in range(4):
        with torch.no_grad():
            want = eager(noise(i))
        torch.testing.assert_close(session(noise(i)), want, rtol=5e-3, atol=5e-3)
    with pytest.raises(qnn.LoweringError, match=r"no mutable buffer 'b'.*has a"):
        lowered(wide, tmp_path, qnn_libraries, state_dtype={"b": torch.float32})
    with pytest.raises(ValueError, match="float16 or float32"):
        lowered(wide, tmp_path, qnn_libraries, state_dtype={"a": torch.int8})


class Statistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.full((6,), 4.0))
        self.register_buffer("seen", torch.tensor(0.0))


class Observe(nn.Module):
    def __init__(self, s: Statistics) -> None:
        super().__init__()
        self.s = s

    def forward(self, x: Tensor) -> Tensor:
        self.s.seen += 1
        self.s.mean.lerp_(x.mean(0), 0.002)
        return x - self.s.mean


class Normalise(nn.Module):
    def __init__(self, s: Statistics) -> None:
        super().__init__()
        self.s = s

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x - self.s.mean, self.s.seen + x[0, 0] * 0


class Restart(nn.Module):
    def __init__(self, s: Statistics) -> None:
        super().__init__()
        self.s = s

    def forward(self, x: Tensor) -> Tensor:
        self.s.seen.zero_()
        self.s.mean.copy_(x[0])
        return x[1]


def test_methods_that_read_and_replace_what_another_adds_to(
    tmp_path: Path, qnn_libraries: str
) -> None:
    s = Statistics()
    x = torch.ones(4, 6)
    methods = {n: (m(s).eval(), (x,)) for n, m in
               (("observe", Observe), ("normalise", Normalise), ("restart", Restart))}  # fmt: skip
    program = qnn.lower(methods, target="SM8650", qnn_libraries=qnn_libraries)
    program.save(tmp_path / "model.pte")
    session = qnn.load(tmp_path / "model.pte", qnn_libraries=qnn_libraries)
    stored = {fqn: info.stored for fqn, info in session.state().items()}
    assert stored == {"s.mean": "float32", "s.seen": "float32"}
    eager = copy.deepcopy(methods)
    calls = ["normalise", *["observe"] * 40, "normalise", "restart", "observe", "normalise"]
    for i, name in enumerate(calls):
        with torch.no_grad():
            want = eager[name][0](noise(i))
        torch.testing.assert_close(
            session.run(name, noise(i)), want, rtol=4e-3, atol=4e-3, msg=f"{name}, call {i}"
        )
    assert session.read_state("s.seen").item() == 1.0
