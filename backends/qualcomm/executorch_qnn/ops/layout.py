# SPDX-License-Identifier: BSD-3-Clause
"""Layout: views, permutations, concatenation, splitting, broadcasting, filling."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..compile.ir import Param
from .builder import Builder, Number, Value, u32
from .registry import lowers

aten = torch.ops.aten


def axis(dim: int, rank: int) -> int:
    """`dim` counted from the front; a 0-d tensor counts as one of rank 1."""
    return dim % max(rank, 1)


def bounds(n: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Start and end of a slice of an axis of length `n`, as PyTorch clamps them."""
    start = 0 if start is None else start
    end = n if end is None else end
    start = min(max(start + n if start < 0 else start, 0), n)
    end = min(max(end + n if end < 0 else end, start), n)
    return start, end


# -- views: the same elements in the same order ------------------------------------------------


@lowers(
    aten.view.default,
    aten.view_copy.default,
    aten._unsafe_view.default,
    aten.reshape.default,
    aten._reshape_copy.default,
    aten.unsqueeze.default,
    aten.unsqueeze_copy.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.squeeze_copy.default,
    aten.squeeze_copy.dim,
    aten.squeeze_copy.dims,
)
def view(b: Builder, x: Value, *_: object) -> Value:
    return b.reshape(x, b.result.shape)


@lowers(aten.permute.default, aten.permute_copy.default)
def permute(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    return b.transpose(x, [axis(d, x.rank) for d in dims])


@lowers(aten.transpose.int, aten.transpose_copy.int)
def transpose(b: Builder, x: Value, dim0: int, dim1: int) -> Value:
    if not x.rank:
        return x
    perm = list(range(x.rank))
    i, j = axis(dim0, x.rank), axis(dim1, x.rank)
    perm[i], perm[j] = j, i
    return b.transpose(x, perm)


@lowers(aten.t.default, aten.t_copy.default)
def t(b: Builder, x: Value) -> Value:
    return b.transpose(x, range(x.rank)[::-1])


# -- repetition --------------------------------------------------------------------------------


@lowers(aten.expand.default, aten.expand_copy.default)
def expand(b: Builder, x: Value, *_: object) -> Value:
    return b.expand(x, b.result.shape)


@lowers(aten.copy.default)
def copy(b: Builder, x: Value, source: Value, *_: object) -> Value:
    """`x.copy_(source)`: what remains of it is `source`."""
    return b.expand(b.cast(source, x.dtype), x.shape)


@lowers(aten.repeat.default)
def repeat(b: Builder, x: Value, repeats: Sequence[int]) -> Value:
    x = b.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape)
    return b.tile(x, repeats)


