# SPDX-License-Identifier: BSD-3-Clause
"""Convolutions, pools and resampling.

PyTorch keeps channels in front, QNN behind.  Each op here changes to QNN's layout and back; between
two of them the changes cancel (see `Builder.transpose`).  What has one spatial axis runs as two,
the first of length one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from ..compile.ir import DType, Param, Tensor
from .builder import Builder, Shape, Value, b8, u32
from .registry import lowers

aten = torch.ops.aten


def _channels_last(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, *range(2, x.rank), 1))


def _channels_first(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


def _both_ends(padding: Sequence[int]) -> list[tuple[int, int]]:
    return [(p, p) for p in padding]


def _each(values: Sequence[int], n: int) -> list[int]:
    """PyTorch's spelling of one value per axis: one for all, or none for a default of 1."""
    return list(values) * n if len(values) == 1 else list(values)


# -- convolution -------------------------------------------------------------------------------


@lowers(aten.convolution.default)
def convolution(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    axes = x.rank - 2
    stride, padding, dilation, output_padding = (
        _each(v, axes) for v in (stride, padding, dilation, output_padding)
    )
    if axes == 1:
        x, weight = (b.reshape(v, (*v.shape[:2], 1, v.shape[2])) for v in (x, weight))
        stride, padding = [1, *stride], [0, *padding]
        dilation, output_padding = [1, *dilation], [0, *output_padding]
    x = _channels_last(b, x)
    bias = None if bias is None else b.cast(bias, x.dtype)
    if transposed:
        y = _transposed(b, x, weight, bias, stride, padding, dilation, output_padding, groups)
    else:
        y = _convolved(b, x, weight, bias, stride, _both_ends(padding), dilation, groups)
    return b.reshape(_channels_first(b, y), b.result.shape)


def _convolved(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[tuple[int, int]],
    dilation: Sequence[int],
    groups: int,
) -> Value:
    """A convolution, channels last, with padding (before, after) of each axis.

    QNN's is wrong for an image of one column whenever it is padded, and for one of one row if both
    ends are padded alike and the length is 8, 16, 24 and so on, up to 8 times the padding.
    """
    kernel = weight.shape[2:]
    if x.rank == 4 and x.shape[1] > 1 == x.shape[2] == kernel[1] and not any(padding[1]):
        row, flat = (b.reshape(v, _turned(v.shape, i)) for v, i in ((x, 1), (weight, 2)))
        y = _convolved(b, row, flat, bias, stride[::-1], padding[::-1], dilation[::-1], groups)
        return b.reshape(y, _turned(y.shape, 1))
    lengths = [
        (n + sum(p) - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x.shape[1:-1], kernel, stride, padding, dilation, strict=True)
    ]
    wanted = lengths[-1]
    if x.rank == 4 and x.shape[1] == kernel[0] == 1 and _is_padded_alike(b, x, padding[1]):
        # One more zero at the end; the output that it may add is cut off.
        before, after = padding[1][0], padding[1][1] + 1
        padding = [padding[0], (before, after)]
        reach = dilation[1] * (kernel[1] - 1) + 1
        lengths[1] = (x.shape[2] + before + after - reach) // stride[1] + 1
    params: dict[str, Param] = {
        "stride": b.param(stride),
        "pad_amount": b.param(padding),
        "dilation": b.param(dilation),
    }
    op = "Conv3d" if len(kernel) == 3 else "Conv2d"
    if op == "Conv2d" and groups == x.shape[-1] > 1 and max(dilation) == 1:
        op = "DepthWiseConv2d"
    else:
        params["group"] = u32(groups)
    filters = b.transpose(weight, (*range(2, weight.rank), 1, 0))
    inputs = [x, filters] if bias is None else [x, filters, bias]
    y = b.op(op, inputs, (x.shape[0], *lengths, weight.shape[0]), params=params)
    return b.slice(y, y.rank - 2, 0, wanted)


def _turned(shape: Shape, i: int) -> Shape:
    """`shape` with the axes `i` and `i + 1` exchanged."""
    return (*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :])


def _is_padded_alike(b: Builder, x: Value, padding: tuple[int, int]) -> bool:
    """Whether a row is padded alike at both ends, be it by an op before, which QNN fuses."""
    source = b.moved_from(x)
    node = None if source is None else b.producer(source)
    amounts = [padding]
    if node is not None and node.type == "Pad":
        pads = node.params["pad_amount"]
        assert isinstance(pads, Tensor)
        assert isinstance(pads.data, np.ndarray)
        amounts += [(int(before), int(after)) for before, after in pads.data]
    return any(before == after > 0 for before, after in amounts)


