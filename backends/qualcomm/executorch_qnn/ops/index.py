# SPDX-License-Identifier: BSD-3-Clause
"""Indexing: gather, scatter, embedding, and the writes that update caches.

A write of rows into a buffer is one ScatterNd whose first input is the buffer itself, whatever
PyTorch spelled it with: that is the form that can be bound in place (see
`compile.hazards.aliasing_is_sound`).  Its index depends on the positions and on shapes only, so all
buffers of one shape share it.  Or it is a `Patch`, and only the rows leave the graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from ..compile.ir import DType, Kind
from .builder import MAX_RANK, Builder, Number, Patch, Shape, Value, broadcast, u32
from .elementwise import select
from .layout import axis, bounds, strided_places
from .reduction import running_counts
from .registry import lowers

aten = torch.ops.aten

Indices = Mapping[int, Value]
"""Axis to its index tensor, INT32, none negative."""


# -- indices -----------------------------------------------------------------------------------


def _index(b: Builder, index: Value, n: int, *, wraps: bool) -> Value:
    """`index` into an axis of length `n`; with `wraps`, negative ones count from the end."""
    if index.dtype is not DType.INT32:
        b.refuse(f"indices of type {index.dtype.name} give a result of unknown shape")
    if not wraps:
        return index
    if index.is_const:
        return b.derived(index, f"wrap {n}", lambda t: torch.where(t < 0, t + n, t), index.shape)
    below = b.binary("ElementWiseLess", index, b.value(0, DType.INT32), DType.BOOL8)
    wrapped = b.binary("ElementWiseAdd", index, b.value(n, DType.INT32))
    return select(b, below, wrapped, index)


def _advanced(b: Builder, x: Value, indices: Sequence[Value | None]) -> dict[int, Value]:
    return {d: _index(b, i, x.shape[d], wraps=True) for d, i in enumerate(indices) if i is not None}


class _Places:
    """What advanced indexing of a tensor of `shape` reads or writes.

    Attributes:
        axes: the number of leading axes up to the last one that is indexed.
        own: the indices' common shape.
        shape: of the places along these axes, in PyTorch's order: `own` stands where the first
            index stands if the indexed axes are neighbours, else in front.
    """

    def __init__(self, shape: Shape, indices: Indices) -> None:
        self.source = shape
        self.indices = indices
        self.axes = max(indices) + 1
        self.own = broadcast(*(i.shape for i in indices.values()))
        first = min(indices)
        free = [d for d in range(self.axes) if d not in indices]
        neighbours = self.axes - first == len(indices)
        self.start = first if neighbours else 0
        before = free if neighbours else []
        self.order: list[int | None] = [*before, *(None for _ in self.own)]
        self.order += [d for d in free if d not in before]
        own = iter(self.own)
        self.shape = tuple(next(own) if d is None else shape[d] for d in self.order)

    def coordinates(self, b: Builder) -> Value:
        """INT32 `[*shape, axes]`, or a list `[numel, axes]`.

        It is a list where QNN wants one: for single elements, and where its rank would be 5.
        """
        listed = self.axes == len(self.source) or len(self.shape) > 3 or not self.shape
        to = (math.prod(self.shape), 1) if listed else (*self.shape, 1)
        columns: list[Value] = []
        for d in range(self.axes):
            column = self._column(b, d)
            if not listed:  # the new axis comes first: a broadcast of rank 4 at most
                column = b.reshape(column, (*column.shape, 1))
            column = b.reshape(b.expand(column, self.shape if listed else to), to)
            if columns and columns[-1].is_const and column.is_const:
                columns[-1] = b.concat([columns[-1], column], len(to) - 1)
            else:
                columns.append(column)
        return b.concat(columns, len(to) - 1)

    def _column(self, b: Builder, d: int) -> Value:
        """The coordinates along axis `d`, in a shape that broadcasts to `shape`."""
        if d not in self.indices:
            steps = b.const(torch.arange(self.source[d]))
            return b.reshape(steps, [self.source[d] if k == d else 1 for k in self.order])
        index = self.indices[d]
        after = len(self.order) - self.start - len(self.own)
        leading = (1,) * (self.start + len(self.own) - index.rank)
        return b.reshape(index, (*leading, *index.shape, *(1,) * after))


# -- reading -----------------------------------------------------------------------------------


@lowers(aten.embedding.default)
def embedding(b: Builder, weight: Value, index: Value, *_: object) -> Value:
    return b.gather(weight, 0, index)


@lowers(aten.index_select.default)
def index_select(b: Builder, x: Value, dim: int, index: Value) -> Value:
    if not x.rank:
        return x
    y = b.gather(x, axis(dim, x.rank), _index(b, index, 0, wraps=False))
    return b.reshape(y, b.result.shape)


@lowers(aten.index.Tensor)
def index_tensor(b: Builder, x: Value, indices: Sequence[Value | None]) -> Value:
    at = _advanced(b, x, indices)
    if len(at) == 1:
        ((d, index),) = at.items()
        return b.gather(x, d, index)
    return b.reshape(_read(b, x, at), b.result.shape)


def _read(b: Builder, x: Value, indices: Indices) -> Value:
    """The places of `x` that `indices` name; in what shape, is the caller's business."""
    if x.rank >= MAX_RANK:
        axes = max(indices) + 1
        if axes > 3:
            b.refuse(f"QNN gathers places along up to 4 axes of tensors of rank 4, not {x.rank}")
        x = b.reshape(x, (*x.shape[:axes], math.prod(x.shape[axes:])))
    index = _Places(x.shape, indices).coordinates(b)
    shape = (*index.shape[:-1], *x.shape[index.shape[-1] :])
    params = {"batch_dims": u32(0)}
    return b.numerically(x, lambda v: b.op("GatherNd", [v, index], shape, params=params))


