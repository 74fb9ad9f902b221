# SPDX-License-Identifier: BSD-3-Clause
"""Pools: the maximum or the average of windows along one to three axes.

A window along several axes is pooled along one after the other, or two at once where QNN does that
right.  What windows are is known per axis (`Windows`), whatever PyTorch's op is: padding, dilation,
`ceil_mode` and the uneven windows of adaptive pools are all the same here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..compile.ir import DType, Param
from .builder import Builder, Value, b8, u32
from .conv import Sweep, convolved
from .elementwise import select, times
from .registry import Lowered, Rule, lowers
from .spatial import by_planes, channels_first, channels_last, each, mixed

aten = torch.ops.aten


@dataclass(frozen=True)
class Windows:
    """The windows of a pool along one axis.

    Attributes:
        places: the places of each window that lie within the axis.
        counted: the places of each window that PyTorch averages, padding among them or not.
        alike: kernel, stride and padding before and after, where QNN has such windows.
    """

    places: tuple[range, ...]
    counted: tuple[int, ...]
    alike: tuple[int, int, int, int] | None

    @property
    def count(self) -> int:
        return len(self.places)

    @property
    def is_still(self) -> bool:
        return self.alike == (1, 1, 0, 0)

    @staticmethod
    def sliding(
        m: int, n: int, kernel: int, stride: int, padding: int, dilation: int, padded: bool
    ) -> Windows:
        """`m` windows over `n` places; with `padded`, padding counts in an average.

        QNN knows no `ceil_mode` that agrees with PyTorch's: padding behind does as well.
        """
        starts = [i * stride - padding for i in range(m)]
        reach = dilation * (kernel - 1) + 1
        places = tuple(range(s if s >= 0 else s % dilation, min(s + reach, n), dilation)
                       for s in starts)  # fmt: skip
        counted = (min(s + kernel, n + padding) - s for s in starts) if padded else map(len, places)
        after = max(starts[-1] + kernel - n, 0)
        alike = (kernel, stride, padding, after) if dilation == 1 else None
        return Windows(places, tuple(counted), alike)

    @staticmethod
    def adaptive(m: int, n: int) -> Windows:
        places = tuple(range(i * n // m, -(-(i + 1) * n // m)) for i in range(m))
        alike = None if n % m else (n // m, n // m, 0, 0)
        return Windows(places, tuple(map(len, places)), alike)

    @staticmethod
    def still(n: int) -> Windows:
        """Each place by itself."""
        return Windows.adaptive(n, n)

    @property
    def size(self) -> int:
        """The number of places in the largest window."""
        return max(map(len, self.places))

    def spread(self, b: Builder, x: Value, dim: int, order: Sequence[int]) -> Value:
        """`x` with the windows side by side along `dim`, the places of each in an order.

        Shorter windows repeat their last place, which changes neither a maximum nor where it is
        first.
        """
        if not all(map(len, self.places)):
            b.refuse("a window lies in the padding as a whole")
        return b.take(x, dim, [p[min(i, len(p) - 1)] for p in self.places for i in order])


def _sliding(
    b: Builder,
    x: Value,
    axes: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    padded: bool = False,
) -> list[Windows]:
    kernel = each(kernel, axes)
    sizes = list(zip(b.results[0].shape[-axes:], x.shape[-axes:], strict=True))
    moves = zip(kernel, each(stride, axes) or kernel, strict=True)
    others = zip(each(padding, axes), each(dilation, axes), strict=True)
    numbers = zip(sizes, moves, others, strict=True)
    return [Windows.sliding(m, n, k, s, p, d, padded) for (m, n), (k, s), (p, d) in numbers]


def _adaptive(b: Builder, x: Value, axes: int) -> list[Windows]:
    sizes = zip(b.results[0].shape[-axes:], x.shape[-axes:], strict=True)
    return [Windows.adaptive(m, n) for m, n in sizes]


def _params(b: Builder, h: Windows, w: Windows) -> dict[str, Param]:
    assert h.alike is not None
    assert w.alike is not None
    kernel, stride, before, after = zip(h.alike, w.alike, strict=True)
    return {
        "filter_size": b.param(kernel),
        "stride": b.param(stride),
        "pad_amount": b.param(list(zip(before, after, strict=True))),
        "rounding_mode": u32(0),
    }


# -- maxima ------------------------------------------------------------------------------------


def _max_pool(b: Builder, x: Value, axes: Sequence[Windows]) -> list[Value | None]:
    if 1 in b.used or x.dtype is DType.INT32:
        return [*_first_maxima(b, x, axes)]
    if x.dtype is not DType.FLOAT16:
        b.refuse(f"QNN does not pool {x.dtype.name}")
    return [by_planes(b, x, axes, Windows.still, lambda y, h, w: _maxima(b, y, h, w)), None]


def _maxima(b: Builder, x: Value, h: Windows, w: Windows) -> Value:
    """The maxima of `[batch, height, width, channels]`."""
    for dim, windows in ((1, h), (2, w)):
        if windows.alike is None:
            x = windows.spread(b, x, dim, range(windows.size))
            blocks = Windows.adaptive(windows.count, x.shape[dim])
            h, w = (blocks, w) if dim == 1 else (h, blocks)
    if _is_wrong(h, w):
        return _maxima(b, _maxima(b, x, Windows.still(x.shape[1]), w), h, Windows.still(w.count))
    shape = (x.shape[0], h.count, w.count, x.shape[3])
    return b.op("PoolMax2d", [x], shape, params=_params(b, h, w))


def _is_wrong(h: Windows, w: Windows) -> bool:
    """Whether QNN's max pool gives wrong values, or dies.

    It does at strides of 2 and 2 with many widths of the kernel and paddings; with any other
    strides it never did, from QAIRT 2.47 to 2.51.
    """
    assert h.alike is not None
    assert w.alike is not None
    kernel, stride, before, _ = w.alike
    if (h.alike[1], stride) != (2, 2) or h.is_still:
        return False
    return kernel not in (3, 5) and not (kernel in (2, 4) and before == 0)


def _first_maxima(b: Builder, x: Value, axes: Sequence[Windows]) -> tuple[Value, Value]:
    """The maxima, and the place of the first of them in each window, counted over all axes.

    Along each axis, last one first, neighbours are compared until one place of a window is left:
    of equal ones the earlier wins, as in PyTorch's walk through the window.
    """
    k = len(axes)
    shape = b.results[0].shape
    n, c, spatial = math.prod(x.shape[: -k - 1]), x.shape[-k - 1], x.shape[-k:]
    y = channels_last(b, b.reshape(x, (n, c, *spatial)))
    at = b.const(torch.arange(math.prod(spatial)).reshape(1, *spatial, 1))
    at = b.expand(at, (n, *spatial, 1))
    for dim in range(k, 0, -1):
        order = _halved(axes[dim - 1].size)
        y, at = (axes[dim - 1].spread(b, v, dim, order) for v in (y, at))
        count, size = axes[dim - 1].count, len(order)
        to = (*y.shape[:dim], count, *y.shape[dim + 1 :])
        y, at = (
            b.reshape(v, (math.prod(v.shape[:dim]), count, size, math.prod(v.shape[dim + 1 :])))
            for v in (y, at)
        )
        while size > 1:
            size //= 2
            first = [b.slice(v, 2, 0, size) for v in (y, at)]
            second = [b.slice(v, 2, size, 2 * size) for v in (y, at)]
            later = b.binary("ElementWiseGreater", second[0], first[0], DType.BOOL8)
            y, at = (select(b, later, s, f) for s, f in zip(second, first, strict=True))
        y, at = b.reshape(y, to), b.reshape(b.expand(at, y.shape), to)
    return b.reshape(channels_first(b, y), shape), b.reshape(channels_first(b, at), shape)


def _halved(n: int) -> list[int]:
    """Numbers in such an order that halves of it, laid on each other, pair neighbours.

    As many as it takes to halve them to one: the next power of two.
    """
    order = [0]
    while len(order) < n:
        order = [2 * i for i in order] + [2 * i + 1 for i in order]
    return order


def _max_rule(axes: int) -> Rule:
    def rule(
        b: Builder,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        *_: object,
    ) -> Lowered:
        return _max_pool(b, x, _sliding(b, x, axes, kernel, stride, padding, dilation))

    return rule


def _adaptive_max_rule(axes: int) -> Rule:
    return lambda b, x, *_: _max_pool(b, x, _adaptive(b, x, axes))


lowers(aten.max_pool2d_with_indices.default, keep=True)(_max_rule(2))
lowers(aten.max_pool3d_with_indices.default, keep=True)(_max_rule(3))
lowers(aten.adaptive_max_pool2d.default, keep=True)(_adaptive_max_rule(2))
lowers(aten.adaptive_max_pool3d.default, keep=True)(_adaptive_max_rule(3))


# -- averages ----------------------------------------------------------------------------------


def _avg_pool(b: Builder, x: Value, axes: Sequence[Windows], divisor: int | None = None) -> Value:
    """The sum over each window divided by how many places count, or by `divisor`."""
    if x.dtype is not DType.FLOAT16:
        b.refuse(f"QNN does not average {x.dtype.name}")
    sizes = [w.alike[0] if w.alike else 1 for w in axes]
    y = by_planes(b, x, axes, Windows.still, lambda v, h, w: _averages(b, v, h, w, divisor is None))
    if divisor is not None and (area := math.prod(sizes)) != divisor:
        y = times(b, y, area / divisor)
    return y


def _averages(b: Builder, x: Value, h: Windows, w: Windows, counted: bool) -> Value:
    """The averages of `[batch, height, width, channels]`; of all places, or those that count.

    Uneven windows are a product with a matrix.  QNN's own pool is right where windows neither
    overlap nor reach outside; elsewhere a depthwise convolution is.
    """
    for dim, windows in ((1, h), (2, w)):
        if windows.alike is None:
            x = mixed(b, x, dim, b.const(_shares(windows, x.shape[dim])))
            still = Windows.still(windows.count)
            h, w = (still, w) if dim == 1 else (h, still)
    if h.is_still and w.is_still:
        return x
    assert h.alike is not None
    assert w.alike is not None
    kernel, stride, before, after = zip(h.alike, w.alike, strict=True)
    n, c = x.shape[0], x.shape[3]
    # QNN's average of integers is wrong for windows of 4x4, 6x4, 8x8, if there are more than one.
    broken = x.quant is not None and min(kernel) > 3 and min(h.count, w.count) > 1
    if kernel == stride and not any((*before, *after)) and not broken:
        params = {**_params(b, h, w), "count_pad_for_edges": b8(False)}
        return b.op("PoolAvg2d", [x], (n, h.count, w.count, c), params=params)
    weight = b.const(torch.full((c, 1, *kernel), 1 / math.prod(kernel)))
    sweeps = [Sweep(stride, before, after) for _, stride, before, after in (h.alike, w.alike)]
    y = convolved(b, x, weight, None, sweeps, c)
    parts = [torch.tensor(v.counted) / k for v, k in zip((h, w), kernel, strict=True)]
    factor = 1 / (parts[0][:, None] * parts[1]).reshape(1, h.count, w.count, 1)
    return y if not counted or bool((factor == 1).all()) else times(b, y, b.const(factor))


def _shares(windows: Windows, n: int) -> torch.Tensor:
    """The matrix `[windows, n]` that averages."""
    matrix = torch.zeros(windows.count, n)
    for row, places in zip(matrix, windows.places, strict=True):
        row[list(places)] = 1 / len(places)
    return matrix


def _avg_rule(axes: int) -> Rule:
    def rule(
        b: Builder,
        x: Value,
        kernel: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Lowered:
        windows = _sliding(b, x, axes, kernel, stride, padding, padded=count_include_pad)
        return _avg_pool(b, x, windows, divisor_override)

    return rule


def _adaptive_avg_rule(axes: int) -> Rule:
    return lambda b, x, *_: _avg_pool(b, x, _adaptive(b, x, axes))


lowers(aten.avg_pool2d.default, keep=True)(_avg_rule(2))
lowers(aten.avg_pool3d.default, keep=True)(_avg_rule(3))
lowers(aten._adaptive_avg_pool2d.default, keep=True)(_adaptive_avg_rule(2))
lowers(aten._adaptive_avg_pool3d.default, keep=True)(_adaptive_avg_rule(3))
