# SPDX-License-Identifier: BSD-3-Clause
"""Which states fp16 would lose, and what is added to them in each call.

A state that follows `x' = g x + u` with a constant `g` near one moves in steps that are small
beside its value.  Held in fp16, each step is rounded to half a unit in the last place, and the
errors add up to `1 / (2 (1 - g))` units: a count stands still at 2,048, an average over 1,000 calls
is off by up to 500 units.  Such a state is held in fp32.  HTP computes in fp16 all the same, so the
graph puts out the step `u + (g - 1) x`, whose rounding is as small as the step, and the runtime
adds it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ..ops.registry import aten_op

aten = torch.ops.aten

NEAR_ONE = 1 / 32
"""Gains that come closer to one than this let errors grow beyond 16 units in the last place."""

_SAME = {
    aten.clone.default,
    aten.alias.default,
    aten._to_copy.default,
    aten.view.default,
    aten.view_copy.default,
    aten.expand.default,
    aten.expand_copy.default,
}
_SUMS = {aten.add.Tensor: 1.0, aten.add.Scalar: 1.0, aten.sub.Tensor: -1.0, aten.sub.Scalar: -1.0}
_PRODUCTS = {aten.mul.Tensor, aten.mul.Scalar}
_QUOTIENTS = {aten.div.Tensor, aten.div.Scalar}

Number = Callable[[object], "float | None"]
"""The value of an argument that is a number or a constant of one element, else `None`."""


@dataclass
class Linear:
    """`gain * state + offset + sum(factor * node)`."""

    gain: float = 0.0
    offset: float = 0.0
    terms: list[tuple[float, torch.fx.Node]] = field(default_factory=list)

    def add(self, other: Linear, factor: float) -> None:
        self.gain += factor * other.gain
        self.offset += factor * other.offset
        self.terms += [(factor * f, n) for f, n in other.terms]

    @property
    def scale(self) -> float:
        """The power of two by which a step is multiplied on its way, so that fp16 can tell it."""
        largest = max([abs(self.gain), *(abs(f) for f, _ in self.terms)])
        return 2.0 ** max(0, math.floor(-math.log2(largest))) if largest > 0 else 1.0


def accumulation(
    new: torch.fx.Node, old: torch.fx.Node, number: Number, near: float = NEAR_ONE
) -> Linear | None:
    """The step that takes a state from `old` to `new`; `None` unless its gain is near one.

    Returns:
        What is to be added to the state: the gain is `g - 1`.
    """
    if old.meta["val"].dtype not in (torch.float32, torch.float64):
        return None  # PyTorch itself holds it in less
    step = _linear(new, old, number)
    if abs(step.gain - 1) >= near:
        return None
    step.gain -= 1
    return step


def _linear(node: object, old: torch.fx.Node, number: Number) -> Linear:
    if node is old:
        return Linear(gain=1.0)
    if (value := number(node)) is not None:
        return Linear(offset=value)
    assert isinstance(node, torch.fx.Node)
    if not node.meta["val"].is_floating_point():
        return Linear(terms=[(1.0, node)])
    op, args = aten_op(node.target), node.args
    if op in _SAME:
        source = args[0]
        assert isinstance(source, torch.fx.Node)
        if source.meta["val"].shape == node.meta["val"].shape:
            return _linear(source, old, number)
    elif op in _SUMS:
        alpha = node.kwargs.get("alpha", args[2] if len(args) > 2 else 1)
        if isinstance(alpha, (int, float)):
            total = _linear(args[0], old, number)
            total.add(_linear(args[1], old, number), _SUMS[op] * alpha)
            return total
    elif op in _PRODUCTS:
        for factor, other in ((args[1], args[0]), (args[0], args[1])):
            if (value := number(factor)) is not None:
                return _scaled(_linear(other, old, number), value)
    elif op is aten.where.self and (value := number(args[0])) is not None:  # lerp has one
        return _linear(args[1] if value else args[2], old, number)
    elif op in _QUOTIENTS and (value := number(args[1])):
        return _scaled(_linear(args[0], old, number), 1 / value)
    return Linear(terms=[(1.0, node)])


def _scaled(x: Linear, factor: float) -> Linear:
    scaled = Linear()
    scaled.add(x, factor)
    return scaled