@lowers(aten.gather.default)
def gather(b: Builder, x: Value, dim: int, index: Value, *_: object) -> Value:
    """By places: QNN's GatherElements reads wrong ones of large tensors with leading axes."""
    if not x.rank:
        return b.expand(x, b.result.shape)
    return taken(b, x, axis(dim, x.rank), _index(b, index, 0, wraps=False))


def taken(b: Builder, x: Value, d: int, index: Value) -> Value:
    """`x.gather(d, index)`."""
    shape = index.shape
    if (rows := whole_rows(b, index, x.shape, d)) is not None:
        return b.gather(x, d, rows)
    if x.rank >= MAX_RANK:
        for k, n in enumerate(index.shape):
            x = x if k == d else b.slice(x, k, 0, n)
        x, index, d = b.around(x, d), b.around(index, d), 1
    return b.reshape(_read(b, x, _elements(b, index, x.shape, d)), shape)


def whole_rows(b: Builder, index: Value, shape: Shape, d: int) -> Value | None:
    """`index` as a row, if it is that row wherever a tensor of `shape` has a place beside `d`."""
    narrow = index.narrow or index
    lengths = (1,) * (index.rank - narrow.rank) + narrow.shape
    beside = [k for k in range(index.rank) if k != d]
    if any(lengths[k] != 1 or index.shape[k] != shape[k] for k in beside):
        return None
    return b.expand(b.reshape(narrow, (lengths[d],)), (index.shape[d],))


def _elements(b: Builder, index: Value, shape: Shape, d: int) -> Indices:
    """The places that `index` along axis `d` of a tensor of `shape` stands for, one by one.

    Trailing axes that it covers wholly, and does not depend on, are left out.
    """
    narrow = index.narrow or index
    lengths = (1,) * (index.rank - narrow.rank) + narrow.shape
    end = index.rank
    while end - 1 > d and lengths[end - 1] == 1 and index.shape[end - 1] == shape[end - 1]:
        end -= 1
    covered = index.shape[:end]
    indices = {}
    for k, n in enumerate(covered):
        indices[k] = b.reshape(b.const(torch.arange(n)), [n if j == k else 1 for j in range(end)])
    if end < index.rank:
        index = b.expand(b.reshape(narrow, lengths[:end]), covered)
    return {**indices, d: index}


# -- writing -----------------------------------------------------------------------------------


