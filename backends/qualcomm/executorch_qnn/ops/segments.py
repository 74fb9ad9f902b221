# SPDX-License-Identifier: BSD-3-Clause
"""What an index puts together: scatters that reduce, bags of embeddings.

QNN's scatter sets floats or adds them.  For other reductions what belongs together is brought
together by sorting, and reduced in as many steps as the longest segment has doublings.
"""

from __future__ import annotations

import math

import torch

from ..compile.ir import DType
from .builder import Builder, Value
from .elementwise import compare, logical, minus, quotient, select, times
from .index import scattered, taken, whole_rows, written
from .layout import axis
from .matmul import product
from .order import ordered
from .reduction import Combine, larger, reduce, smaller
from .registry import lowers

aten = torch.ops.aten

_COMBINE: dict[str, Combine] = {
    "amax": larger,
    "amin": smaller,
    "prod": times,
    "multiply": times,
}


def reduce_into(
    b: Builder, x: Value, d: int, index: Value, source: Value, how: str, include_self: bool
) -> Value:
    """`x.scatter_reduce(d, index, source, how)`."""
    if x.dtype is DType.BOOL8:
        b.refuse("reductions of bools: reduce integers and compare")
    for k, n in enumerate(index.shape):
        source = b.slice(source, k, 0, n)
    if how in _COMBINE:
        return _combined(b, x, d, index, source, _COMBINE[how], include_self)
    if how == "mean" and x.dtype is DType.INT32:
        b.refuse("a mean of integers is rounded down: divide floats")
    zeros, ones = (b.expand(b.value(n, x.dtype), index.shape) for n in (0, 1))
    count = b.expand(b.value(1, x.dtype), x.shape)
    if not include_self:
        x = scattered(b, x, d, index, zeros)
    total = scattered(b, x, d, index, source, add=True)
    if how != "mean":
        return total
    if not include_self:
        count = scattered(b, count, d, index, zeros)
    count = scattered(b, count, d, index, ones, add=True)
    return quotient(b, total, larger(b, count, b.value(1.0)))


def _combined(
    b: Builder, x: Value, d: int, index: Value, source: Value, combine: Combine, include_self: bool
) -> Value:
    """Sorted by place, the last element of each segment gathers all of it, and is what is set."""
    n = index.shape[d]
    rows = whole_rows(b, index, x.shape, d)
    if rows is not None:
        place, order = ordered(b, rows, n, 0, False)
        source = b.gather(source, d, order)
        present = b.gather(x, d, place)
        place = b.reshape(place, (*(1,) * d, n, *(1,) * (x.rank - d - 1)))
    else:
        place, order = ordered(b, index, n, d, False)
        source, present = taken(b, source, d, order), taken(b, x, d, place)
    step = 1
    while step < n:
        later = b.slice(source, d, step, n)
        same = compare(b, "Equal", b.slice(place, d, step, n), b.slice(place, d, 0, n - step))
        both = combine(b, later, b.slice(source, d, 0, n - step))
        source = b.concat([b.slice(source, d, 0, step), select(b, same, both, later)], d)
        step *= 2
    if include_self:
        source = combine(b, present, source)
    if n > 1:  # all but the last go to a place behind the end
        goes_on = compare(b, "Equal", b.slice(place, d, 1, n), b.slice(place, d, 0, n - 1))
        before = select(b, goes_on, x.shape[d], b.slice(place, d, 0, n - 1))
        place = b.concat([before, b.slice(place, d, n - 1, n)], d)
        x = b.concat([x, b.slice(x, d, 0, 1)], d)
    if rows is not None:
        y = written(b, x, {d: b.reshape(place, (n,))}, source)
    else:
        y = scattered(b, x, d, place, source)
    return b.slice(y, d, 0, y.shape[d] - (n > 1))


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    b: Builder, x: Value, dim: int, index: Value, source: Value, how: str,
    include_self: bool = True,
) -> Value:  # fmt: skip
    if x.rank:
        return reduce_into(b, x, axis(dim, x.rank), index, source, how, include_self)
    x, index, source = (b.reshape(v, (1,)) for v in (x, index, source))
    return b.reshape(reduce_into(b, x, 0, index, source, how, include_self), ())


@lowers(aten.scatter.reduce)
def scatter(b: Builder, x: Value, dim: int, index: Value, source: Value, how: str) -> Value:
    return scatter_reduce(b, x, dim, index, source, how)


