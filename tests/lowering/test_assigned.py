# SPDX-License-Identifier: BSD-3-Clause
"""Buffers that are replaced instead of written to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn
from executorch_qnn.lowering.assigned import assignments_written_back


class Cell(nn.Module):
    def __init__(self, step: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("h", torch.tensor([1.0, 2.0, 3.0]))
        self.register_buffer("g", torch.tensor([4.0, 5.0, 6.0]))

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x)


def replaced(s: Any, x: Tensor) -> Tensor:
    s.h = torch.tanh(s.h + x)
    return s.h * 2.0


def written_afterwards(s: Any, x: Tensor) -> Tensor:
    s.h = x * 2.0
    s.h[0] = 0.5
    s.h.add_(s.g)
    return s.h * 1.0


def old_value_returned(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.h
    s.h = s.h * 0.5 + x
    return old, old[1:]


def crossed(s: Any, x: Tensor) -> Tensor:
    s.h, s.g = s.g * 1.0, s.h + x
    return s.h - s.g


def moved(s: Any, x: Tensor) -> Tensor:
    s.h = s.g
    s.g = x * 3.0
    return s.h + 1.0


@pytest.mark.parametrize("nested", [False, True], ids=["root", "submodule"])
@pytest.mark.parametrize("step", [replaced, written_afterwards, old_value_returned, crossed, moved])
def test_replaced_buffers_follow_eager(
    step: Callable[[Any, Tensor], Any], nested: bool, tmp_path: Path, qnn_libraries: str
) -> None:
    def make() -> nn.Module:
        return nn.Sequential(Cell(step)) if nested else Cell(step)

    inputs = [torch.arange(3.0) * (i - 1) * 0.25 for i in range(4)]
    program = qnn.lower(make().eval(), (inputs[0],), target="SM8650", qnn_libraries=qnn_libraries)
    program.save(tmp_path / "m.pte")
    session, eager = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries), make()
    for x in inputs:
        got, want = session(x), eager(x)
        torch.testing.assert_close(got, want, rtol=4e-3, atol=8e-3)
    for name, value in eager.named_buffers():
        if name in session.state():
            torch.testing.assert_close(session.read_state(name), value, rtol=4e-3, atol=8e-3)


def test_a_replacement_of_another_shape_is_named(qnn_libraries: str) -> None:
    def grow(s: Any, x: Tensor) -> Tensor:
        s.h = torch.cat([s.h, x])
        return x * 2.0

    with pytest.raises(qnn.LoweringError, match=r"buffer 0\.h.*\[3\].*by.*\[6\]"):
        qnn.lower(
            nn.Sequential(Cell(grow)), (torch.ones(3),), target="SM8650",
            qnn_libraries=qnn_libraries,
        )  # fmt: skip


def test_the_module_is_as_before() -> None:
    cell = Cell(replaced)
    with assignments_written_back(cell):
        assert "forward" in vars(cell)
    assert "forward" not in vars(cell)
    assert nn.Module.__setattr__ is Cell.__setattr__
    h = cell.h
    cell(torch.ones(3))
    assert cell.h is not h


def last(s: Any, x: Tensor) -> Tensor:
    mean, new = (s.h + s.g) * 0.5, s.h - x
    s.g.copy_(mean)
    s.h.copy_(new)
    return mean + 1.0


def last_of_another_shape(s: Any, x: Tensor) -> Tensor:
    y = s.h * x
    s.h.copy_(y[:1])
    return y


def stored_after_it_is_written(s: Any, x: Tensor) -> Tensor:
    y = x * 2.0
    s.h.copy_(y)
    s.g.copy_(s.h.view(3))
    return y + 1.0


def returned_after_it_is_written(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    y, flat = x * 2.0, s.h.reshape(3, 1)
    s.h.copy_(y)
    return y, flat


def written_twice(s: Any, x: Tensor) -> Tensor:
    y = x * 2.0
    s.h.copy_(y)
    s.h.copy_(y + s.g)
    return y + 1.0


@pytest.mark.parametrize(
    ("step", "retraces"),
    [
        (last, 0),
        (last_of_another_shape, 0),
        (stored_after_it_is_written, 1),
        (returned_after_it_is_written, 1),
        (written_twice, 1),
    ],
)
def test_updates_that_end_the_graph_need_no_retrace(
    step: Callable[[Any, Tensor], Any], retraces: int, tmp_path: Path, qnn_libraries: str
) -> None:
    inputs = [torch.arange(3.0) * (i - 1) * 0.25 for i in range(4)]
    program = qnn.lower(
        Cell(step).eval(), (inputs[0],), target="SM8650", qnn_libraries=qnn_libraries
    )
    assert program.report.methods["forward"].retraces == retraces
    program.save(tmp_path / "m.pte")
    session, eager = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries), Cell(step)
    for x in inputs:
        torch.testing.assert_close(session(x), eager(x), rtol=2e-3, atol=2e-3)