def written(b: Builder, x: Value, indices: Indices, values: Value, *, add: bool = False) -> Value:
    """`x` with `values` at the places that `indices` name: one ScatterNd, or a patch."""
    if add and x.dtype is DType.BOOL8:
        b.refuse("QNN does not add bools")
    places = _Places(x.shape, indices)
    values = b.expand(b.cast(values, x.dtype), (*places.shape, *x.shape[places.axes :]))

    def scattered() -> Value:
        return _scattered(b, x, indices, values, add)

    if len(indices) > 1 or add:
        return scattered()
    ((d, index),) = indices.items()
    base = x if x.patch is None else x.patch.base
    if index.is_const or (x.patch and x.patch.dim != d) or not b.patches(base, values.numel):
        return scattered()
    index = b.reshape(index, (index.numel,))
    rows = b.reshape(values, (*x.shape[:d], index.numel, *x.shape[d + 1 :]))
    if x.patch is not None:
        index = b.concat([x.patch.index, index], 0)
        rows = b.concat([x.patch.rows, rows], d)
    return Value(x.shape, x.dtype, patch=Patch(base, d, index, rows, scattered))


def _scattered(b: Builder, x: Value, indices: Indices, values: Value, add: bool) -> Value:
    target, indices = _unviewed(b, x, indices)
    index = _Places(target.shape, indices).coordinates(b)
    values = b.reshape(values, (*index.shape[:-1], *target.shape[index.shape[-1] :]))
    params = {"reduction": u32(1 if add else 0)}
    y = b.op("ScatterNd", [target, index, values], target.shape, params=params)
    return b.reshape(y, x.shape)


def _unviewed(b: Builder, x: Value, indices: Indices) -> tuple[Value, Indices]:
    """Where `x` is a buffer with other axes of length one, the buffer, and its axis for `x`'s."""
    base = b.base(x)
    old = [d for d, n in enumerate(x.shape) if n != 1]
    new = [d for d, n in enumerate(base.shape) if n != 1]
    if len(indices) > 1 or [x.shape[d] for d in old] != [base.shape[d] for d in new]:
        return x, indices
    ((d, index),) = indices.items()
    return (base, {new[old.index(d)]: index}) if d in old else (x, indices)


@lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    b: Builder,
    x: Value,
    indices: Sequence[Value | None],
    values: Value,
    accumulate: bool = False,
    *_: object,
) -> Value:
    masks = [d for d, i in enumerate(indices) if i is not None and i.dtype is DType.BOOL8]
    given = [i for i in indices if i is not None]
    if len(masks) == len(given) == 1:
        return _put_masked(b, x, masks[0], given[0], values, accumulate)
    return written(b, x, _advanced(b, x, indices), values, add=accumulate)


def _put_masked(
    b: Builder, x: Value, d: int, mask: Value, values: Value, accumulate: bool
) -> Value:
    """`x[:, mask] = values` with the mask along the axes from `d` on.

    What PyTorch gives for the masked places has one axis for them, the `d`-th.
    """
    rest = x.rank - d - mask.rank
    mask = b.reshape(mask, (*(1,) * d, *mask.shape, *(1,) * rest))
    values = b.cast(values, x.dtype)
    values = b.reshape(values, (1,) * (d + 1 + rest - values.rank) + values.shape)
    masked = mask.shape[d : x.rank - rest]
    if values.shape[d] == 1:  # the same for all of them
        ones = (1,) * len(masked)
        new = b.reshape(values, (*values.shape[:d], *ones, *values.shape[d + 1 :]))
        y = select(b, mask, new, x)
    elif d:
        b.refuse("rows for the places of a mask that begins at an inner axis")
    else:
        values = b.expand(values, (values.shape[0], *x.shape[x.rank - rest :]))
        y = _masked(b, x, b.expand(mask, x.shape), values)
    if accumulate:
        y = select(b, mask, b.binary("ElementWiseAdd", x, y), x)
    return b.expand(y, x.shape)


def _rows(b: Builder, x: Value, dim: int, index: Value) -> Indices:
    """One axis, `index` of rank 1; PyTorch does not let it count from the end."""
    return {axis(dim, x.rank): b.reshape(_index(b, index, 0, wraps=False), (index.numel,))}