@lowers(aten.repeat_interleave.self_int, keep=True)
def repeat_interleave(b: Builder, x: Value, repeats: int, dim: int | None, *_: object) -> Value:
    """Three axes are enough: what stands before, one element after another, what stands behind."""
    d = 0 if dim is None else axis(dim, x.rank)
    inner = 1 if dim is None else math.prod(x.shape[d + 1 :])
    x = b.reshape(x, (x.numel // inner, 1, inner))
    return b.reshape(b.tile(x, (1, repeats, 1)), b.result.shape)


# -- joining and cutting -----------------------------------------------------------------------


@lowers(aten.cat.default)
def cat(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    xs = [b.cast(x, b.result.dtype) for x in tensors if x.shape != (0,)]
    return b.concat(xs, axis(dim, xs[0].rank))


@lowers(aten.stack.default)
def stack(b: Builder, tensors: Sequence[Value], dim: int = 0) -> Value:
    d = axis(dim, tensors[0].rank + 1)
    xs = [b.reshape(x, (*x.shape[:d], 1, *x.shape[d:])) for x in tensors]
    return cat(b, xs, d)


@lowers(aten.slice.Tensor, aten.slice_copy.Tensor)
def slice_(b: Builder, x: Value, dim: int, start: int | None, end: int | None, step: int) -> Value:
    d = axis(dim, x.rank)
    return b.slice(x, d, *bounds(x.shape[d], start, end), step)


@lowers(aten.select.int, aten.select_copy.int)
def select(b: Builder, x: Value, dim: int, index: int) -> Value:
    d = axis(dim, x.rank)
    i = index % x.shape[d]
    return b.reshape(b.slice(x, d, i, i + 1), b.result.shape)


@lowers(aten.narrow.default, aten.narrow_copy.default)
def narrow(b: Builder, x: Value, dim: int, start: int, length: int) -> Value:
    d = axis(dim, x.rank)
    start = start % x.shape[d] if start < 0 else start
    return b.slice(x, d, start, start + length)


def _pieces(b: Builder, x: Value, d: int) -> list[Value]:
    """`x` cut along axis `d` into pieces as long as the results are; unused ones cost nothing."""
    pieces, start = [], 0
    for r in b.results:
        pieces.append(b.slice(x, d, start, start + r.shape[d]))
        start += r.shape[d]
    return pieces


@lowers(
    aten.split.Tensor,
    aten.split_copy.Tensor,
    aten.split_with_sizes.default,
    aten.split_with_sizes_copy.default,
    aten.chunk.default,
)
def split(b: Builder, x: Value, _: object, dim: int = 0) -> list[Value]:
    return _pieces(b, x, axis(dim, x.rank))


@lowers(aten.unbind.int, aten.unbind_copy.int)
def unbind(b: Builder, x: Value, dim: int = 0) -> list[Value]:
    d = axis(dim, x.rank)
    return [
        b.reshape(b.slice(x, d, i, i + 1), (*x.shape[:d], *x.shape[d + 1 :]))
        for i in range(x.shape[d])
    ]


@lowers(aten.diagonal.default, aten.diagonal_copy.default)
def diagonal(b: Builder, x: Value, offset: int, dim1: int, dim2: int) -> Value:
    """The diagonal is every (columns + 1)-th element of the matrix laid out as a row."""
    i, j = axis(dim1, x.rank), axis(dim2, x.rank)
    x = b.transpose(x, [*(d for d in range(x.rank) if d not in (i, j)), i, j])
    *lead, rows, columns = x.shape
    x = b.reshape(x, (*lead, rows * columns))
    start = offset if offset >= 0 else -offset * columns
    length = b.result.shape[-1]
    stop = start + (length - 1) * (columns + 1) + 1
    return b.slice(x, len(lead), start, stop, columns + 1)


def strided_places(size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    """The elements of a row that a strided view of it has."""
    places = torch.tensor(offset)
    for n, step in zip(size, stride, strict=True):
        places = places[..., None] + torch.arange(n) * step
    return places.flatten()


@lowers(aten.as_strided.default, aten.as_strided_copy.default)
def as_strided(
    b: Builder, x: Value, size: Sequence[int], stride: Sequence[int], offset: int | None = None
) -> Value:
    if not b.dense:
        b.refuse("a strided view of a tensor that is one itself: call `contiguous()` first")
    places = b.const(strided_places(size, stride, offset or 0))
    return b.reshape(b.gather(b.reshape(x, (x.numel,)), 0, places), size)


@lowers(aten.unfold.default, aten.unfold_copy.default)
def unfold(b: Builder, x: Value, dim: int, size: int, step: int) -> Value:
    if not x.rank:
        return b.reshape(x, b.result.shape)
    d = axis(dim, x.rank)
    starts = torch.arange(0, x.shape[d] - size + 1, step)
    windows = b.gather(x, d, b.const(starts[:, None] + torch.arange(size)))
    order = [i for i in range(windows.rank) if i != d + 1]
    return b.transpose(windows, [*order, d + 1])


# -- order of elements -------------------------------------------------------------------------


@lowers(aten.flip.default)
def flip(b: Builder, x: Value, dims: Sequence[int]) -> Value:
    flipped = sorted({axis(d, x.rank) for d in dims if x.rank})
    if x.rank > 4:
        y = x
        for d in flipped:
            y = b.reshape(flip(b, b.around(y, d), [1]), x.shape)
        return y
    ranges = [[n - 1, -1, -1] if i in flipped else [0, n, 1] for i, n in enumerate(x.shape)]
    return b.strided(x, x.shape, ranges) if flipped else x


@lowers(aten.roll.default, keep=True)
def roll(b: Builder, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        return b.reshape(_rolled(b, b.reshape(x, (x.numel,)), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims, strict=True):
        x = _rolled(b, x, shift, axis(dim, x.rank))
    return x


def _rolled(b: Builder, x: Value, shift: int, d: int) -> Value:
    n = x.shape[d]
    cut = n - shift % n
    if cut == n:
        return x
    return b.concat([b.slice(x, d, cut, n), b.slice(x, d, 0, cut)], d)


@lowers(aten.pixel_shuffle.default, keep=True)
def pixel_shuffle(b: Builder, x: Value, factor: int) -> Value:
    return _blocks(b, "DepthToSpace", x, factor)


@lowers(aten.pixel_unshuffle.default, keep=True)
def pixel_unshuffle(b: Builder, x: Value, factor: int) -> Value:
    return _blocks(b, "SpaceToDepth", x, factor)


def _blocks(b: Builder, type: str, x: Value, factor: int) -> Value:
    *lead, c, h, w = b.result.shape
    n = math.prod(lead)
    x = b.transpose(b.reshape(x, (n, *x.shape[-3:])), (0, 2, 3, 1))
    crd = u32(1)  # channels outermost, as in PyTorch
    params: dict[str, Param] = {"block_size": b.param([factor, factor]), "mode": crd}
    y = b.op(type, [x], (n, h, w, c), params=params)
    return b.reshape(b.transpose(y, (0, 3, 1, 2)), b.result.shape)


# -- filling -----------------------------------------------------------------------------------


@lowers(aten.full_like.default)
def full_like(b: Builder, x: Value, value: Number, *_: object) -> Value:
    return _like(b, value)


@lowers(aten.zeros_like.default, aten.new_zeros.default)
def zeros_like(b: Builder, *_: object) -> Value:
    return _like(b, 0)


@lowers(aten.ones_like.default, aten.new_ones.default)
def ones_like(b: Builder, *_: object) -> Value:
    return _like(b, 1)


@lowers(aten.new_full.default)
def new_full(b: Builder, x: Value, size: object, value: Number, *_: object) -> Value:
    return _like(b, value)


def _like(b: Builder, value: Number) -> Value:
    """Nothing of the operand but its shape and type is used."""
    return b.expand(b.const(torch.tensor(value), b.result.dtype), b.result.shape)