def _transposed(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
) -> Value:
    if weight.rank != 4:
        b.refuse("QNN's transposed convolution of three spatial axes is not used")
    if groups > 1 or max(dilation) > 1:
        if not weight.is_const:
            b.refuse("QNN's transposed convolution has neither groups nor dilation")
        weight = _spread(b, weight, dilation, groups)
    sizes = zip(x.shape[1:3], weight.shape[2:], stride, padding, output_padding, strict=True)
    spatial = tuple((n - 1) * s - 2 * p + k + o for n, k, s, p, o in sizes)
    params: dict[str, Param] = {
        "stride": b.param(stride),
        "pad_amount": b.param(_both_ends(padding)),
        "output_padding": b.param(output_padding),
        "group": u32(1),
    }
    filters = b.transpose(weight, (2, 3, 0, 1))
    inputs = [x, filters] if bias is None else [x, filters, bias]
    shape = (x.shape[0], *spatial, weight.shape[1])
    return b.op("TransposeConv2d", inputs, shape, params=params)


def _spread(b: Builder, weight: Value, dilation: Sequence[int], groups: int) -> Value:
    """The weight `[in, out, h, w]` of the same convolution with one group and no dilation."""
    n, m, *kernel = weight.shape
    h, w = ((k - 1) * d + 1 for k, d in zip(kernel, dilation, strict=True))

    def fn(t: torch.Tensor) -> torch.Tensor:
        full = t.new_zeros(groups, n // groups, groups, m, h, w)
        for g, part in enumerate(t.unflatten(0, (groups, -1))):
            full[g, :, g, :, :: dilation[0], :: dilation[1]] = part
        return full.reshape(n, groups * m, h, w)

    return b.derived(weight, f"spread {dilation} {groups}", fn, (n, groups * m, h, w))


# -- pools -------------------------------------------------------------------------------------


class _Windows:
    """The windows of a pool over `[..., h, w]`.

    Attributes:
        spatial: the result's height and width.
        padding: (before, after) of each axis: PyTorch's, with `after` such that QNN's pool, which
            knows no `ceil_mode` that agrees with PyTorch's, gives `spatial`.
    """

    def __init__(
        self,
        result: Shape,
        size: Shape,
        kernel: Sequence[int],
        stride: Sequence[int],
        padding: Sequence[int],
    ) -> None:
        self.spatial, self.size = result[-2:], size[-2:]
        self.kernel = _each(kernel, 2)
        self.stride = _each(stride, 2) or self.kernel
        self.declared = _each(padding, 2)
        self.padding = [
            (p, max((m - 1) * s + k - n - p, 0))
            for m, n, k, s, p in zip(
                self.spatial, self.size, self.kernel, self.stride, self.declared, strict=True
            )
        ]

    def params(self, b: Builder) -> dict[str, Param]:
        return {
            "filter_size": b.param(self.kernel),
            "stride": b.param(self.stride),
            "pad_amount": b.param(self.padding),
            "rounding_mode": u32(0),
        }

    def counts(self, include_padding: bool) -> torch.Tensor:
        """How many elements PyTorch averages in each window, `[1, h, w, 1]`."""
        sides = []
        for m, n, k, s, p in zip(
            self.spatial, self.size, self.kernel, self.stride, self.declared, strict=True
        ):
            first = torch.arange(m) * s - p
            low, high = (-p, n + p) if include_padding else (0, n)
            sides.append((first + k).clamp(max=high) - first.clamp(min=low))
        return (sides[0][:, None] * sides[1]).reshape(1, *self.spatial, 1)


def _pooled(b: Builder, x: Value, pool: Callable[[Value, Shape], Value], w: _Windows) -> Value:
    """`pool` in QNN's layout on `[..., c, h, w]`."""
    if x.dtype is not DType.FLOAT16:
        b.refuse(f"QNN does not pool {x.dtype.name}")
    x = b.reshape(x, (math.prod(x.shape[:-3]), *x.shape[-3:]))
    y = pool(_channels_last(b, x), (x.shape[0], *w.spatial, x.shape[1]))
    return b.reshape(_channels_first(b, y), b.result.shape)


def _max_pool(b: Builder, x: Value, w: _Windows) -> list[Value]:
    if 1 in b.used:
        b.refuse("QNN's max pool does not tell where the maxima stood")
    y = _pooled(b, x, lambda v, s: b.op("PoolMax2d", [v], s, params=w.params(b)), w)
    nowhere = b.expand(b.const(torch.tensor(0)), b.result.shape)
    return [y, nowhere]


@lowers(aten.max_pool2d_with_indices.default)
def max_pool2d(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    *_: object,
) -> list[Value]:
    if max(dilation) > 1:
        b.refuse("QNN's max pool has no dilation")
    return _max_pool(b, x, _Windows(b.result.shape, x.shape, kernel, stride, padding))


@lowers(aten.adaptive_max_pool2d.default)
def adaptive_max_pool2d(b: Builder, x: Value, *_: object) -> list[Value]:
    return _max_pool(b, x, _adaptive(b, x))


@lowers(aten.avg_pool2d.default)
def avg_pool2d(
    b: Builder,
    x: Value,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:
    w = _Windows(b.result.shape, x.shape, kernel, stride, padding)
    counts = w.counts(count_include_pad)
    if divisor_override is not None:
        counts = torch.full_like(counts, divisor_override)
    return _avg_pool(b, x, w, counts)


@lowers(aten._adaptive_avg_pool2d.default)
def adaptive_avg_pool2d(b: Builder, x: Value, *_: object) -> Value:
    w = _adaptive(b, x)
    return _avg_pool(b, x, w, w.counts(False))


def _avg_pool(b: Builder, x: Value, w: _Windows, counts: torch.Tensor) -> Value:
    """The sum over each window divided by `counts`.

    QNN's own pool is right where windows neither overlap nor reach outside; elsewhere a depthwise
    convolution is.
    """
    area = math.prod(w.kernel)
    factor = area / counts

    def pool(v: Value, shape: Shape) -> Value:
        if w.kernel == w.stride and not any(map(any, w.padding)):
            params = {**w.params(b), "count_pad_for_edges": b8(False)}
            y = b.op("PoolAvg2d", [v], shape, params=params)
        else:
            weight = b.const(torch.full((v.shape[-1], 1, *w.kernel), 1 / area))
            y = _convolved(b, v, weight, None, w.stride, w.padding, [1, 1], v.shape[-1])
        if bool((factor == 1).all()):
            return y
        return b.binary("ElementWiseMultiply", y, b.const(factor))

    return _pooled(b, x, pool, w)


def _adaptive(b: Builder, x: Value) -> _Windows:
    """Windows of one size, as QNN's pools have them."""
    spatial, size = b.result.shape[-2:], x.shape[-2:]
    if any(n % m for n, m in zip(size, spatial, strict=True)):
        b.refuse(f"{list(size)} does not divide into {list(spatial)} windows of one size")
    kernel = [n // m for n, m in zip(size, spatial, strict=True)]
    return _Windows(b.result.shape, x.shape, kernel, kernel, (0,))


# -- resampling --------------------------------------------------------------------------------


@lowers(aten.upsample_nearest2d.vec)
def upsample_nearest2d_vec(
    b: Builder, x: Value, _: object, scales: Sequence[float] | None = None
) -> Value:
    return upsample_nearest2d(b, x, _, *(scales or ()))


@lowers(aten.upsample_nearest2d.default)
def upsample_nearest2d(b: Builder, x: Value, _: object, *scales: float | None) -> Value:
    return _resized(b, x, "ResizeNearestNeighbor", False, False, scales)


@lowers(aten.upsample_bilinear2d.vec)
def upsample_bilinear2d_vec(
    b: Builder, x: Value, _: object, corners: bool, scales: Sequence[float] | None = None
) -> Value:
    return upsample_bilinear2d(b, x, _, corners, *(scales or ()))


@lowers(aten.upsample_bilinear2d.default)
def upsample_bilinear2d(
    b: Builder, x: Value, _: object, corners: bool, *scales: float | None
) -> Value:
    return _resized(b, x, "ResizeBilinear", corners, not corners, () if corners else scales)


def _resized(
    b: Builder,
    x: Value,
    type: str,
    corners: bool,
    half_pixel: bool,
    scales: Sequence[float | None],
) -> Value:
    shape = b.result.shape
    for scale, n, m in zip(scales, x.shape[2:], shape[2:], strict=False):
        if scale is not None and n * scale != m:
            b.refuse(f"QNN resizes by the ratio of the sizes, {m}/{n}, not by {scale}")
    params: dict[str, Param] = {
        "align_corners": b8(corners),
        "half_pixel_centers": b8(half_pixel),
    }
    y = b.op(type, [_channels_last(b, x)], (shape[0], *shape[2:], shape[1]), params=params)
    return _channels_first(b, y)
