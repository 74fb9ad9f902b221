# SPDX-License-Identifier: BSD-3-Clause
"""Convolutions.

Those of three axes are made of QNN's of two where its own are wrong: the planes that the kernel
meets along the first axis lie side by side, as channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional

from ..compile.ir import Param, Tensor
from .builder import Builder, Shape, Value, u32
from .elementwise import plus
from .padding import padded
from .registry import lowers
from .spatial import channels_first, channels_last, each

aten = torch.ops.aten


@dataclass(frozen=True)
class Sweep:
    """How a kernel moves along an axis, which is padded at both ends."""

    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1

    def count(self, n: int, k: int) -> int:
        """The number of places to which a kernel of length `k` comes, of an axis of length `n`."""
        return (n + self.before + self.after - self.dilation * (k - 1) - 1) // self.stride + 1


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
    n = x.rank - 2
    each_axis = zip(each(stride, n), each(padding, n), each(dilation, n), strict=True)
    axes = [Sweep(s, p, p, d) for s, p, d in each_axis]
    longer = each(output_padding, n)
    if n == 1:
        x, weight = (b.reshape(v, (*v.shape[:2], 1, v.shape[2])) for v in (x, weight))
        axes, longer = [Sweep(), *axes], [0, *longer]
    x = channels_last(b, x)
    bias = None if bias is None else b.cast(bias, x.dtype)
    if transposed:
        axes = [replace(a, after=a.after - more) for a, more in zip(axes, longer, strict=True)]
        y = _transposed(b, x, weight, bias, axes, groups)
    else:
        y = convolved(b, x, weight, bias, axes, groups)
    return b.reshape(channels_first(b, y), b.result.shape)


_DEPTHWISE = ([1, 1], [2, 2])  # strides at which QNN's DepthWiseConv2d is right


def convolved(
    b: Builder, x: Value, weight: Value, bias: Value | None, axes: Sequence[Sweep], groups: int
) -> Value:
    """A convolution of `[batch, *spatial, channels]` with a weight `[out, in, *kernel]`.

    QNN's is wrong for an image of one column whenever it is padded, and for one of one row if both
    ends are padded alike and the length is 8, 16, 24 and so on, up to 8 times the padding.
    """
    kernel = weight.shape[2:]
    if (needed := _needed(b, x.shape[1:-1], kernel, axes)) is not None:
        return _trimmed(b, x, weight, bias, axes, groups, needed)
    x, axes = _unstrided(b, x, kernel, axes)
    if len(kernel) == 3 and any(a.dilation > 1 for a in axes):  # QNN's Conv3d mostly refuses it
        return _by_planes(b, x, weight, bias, axes, groups)
    h, w = axes[-2:]
    if x.rank == 4 and x.shape[1] > 1 == x.shape[2] == kernel[1] and not (w.before or w.after):
        row, flat = (b.reshape(v, _turned(v.shape, i)) for v, i in ((x, 1), (weight, 2)))
        y = convolved(b, row, flat, bias, [w, h], groups)
        return b.reshape(y, _turned(y.shape, 1))
    wanted = w.count(x.shape[-2], kernel[-1])
    if x.rank == 4 and x.shape[1] == kernel[0] == 1 and _is_padded_alike(b, x, w):
        # One more zero at the end; the output that it may add is cut off.
        axes = [h, replace(w, after=w.after + 1)]
    counts = [a.count(n, k) for a, n, k in zip(axes, x.shape[1:-1], kernel, strict=True)]
    strides = [a.stride for a in axes]
    params: dict[str, Param] = {
        "stride": b.param(strides),
        "pad_amount": b.param([(a.before, a.after) for a in axes]),
        "dilation": b.param([a.dilation for a in axes]),
    }
    op = f"Conv{len(kernel)}d"
    undilated = h.dilation == w.dilation == 1
    if op == "Conv2d" and groups == x.shape[-1] > 1 and undilated and strides in _DEPTHWISE:
        op = "DepthWiseConv2d"
    else:
        params["group"] = u32(groups)
    filters = b.transpose(weight, (*range(2, weight.rank), 1, 0))
    inputs = [x, filters] if bias is None else [x, filters, bias]
    y = b.op(op, inputs, (x.shape[0], *counts, weight.shape[0]), params=params)
    return b.slice(y, y.rank - 2, 0, wanted)


def _unstrided(
    b: Builder, x: Value, kernel: Shape, axes: Sequence[Sweep]
) -> tuple[Value, list[Sweep]]:
    """Without strides that make no step; QNN takes some of them for others."""
    changed = []
    for d, (k, a) in enumerate(zip(kernel, axes, strict=True), 1):
        n = x.shape[d]
        if a.stride > 1 and a.count(n, k) == 1:
            end = a.dilation * (k - 1) + 1 - a.before
            x = b.slice(x, d, 0, min(n, end))
            a = replace(a, stride=1, after=max(end - n, 0))
        changed.append(a)
    return x, changed


def _needed(
    b: Builder, lengths: Shape, kernel: Shape, axes: Sequence[Sweep]
) -> list[tuple[range, range]] | None:
    """Of each axis the places of the result, and those of the kernel, that ever meet the image.

    `None` if all do.
    """
    needed, every = [], True
    for n, k, a in zip(lengths, kernel, axes, strict=True):
        m = a.count(n, k)
        met = [
            (i, j)
            for i in range(m)
            for j in range(k)
            if 0 <= i * a.stride - a.before + j * a.dilation < n
        ]
        if not met:
            b.refuse("its kernel meets nothing but padding; its result is the bias")
        results, taps = (range(min(v), max(v) + 1) for v in zip(*met, strict=True))
        needed.append((results, taps))
        every = every and len(results) == m and len(taps) == k
    return None if every else needed


def _trimmed(
    b: Builder,
    x: Value,
    weight: Value,
    bias: Value | None,
    axes: Sequence[Sweep],
    groups: int,
    needed: Sequence[tuple[range, range]],
) -> Value:
    """A convolution without what meets nothing but padding, which QNN computes wrongly."""
    lost, less = [], []
    for d, (a, (results, taps)) in enumerate(zip(axes, needed, strict=True), 1):
        n = x.shape[d]
        end = a.count(n, weight.shape[d + 1]) - results.stop
        lost.append((results.start, end))
        before = a.before - results.start * a.stride - taps.start * a.dilation
        reach = (len(results) - 1) * a.stride + a.dilation * (len(taps) - 1) + 1
        x = b.slice(x, d, max(-before, 0), min(n, reach - before))
        weight = b.slice(weight, d + 1, taps.start, taps.stop)
        less.append(replace(a, before=max(before, 0), after=max(reach - before - n, 0)))
    if not any(map(any, lost)):
        return convolved(b, x, weight, bias, less, groups)
    y = padded(b, convolved(b, x, weight, None, less, groups), [(0, 0), *lost, (0, 0)], 0)
    return y if bias is None else plus(b, y, bias)


def _by_planes(
    b: Builder, x: Value, weight: Value, bias: Value | None, axes: Sequence[Sweep], groups: int
) -> Value:
    """A convolution of three axes as one of two."""
    out, inner, depth, *kernel = weight.shape
    planes = _side_by_side(b, x, depth, axes[0], groups)
    filters = b.reshape(b.transpose(weight, (0, 2, 1, 3, 4)), (out, depth * inner, *kernel))
    y = convolved(b, planes, filters, bias, axes[1:], groups)
    return b.reshape(y, (x.shape[0], y.shape[0] // x.shape[0], *y.shape[1:]))


def _side_by_side(
    b: Builder, x: Value, depth: int, a: Sweep, groups: int, *, backwards: bool = False
) -> Value:
    """`[batch * count, height, width, depth * channels]`: the planes that a kernel meets.

    Args:
        x: `[batch, planes, height, width, channels]`.
        a: how the kernel moves along the planes; negative padding cuts.
        groups: of channels; the planes lie side by side in each.
        backwards: the kernel's last place meets the first plane.
    """
    n, length, h, w, c = x.shape
    rows = b.reshape(x, (n, length, h * w * groups, c // groups))
    rows = b.slice(rows, 1, max(-a.before, 0), length - max(-a.after, 0))
    rows = padded(b, rows, [(0, 0), (max(a.before, 0), max(a.after, 0)), (0, 0), (0, 0)], 0)
    count = a.count(length, depth)
    starts = [a.dilation * i for i in range(depth)]
    planes = [b.slice(rows, 1, i, i + a.stride * (count - 1) + 1, a.stride) for i in starts]
    joined = b.concat(planes[::-1] if backwards else planes, 3)
    return b.reshape(joined, (n * count, h, w, depth * c))


def _turned(shape: Shape, i: int) -> Shape:
    """`shape` with the axes `i` and `i + 1` exchanged."""
    return (*shape[:i], shape[i + 1], shape[i], *shape[i + 2 :])


def _is_padded_alike(b: Builder, x: Value, a: Sweep) -> bool:
    """Whether a row is padded alike at both ends, be it by an op before, which QNN fuses."""
    source = b.moved_from(x)
    node = None if source is None else b.producer(source)
    amounts = [(a.before, a.after)]
    if node is not None and node.type == "Pad":
        pads = node.params["pad_amount"]
        assert isinstance(pads, Tensor)
        assert isinstance(pads.data, np.ndarray)
        amounts += [(int(before), int(after)) for before, after in pads.data]
    return any(before == after > 0 for before, after in amounts)


# -- transposed --------------------------------------------------------------------------------


def _transposed(
    b: Builder, x: Value, weight: Value, bias: Value | None, axes: Sequence[Sweep], groups: int
) -> Value:
    """A transposed convolution of `[batch, *spatial, channels]` with `[in, out, *kernel]`.

    Padding is what is cut off its result; negative padding makes the result longer.  QNN's has no
    dilation, its groups are wrong, and its `output_padding` is wrong where it is longer than the
    padding: the kernel becomes longer instead.
    """
    if groups > 1 and not weight.is_const:
        n, m = weight.shape[0] // groups, weight.shape[1]
        parts = []
        for i in range(groups):
            own = b.slice(x, x.rank - 1, n * i, n * i + n), b.slice(weight, 0, n * i, n * i + n)
            added = None if bias is None else b.slice(bias, 0, m * i, m * i + m)
            parts.append(_transposed(b, *own, added, axes, 1))
        return b.concat(parts, x.rank - 1)
    weight = _dense(b, weight, groups)
    if weight.rank == 5:
        return _transposed_by_planes(b, x, weight, bias, axes)
    for d, a in enumerate(axes, 2):
        weight = _interleaved(b, weight, d, a.dilation)
        weight = _extended(b, weight, d, max(-a.after, 0))
    sizes = zip(x.shape[1:-1], weight.shape[2:], axes, strict=True)
    axes = [replace(a, after=max(a.after, 0)) for a in axes]
    spatial = tuple((n - 1) * a.stride + k - a.before - max(a.after, 0) for n, k, a in sizes)
    params: dict[str, Param] = {
        "stride": b.param([a.stride for a in axes]),
        "pad_amount": b.param([(a.before, a.after) for a in axes]),
        "output_padding": b.param([0] * len(axes)),
        "group": u32(1),
    }
    filters = b.transpose(weight, (2, 3, 0, 1))
    inputs = [x, filters] if bias is None else [x, filters, bias]
    shape = (x.shape[0], *spatial, weight.shape[1])
    return b.op("TransposeConv2d", inputs, shape, params=params)


def _transposed_by_planes(
    b: Builder, x: Value, weight: Value, bias: Value | None, axes: Sequence[Sweep]
) -> Value:
    """A transposed convolution of three axes as one of two: QNN's own is wrong more often than not.

    Along the first axis it is a convolution of what is interleaved with zeros, kernel reversed.
    """
    inner, out, depth, *kernel = weight.shape
    a = axes[0]
    reach = a.dilation * (depth - 1)
    along = Sweep(1, reach - a.before, reach - a.after, a.dilation)
    spread = _interleaved(b, x, 1, a.stride)
    planes = _side_by_side(b, spread, depth, along, 1, backwards=True)
    filters = b.reshape(b.transpose(weight, (2, 0, 1, 3, 4)), (depth * inner, out, *kernel))
    y = _transposed(b, planes, filters, bias, axes[1:], 1)
    return b.reshape(y, (x.shape[0], y.shape[0] // x.shape[0], *y.shape[1:]))


def _dense(b: Builder, weight: Value, groups: int) -> Value:
    """The weight `[in, out, *kernel]` of the same transposed convolution with one group."""
    if groups == 1:
        return weight
    n, m, *kernel = weight.shape

    def fn(t: torch.Tensor) -> torch.Tensor:
        full = t.new_zeros(groups, n // groups, groups, m, *kernel)
        for g, part in enumerate(t.unflatten(0, (groups, -1))):
            full[g, :, g] = part
        return full.reshape(n, groups * m, *kernel)

    return b.derived(weight, f"dense {groups}", fn, (n, groups * m, *kernel))


def _interleaved(b: Builder, x: Value, dim: int, step: int) -> Value:
    """`x` with `step - 1` zeros between its places along `dim`."""
    if step == 1:
        return x
    shape = (*x.shape[:dim], (x.shape[dim] - 1) * step + 1, *x.shape[dim + 1 :])
    if x.is_const:

        def fn(t: torch.Tensor) -> torch.Tensor:
            full = t.new_zeros(shape)
            full[(slice(None),) * dim + (slice(None, None, step),)] = t
            return full

        return b.derived(x, f"interleave {dim} {step}", fn, shape)
    y = b.around(x, dim)
    before, n, after = y.shape
    spread = padded(
        b, b.reshape(y, (before, n, 1, after)), [(0, 0), (0, 0), (0, step - 1), (0, 0)], 0
    )
    y = b.reshape(spread, (before, n * step, after))
    return b.reshape(b.slice(y, 1, 0, shape[dim]), shape)


def _extended(b: Builder, x: Value, dim: int, more: int) -> Value:
    """`x` with so many zeros at the end of axis `dim`."""
    if not more:
        return x
    amounts = [(0, more if d == dim else 0) for d in range(x.rank)]
    if not x.is_const:
        return padded(b, x, amounts, 0)
    shape = (*x.shape[:dim], x.shape[dim] + more, *x.shape[dim + 1 :])
    flat = [n for pair in reversed(amounts) for n in pair]
    return b.derived(x, f"extend {dim}", lambda t: functional.pad(t, flat), shape)
