# SPDX-License-Identifier: BSD-3-Clause
"""Padding: with a constant, by reflection, with the edge, around in a circle."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ..compile.ir import DType, Param
from .builder import FP16_MAX, Builder, Number, Shape, Value, f32, u32
from .registry import Rule, lowers

aten = torch.ops.aten

Amounts = Sequence[tuple[int, int]]
"""How much is padded before and after each axis."""


def _amounts(pad: Sequence[int], shape: Shape) -> Amounts:
    """PyTorch's list begins with the last axis."""
    pairs = list(zip(pad[::2], pad[1::2], strict=True))[::-1]
    return [(0, 0)] * (len(shape) - len(pairs)) + pairs


@lowers(aten.constant_pad_nd.default)
def constant_pad_nd(b: Builder, x: Value, pad: Sequence[int], value: Number = 0) -> Value:
    if x.is_const:

        def fn(t: torch.Tensor) -> torch.Tensor:
            return functional.pad(t, list(pad), value=value)

        return b.derived(x, f"pad {list(pad)} {value}", fn, b.result.shape)
    y, perm = b.unpermuted(x)
    amounts = [(0, 0)] * x.rank
    for d, a in zip(perm, _amounts(pad, x.shape), strict=True):
        amounts[d] = a
    for d, (before, after) in enumerate(amounts):
        y = b.slice(y, d, max(-before, 0), y.shape[d] - max(-after, 0))  # negative padding cuts
    amounts = [(max(before, 0), max(after, 0)) for before, after in amounts]
    if y.dtype is DType.INT32:
        y = _beside(b, y, amounts, int(value))
    else:
        y = b.numerically(y, lambda v: padded(b, v, amounts, 0, value))
    return b.transpose(y, perm)


def _beside(b: Builder, x: Value, amounts: Amounts, value: int) -> Value:
    """Padding by concatenation: QNN's Pad takes no integers."""
    for d, lengths in enumerate(amounts):
        sides = [
            b.expand(b.const(torch.tensor(value), x.dtype), (*x.shape[:d], n, *x.shape[d + 1 :]))
            for n in lengths
        ]
        x = b.concat([s for s in (sides[0], x, sides[1]) if s.shape[d]], d)
    return x


def padded(b: Builder, x: Value, amounts: Amounts, scheme: int, value: Number = 0) -> Value:
    """QNN's Pad of floats, with a constant (`scheme` 0) or by reflection (2).

    It takes four axes: with five it fills with zeros, whatever the constant is.
    """
    if not any(map(any, amounts)):
        return x
    shape = tuple(n + sum(a) for n, a in zip(x.shape, amounts, strict=True))
    if x.rank > 4:
        d = next(i for i, a in enumerate(amounts) if any(a))
        y = padded(b, b.around(x, d), [(0, 0), amounts[d], (0, 0)], scheme, value)
        y = b.reshape(y, (*x.shape[:d], shape[d], *x.shape[d + 1 :]))
        return padded(b, y, [(0, 0) if i <= d else a for i, a in enumerate(amounts)], scheme, value)
    params: dict[str, Param] = {"scheme": u32(scheme), "pad_amount": b.param(amounts)}
    if scheme == 0:
        finite = abs(value) != float("inf")
        params["pad_constant_value"] = f32(
            min(max(value, -FP16_MAX), FP16_MAX) if finite else value
        )
    return b.op("Pad", [x], shape, params=params)


def _from_within(mode: str) -> Rule:
    """A rule for padding with elements of the tensor itself."""

    def rule(b: Builder, x: Value, pad: Sequence[int]) -> Value:
        y, perm = b.unpermuted(x)
        amounts = [(0, 0)] * x.rank
        for d, a in zip(perm, _amounts(pad, x.shape), strict=True):
            amounts[d] = a
        if mode == "reflect" and x.dtype is DType.FLOAT16 and min(pad) >= 0 and not x.is_const:
            return b.transpose(padded(b, y, amounts, 2), perm)
        for d, (before, after) in enumerate(amounts):
            if before or after:
                numbers = torch.arange(y.shape[d], dtype=torch.float32).reshape(1, 1, -1)
                places = functional.pad(numbers, (before, after), mode)
                y = b.take(y, d, places.long().flatten().tolist())
        return b.transpose(y, perm)

    return rule


_FROM_WITHIN = {mode: _from_within(mode) for mode in ("reflect", "replicate", "circular")}
for op in (aten.reflection_pad1d, aten.reflection_pad2d, aten.reflection_pad3d):
    lowers(op.default, keep=True)(_FROM_WITHIN["reflect"])
for op in (aten.replication_pad1d, aten.replication_pad2d, aten.replication_pad3d):
    lowers(op.default, keep=True)(_FROM_WITHIN["replicate"])


@lowers(aten.pad.default, keep=True)
def pad(b: Builder, x: Value, pad: Sequence[int], mode: str, value: Number | None = None) -> Value:
    if mode == "constant":
        return constant_pad_nd(b, x, pad, value or 0)
    result: Value = _FROM_WITHIN[mode](b, x, pad)  # type: ignore[assignment]
    return result