@lowers(aten.index_copy.default, keep=True)
def index_copy(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return _copy_rows(b, x, dim, index, source)


@lowers(aten.index_add.default, keep=True)
def index_add(
    b: Builder, x: Value, dim: int, index: Value, source: Value, alpha: Number = 1
) -> Value:
    if alpha != 1:
        source = b.binary("ElementWiseMultiply", source, b.value(alpha, source.dtype))
    return _copy_rows(b, x, dim, index, source, add=True)


def _copy_rows(
    b: Builder, x: Value, dim: int, index: Value, source: Value, *, add: bool = False
) -> Value:
    if not x.rank:
        x1, source = b.reshape(x, (1,)), b.reshape(source, (1,))
        return b.reshape(written(b, x1, _rows(b, x1, 0, index), source, add=add), ())
    d = axis(dim, x.rank)
    source = b.reshape(source, (*x.shape[:d], index.numel, *x.shape[d + 1 :]))
    return written(b, x, _rows(b, x, d, index), source, add=add)


@lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor, keep=True)
def index_fill(b: Builder, x: Value, dim: int, index: Value, value: Value | Number) -> Value:
    if not x.rank:
        return b.expand(b.value(value, x.dtype), ())
    return written(b, x, _rows(b, x, dim, index), b.value(value, x.dtype))


@lowers(aten.slice_scatter.default)
def slice_scatter(
    b: Builder,
    x: Value,
    source: Value,
    dim: int,
    start: int | None,
    end: int | None,
    step: int,
) -> Value:
    d = axis(dim, x.rank)
    return _overwrite(b, x, source, d, *bounds(x.shape[d], start, end), step)


@lowers(aten.select_scatter.default, keep=True)
def select_scatter(b: Builder, x: Value, source: Value, dim: int, index: int) -> Value:
    d = axis(dim, x.rank)
    i = index % x.shape[d]
    source = b.reshape(source, (*x.shape[:d], 1, *x.shape[d + 1 :]))
    return _overwrite(b, x, source, d, i, i + 1, 1)


def _overwrite(
    b: Builder, x: Value, source: Value, d: int, start: int, end: int, step: int
) -> Value:
    source = b.cast(source, x.dtype)
    n = x.shape[d]
    if (start, end, step) == (0, n, 1):
        return source
    if start == end:
        return x
    if step == 1 and not _is_buffer(b, x):
        before = [b.slice(x, d, 0, start)] if start else []
        after = [b.slice(x, d, end, n)] if end < n else []
        return b.concat([*before, source, *after], d)
    if x.rank > MAX_RANK:
        y = _overwrite(b, b.around(x, d), b.around(source, d), 1, start, end, step)
        return b.reshape(y, x.shape)
    return written(b, x, {d: b.const(torch.arange(start, end, step))}, source)


def _is_buffer(b: Builder, x: Value) -> bool:
    """Whether `x` is an input of the graph, or one with some places overwritten."""
    tensor = b.base(x).tensor
    while tensor is not None and (node := b.producer(tensor)) and node.type == "ScatterNd":
        tensor = node.inputs[0]
    return tensor is not None and tensor.kind is Kind.INPUT


@lowers(aten.scatter.src)
def scatter(
    b: Builder, x: Value, dim: int, index: Value, source: Value, *, add: bool = False
) -> Value:
    index = _index(b, index, 0, wraps=False)
    if x.rank:
        return scattered(b, x, axis(dim, x.rank), index, source, add=add)
    x, index, source = (b.reshape(v, (1,)) for v in (x, index, source))
    return b.reshape(scattered(b, x, 0, index, source, add=add), ())


@lowers(aten.scatter.value)
def scatter_value(b: Builder, x: Value, dim: int, index: Value, value: Number) -> Value:
    return scatter(b, x, dim, index, b.expand(b.value(value, x.dtype), index.shape))


@lowers(aten.scatter_add.default)
def scatter_add(b: Builder, x: Value, dim: int, index: Value, source: Value) -> Value:
    return scatter(b, x, dim, index, source, add=True)