@lowers(aten.scatter.value_reduce)
def scatter_value(b: Builder, x: Value, dim: int, index: Value, value: float, how: str) -> Value:
    return scatter_reduce(b, x, dim, index, b.expand(b.value(value, x.dtype), index.shape), how)


@lowers(aten.index_reduce.default)
def index_reduce(
    b: Builder, x: Value, dim: int, index: Value, source: Value, how: str,
    include_self: bool = True,
) -> Value:  # fmt: skip
    if not x.rank:
        x, source = b.reshape(x, (1,)), b.reshape(source, (1,))
        return b.reshape(index_reduce(b, x, 0, index, source, how, include_self), ())
    d = axis(dim, x.rank)
    shape = (*x.shape[:d], index.numel, *x.shape[d + 1 :])
    index = b.reshape(index, (*(1,) * d, index.numel, *(1,) * (x.rank - d - 1)))
    return reduce_into(b, x, d, b.expand(index, shape), source, how, include_self)


# -- bags of embeddings ------------------------------------------------------------------------


@lowers(aten._embedding_bag.default, aten._embedding_bag_forward_only.default)
def embedding_bag(
    b: Builder, weight: Value, index: Value, offsets: Value, scale_by_frequency: bool = False,
    mode: int = 0, sparse: bool = False, per_sample: Value | None = None,
    include_last_offset: bool = False, padding_index: int = -1,
) -> list[Value | None]:  # fmt: skip
    """Sums and means are products with a matrix that says which bag a row is in."""
    if any(math.prod(b.results[i].shape) for i in b.used - {0}):
        b.refuse("what it puts out beside the bags is for training")
    n, width = index.numel, weight.shape[1]
    rows = b.gather(weight, 0, b.reshape(index, (n,)))
    if per_sample is not None:
        rows = times(b, rows, b.reshape(per_sample, (n, 1)))
    bags = b.results[0].shape[0]
    if padding_index < 0 and _equal(b, offsets, n, bags):
        boxes = b.reshape(rows, (bags, n // bags, width))
        how = ("ReduceSum", "ReduceMean", "ReduceMax")[mode]
        return [reduce(b, how, boxes, [1], False), None, None, None]
    inside = _inside(b, offsets, n, bags)
    if padding_index >= 0:
        inside = logical(b, "And", inside, compare(b, "NotEqual", index, padding_index))
    weights = b.cast(inside, DType.FLOAT16)
    count = reduce(b, "ReduceSum", weights, [1])
    if mode == 2:
        inside = b.reshape(inside, (bags, n, 1))
        boxes = select(b, inside, b.reshape(rows, (1, n, width)), -math.inf)
        most = reduce(b, "ReduceMax", boxes, [1], False)
        y = select(b, compare(b, "Greater", count, 0.0), most, 0.0)
    else:
        y = product(b, weights, rows)
        y = quotient(b, y, larger(b, count, b.value(1.0))) if mode == 1 else y
    return [y, None, None, None]


def _equal(b: Builder, offsets: Value, n: int, bags: int) -> bool:
    """Whether all bags are known to be equally large."""
    if not offsets.is_const or n % bags:
        return False
    starts = b.numbers(offsets)[:bags]
    return bool((starts == torch.arange(bags) * (n // bags)).all())


def _inside(b: Builder, offsets: Value, n: int, bags: int) -> Value:
    """BOOL8 (bags, n): which bag each place is in."""
    places = torch.arange(n)
    if offsets.is_const:
        starts = b.numbers(offsets).reshape(-1, 1)
        ends = torch.cat([starts[1:], torch.tensor([[n]])])
        return b.const(((places >= starts) & (places < ends))[:bags])
    starts_at = b.reshape(offsets, (offsets.numel, 1))
    after = b.cast(compare(b, "GreaterEqual", b.const(places), starts_at), DType.INT32)
    if offsets.numel == 1:
        return b.cast(after, DType.BOOL8)
    begun = b.slice(after, 0, 0, offsets.numel - 1)
    over = b.slice(after, 0, 1, offsets.numel)
    inner = minus(b, begun, over)
    if bags < offsets.numel:
        return b.cast(inner, DType.BOOL8)
    last = b.slice(after, 0, bags - 1, bags)
    return b.cast(b.concat([inner, last], 0), DType.BOOL8)
