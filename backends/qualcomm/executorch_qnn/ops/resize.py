# SPDX-License-Identifier: BSD-3-Clause
"""Resampling of images: nearest, linear and cubic, and at the places of a grid.

Each is the same for one axis after the other: a choice of places, or a product with a matrix.  Both
are what PyTorch's own op makes of the numbers of the places, or of the identity, so that its
rounding is met whatever the scale.  QNN's own ops take two axes at once, where they are right.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._ops import OpOverloadPacket

from ..compile.ir import DType, Param
from .builder import Builder, Const, Value, b8, f32, u32
from .registry import Rule, lowers
from .spatial import by_planes, channels_first, channels_last, mixed

aten = torch.ops.aten


@dataclass(frozen=True)
class Stretch:
    """An axis of `size` places that becomes one of `count`, by a factor `scale` if one is given."""

    size: int
    count: int
    scale: float | None = None

    @staticmethod
    def still(n: int) -> Stretch:
        return Stretch(n, n)

    @property
    def is_by_ratio(self) -> bool:
        """Whether the scale is that of the sizes, which is what QNN's ops go by."""
        return self.scale is None or self.size * self.scale == self.count


def _axes(b: Builder, x: Value, scales: Sequence[object]) -> list[Stretch]:
    """From the scales of an op: one for each axis, or a list of them, or none."""
    if scales and not isinstance(scales[0], float):
        scales = scales[0] or ()  # type: ignore[assignment]
    sizes = zip(x.shape[2:], b.result.shape[2:], strict=True)
    factors = list(scales) or [None] * (x.rank - 2)
    return [Stretch(n, m, s) for (n, m), s in zip(sizes, factors, strict=True)]  # type: ignore[arg-type]


def _both(op: OpOverloadPacket) -> tuple[torch._ops.OpOverload, ...]:
    """The op whose scales are a list, and the one that has an argument for each."""
    return op.vec, op.default


# -- nearest -----------------------------------------------------------------------------------

_LARGEST_FACTOR = 8  # up to which QNN's op has been seen to repeat every place as often
_NearestPlaces = Callable[[torch.Tensor, list[int], float | None], torch.Tensor]


def _nearest_rule(places_of: _NearestPlaces) -> Rule:
    def rule(b: Builder, x: Value, _: object, *scales: object) -> Value:
        axes = _axes(b, x, scales)
        places = []
        for a in axes:
            numbers = torch.arange(a.size, dtype=torch.float32).reshape(1, 1, -1)
            places.append(places_of(numbers, [a.count], a.scale).long().flatten().tolist())
        if all(_is_repeated(p, a.size) for p, a in zip(places, axes, strict=True)):
            return by_planes(b, x, axes, Stretch.still, lambda y, h, w: _repeated(b, y, h, w))
        y, perm = b.unpermuted(x)
        for dim, p in enumerate(places, 2):
            y = b.take(y, perm[dim], p)
        return b.transpose(y, perm)

    return rule