@lowers(aten.masked_scatter.default)
def masked_scatter(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    return _masked(b, b.expand(x, b.result.shape), mask, source)


def _masked(b: Builder, x: Value, mask: Value, source: Value) -> Value:
    """`x` with the elements of `source` one after another where `mask` holds.

    Where the mask says the same of whole rows, rows are what is counted and moved.
    """
    lengths = (mask.narrow or mask).shape
    lengths = (1,) * (x.rank - len(lengths)) + lengths
    end = x.rank
    while end and lengths[end - 1] == 1 and source.numel % math.prod(x.shape[end - 1 :]) == 0:
        end -= 1
    width = math.prod(x.shape[end:])
    rows = b.reshape(x, (x.numel // width, width))
    held = mask.narrow or mask
    held = b.expand(b.reshape(held, lengths[:end]), x.shape[:end])
    held = b.reshape(held, (1, rows.shape[0]))
    taken_so_far = b.binary("ElementWiseSubtract", running_counts(b, held), b.value(1))
    place = b.binary("ElementWiseMaximum", taken_so_far, b.value(0))
    given = b.reshape(b.cast(source, x.dtype), (source.numel // width, width))
    place = b.binary("ElementWiseMinimum", place, b.value(given.shape[0] - 1))
    new = b.gather(given, 0, b.reshape(place, (rows.shape[0],)))
    held = b.reshape(held, (rows.shape[0], 1))
    return b.reshape(select(b, held, new, rows), x.shape)


@lowers(aten.diagonal_scatter.default, keep=True)
def diagonal_scatter(
    b: Builder, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> Value:
    """The diagonal is every (columns + 1)-th element of the matrix laid out as a row."""
    i, j = axis(dim1, x.rank), axis(dim2, x.rank)
    order = [*(d for d in range(x.rank) if d not in (i, j)), i, j]
    matrices = b.transpose(x, order)
    *lead, rows, columns = matrices.shape
    start = offset if offset >= 0 else -offset * columns
    places = start + torch.arange(source.shape[-1]) * (columns + 1)
    flat = b.reshape(matrices, (math.prod(lead), rows * columns))
    source = b.reshape(b.cast(source, x.dtype), (math.prod(lead), source.shape[-1]))
    y = b.reshape(written(b, flat, {1: b.const(places)}, source), matrices.shape)
    return b.transpose(y, [order.index(d) for d in range(x.rank)])


@lowers(aten.as_strided_scatter.default, keep=True)
def as_strided_scatter(
    b: Builder, x: Value, source: Value, size: Sequence[int], stride: Sequence[int],
    offset: int | None = None,
) -> Value:  # fmt: skip
    if not b.dense:
        b.refuse("a strided view of a tensor that is one itself: call `contiguous()` first")
    places = b.const(strided_places(size, stride, offset or 0))
    source = b.reshape(b.cast(source, x.dtype), (source.numel,))
    return b.reshape(written(b, b.reshape(x, (x.numel,)), {0: places}, source), x.shape)


def scattered(
    b: Builder, x: Value, d: int, index: Value, source: Value, *, add: bool = False
) -> Value:
    """`x` with `source` at the places `index` along `dim`, element by element.

    As a list of places: ScatterElements adds only integers, has no bools, and QAIRT 2.47 writes
    wrong places with it from some 100,000 elements on.
    """
    for k, n in enumerate(index.shape):
        source = b.slice(source, k, 0, n)
    if (rows := whole_rows(b, index, x.shape, d)) is not None:
        return written(b, x, {d: rows}, source, add=add)
    if x.rank >= MAX_RANK:
        if any(index.shape[k] != n for k, n in enumerate(x.shape) if k != d):
            b.refuse("QNN scatters into a part of tensors of up to rank 4")
        shape = x.shape
        x, index, source = (b.around(v, d) for v in (x, index, source))
        y = written(b, x, _elements(b, index, x.shape, 1), source, add=add)
        return b.reshape(y, shape)
    return written(b, x, _elements(b, index, x.shape, d), source, add=add)