def _is_repeated(places: Sequence[int], n: int) -> bool:
    """Whether they are all places in order, each as often.

    With other ratios QNN rounds to other places than PyTorch, now and then.
    """
    factor, rest = divmod(len(places), n)
    return (
        not rest
        and factor <= _LARGEST_FACTOR
        and places == [i // factor for i in range(len(places))]
    )


def _repeated(b: Builder, x: Value, h: Stretch, w: Stretch) -> Value:
    params: dict[str, Param] = {"align_corners": b8(False), "half_pixel_centers": b8(False)}
    shape = (x.shape[0], h.count, w.count, x.shape[3])
    return b.op("ResizeNearestNeighbor", [x], shape, params=params)


for op in (aten.upsample_nearest1d, aten.upsample_nearest2d, aten.upsample_nearest3d):
    lowers(*_both(op), keep=True)(_nearest_rule(aten.upsample_nearest1d.default))
for op in (
    aten._upsample_nearest_exact1d, aten._upsample_nearest_exact2d, aten._upsample_nearest_exact3d
):  # fmt: skip
    lowers(*_both(op), keep=True)(_nearest_rule(aten._upsample_nearest_exact1d.default))


# -- linear and cubic --------------------------------------------------------------------------

Matrix = Callable[[Stretch, bool], torch.Tensor]
"""The matrix `[count, size]` of a stretch, with corners aligned or not."""


_Op = Callable[[Builder, Value, Stretch, Stretch, bool], Value]


def _linear(a: Stretch, corners: bool) -> torch.Tensor:
    rows: torch.Tensor = aten.upsample_linear1d(
        torch.eye(a.size)[None], [a.count], corners, a.scale
    )
    return rows[0].T


def _of_image(op: OpOverloadPacket) -> Matrix:
    def matrix(a: Stretch, corners: bool) -> torch.Tensor:
        eye = torch.eye(a.size).reshape(a.size, 1, 1, a.size)
        rows: torch.Tensor = op(eye, [1, a.count], corners, None, a.scale)
        return rows.reshape(a.size, a.count).T

    return matrix


def _blend_rule(
    matrix: Matrix, qnn_op: Callable[[Builder, Value, Stretch, Stretch, bool], Value] | None = None
) -> Rule:
    def rule(b: Builder, x: Value, _: object, corners: bool, *scales: object) -> Value:
        axes = _axes(b, x, scales)
        by_ratio = all(corners or a.is_by_ratio for a in axes)

        def fn(y: Value, h: Stretch, w: Stretch) -> Value:
            if qnn_op is not None and by_ratio:
                return qnn_op(b, y, h, w, corners)
            for dim, a in ((1, h), (2, w)):
                if a != Stretch.still(a.size):
                    y = mixed(b, y, dim, _constant(matrix, a, corners))
            return y

        return by_planes(b, x, axes, Stretch.still, fn)

    return rule


def _constant(matrix: Matrix, a: Stretch, corners: bool) -> Value:
    const = Const(lambda: matrix(a, corners), (matrix, a, corners))
    return Value((a.count, a.size), DType.FLOAT16, const=const)


def _bilinear(b: Builder, x: Value, h: Stretch, w: Stretch, corners: bool) -> Value:
    params: dict[str, Param] = {
        "align_corners": b8(corners),
        "half_pixel_centers": b8(not corners),
    }
    return b.op("ResizeBilinear", [x], (x.shape[0], h.count, w.count, x.shape[3]), params=params)


def _bicubic(b: Builder, x: Value, h: Stretch, w: Stretch, corners: bool) -> Value:
    if b.wanted is not None:
        b.refuse("cubic interpolation is computed in fp16")
    params: dict[str, Param] = {
        "interpolation_mode": u32(2),  # cubic
        "transformation_mode": u32(2 if corners else 1),  # corners aligned, half pixels
        "cubic_coeff": f32(-0.75),
        "exclude_outside": b8(False),
    }
    return b.op("Resize", [x], (x.shape[0], h.count, w.count, x.shape[3]), params=params)


for op in (aten.upsample_linear1d, aten.upsample_bilinear2d, aten.upsample_trilinear3d):
    lowers(*_both(op), keep=True)(_blend_rule(_linear, _bilinear))
lowers(*_both(aten.upsample_bicubic2d), keep=True)(
    _blend_rule(_of_image(aten.upsample_bicubic2d), _bicubic)
)
for op in (aten._upsample_bilinear2d_aa, aten._upsample_bicubic2d_aa):
    lowers(*_both(op), keep=True)(_blend_rule(_of_image(op)))


# -- grids -------------------------------------------------------------------------------------


@lowers(aten.grid_sampler_2d.default, keep=True)
def grid_sampler_2d(
    b: Builder, x: Value, grid: Value, mode: int, padding: int, corners: bool
) -> Value:
    if mode:
        b.refuse(
            "QNN samples grids bilinearly; its choice of the nearest place is not PyTorch's half "
            "way between two, and it has no cubic one; use mode='bilinear'"
        )
    if b.wanted is not None:
        b.refuse("a grid is sampled in fp16")
    params: dict[str, Param] = {
        "align_corners": b8(corners),
        "mode": u32(0),
        "padding_mode": u32(padding),  # zeros, border, reflection in both
    }
    n, c, h, w = b.result.shape
    y = b.op("GridSample", [channels_last(b, x), grid], (n, h, w, c), params=params)
    return channels_first(b, y)
