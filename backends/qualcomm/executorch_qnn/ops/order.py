# SPDX-License-Identifier: BSD-3-Clause
"""Order: sorting, the largest and the k-th elements, places in what is sorted.

HTP compares integers as float32: of those beyond 2^24 that lie closer together than it can tell,
any may come first.
"""

from __future__ import annotations

import math

import torch

from ..compile.ir import DType
from .builder import Arg, Builder, Value, b8, u32
from .elementwise import compare, plus, times
from .index import taken
from .layout import axis
from .reduction import reduce, reduced, running_counts
from .registry import lowers

aten = torch.ops.aten

_LONGEST = 4096
"""Longest row whose equal elements keep their order: float32 must hold the square of it."""


def _rows(b: Builder, x: Value, dim: int) -> Value:
    """`x` as a matrix with a row for each line along axis `dim`."""
    rows = b.transpose(b.around(x, dim), (0, 2, 1))
    return b.reshape(rows, (x.numel // x.shape[dim], x.shape[dim]))


def _lines(b: Builder, rows: Value, x: Value, dim: int) -> Value:
    """Rows of any length in the places of those of `x`."""
    before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
    lines = b.transpose(b.reshape(rows, (before, after, rows.shape[1])), (0, 2, 1))
    return b.reshape(lines, (*x.shape[:dim], rows.shape[1], *x.shape[dim + 1 :]))


def _first(b: Builder, rows: Value, k: int, largest: bool) -> tuple[Value, Value]:
    """The first `k` elements of each row in order, equal ones in any, and where they stood."""
    if rows.dtype is DType.BOOL8:
        values, at = _first(b, b.cast(rows, DType.FLOAT16), k, largest)
        return b.cast(values, DType.BOOL8), at
    shape = (rows.shape[0], k)
    # In ascending order QNN gives infinity a place that is none.
    turned = rows.dtype.is_float and not largest
    given = b.elementwise("ElementWiseNeg", [rows]) if turned else rows
    params = {"k": u32(k), "largest": b8(largest or turned)}
    values, at = b.ops("TopK", [given], [(shape, rows.dtype), (shape, DType.INT32)], params)
    if turned:
        values = b.elementwise("ElementWiseNeg", [values])
    elif not rows.dtype.is_float:  # as they are, not as float32
        values = taken(b, rows, 1, at)
    return values, at


def _as_they_stood(b: Builder, values: Value, at: Value) -> Value:
    """Where the elements of sorted rows stood, equal ones from left to right.

    The places are sorted once more, those of each value among themselves.
    """
    rows, n = values.shape
    if n == 1:
        return at
    new = compare(b, "NotEqual", b.slice(values, 1, 1, n), b.slice(values, 1, 0, n - 1))
    count = running_counts(
        b, b.concat([b.expand(b.value(0), (rows, 1)), b.cast(new, DType.INT32)], 1)
    )
    _, order = _first(b, plus(b, times(b, count, n), at), n, False)
    return taken(b, at, 1, order)


def ordered(
    b: Builder, x: Value, k: int, dim: int, largest: bool, keep_order: bool = False
) -> list[Value]:
    """The first `k` elements in order along `dim`, and where they stood.

    Args:
        keep_order: of equal elements the first one comes first.
    """
    if not x.rank:
        return [x, b.const(torch.tensor(0))]
    d = axis(dim, x.rank)
    values, at = _first(b, _rows(b, x, d), k, largest)
    if keep_order:
        at = _as_they_stood(b, values, at)
    return [_lines(b, v, x, d) for v in (values, at)]


@lowers(aten.topk.default)
def topk(
    b: Builder, x: Value, k: int, dim: int = -1, largest: bool = True, *_: object
) -> list[Value]:
    return ordered(b, x, k, dim, largest)


@lowers(aten.sort.default)
def sort(b: Builder, x: Value, dim: int = -1, descending: bool = False) -> list[Value]:
    """Equal elements keep their order, as in PyTorch on a CPU, where rows are not too long."""
    n = x.shape[dim] if x.rank else 1
    return ordered(b, x, n, dim, descending, 1 in b.used and n <= _LONGEST)


@lowers(aten.sort.stable)
def sort_stable(
    b: Builder, x: Value, stable: bool | None, dim: int = -1, descending: bool = False
) -> list[Value]:
    if stable and 1 in b.used and x.rank and x.shape[dim] > _LONGEST:
        b.refuse(f"HTP keeps the order of equal elements in rows of up to {_LONGEST}")
    return sort(b, x, dim, descending)


# -- one element of a row ----------------------------------------------------------------------


@lowers(aten.kthvalue.default)
def kthvalue(b: Builder, x: Value, k: int, dim: int = -1, keepdim: bool = False) -> list[Value]:
    """From the end of the row that is nearer."""
    if not x.rank:
        return ordered(b, x, 1, 0, True)
    d = axis(dim, x.rank)
    n = x.shape[d]
    largest = n - k + 1 < k
    nth = n - k + 1 if largest else k
    shape = reduced(x.shape, [d], keepdim)
    return [b.reshape(b.slice(v, d, nth - 1, nth), shape) for v in ordered(b, x, nth, d, largest)]


@lowers(aten.median.dim)
def median_dim(b: Builder, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
    n = x.shape[dim] if x.rank else 1
    return kthvalue(b, x, (n + 1) // 2, dim, keepdim)


@lowers(aten.median.default)
def median(b: Builder, x: Value) -> Value:
    return b.reshape(median_dim(b, b.reshape(x, (x.numel,)), 0)[0], ())


# -- places in what is sorted ------------------------------------------------------------------


def _place(b: Builder, rows: Value, x: Arg, right: bool) -> Value:
    """How many elements of sorted rows come before `x`, or are equal to it if `right`."""
    x = b.value(x)
    x = b.reshape(x, (*x.shape, 1))
    if rows.rank > 1:  # each row has its own values
        rows = b.reshape(rows, (*rows.shape[:-1], 1, rows.shape[-1]))
    before = compare(b, "GreaterEqual" if right else "Greater", x, rows)
    counts = reduce(b, "ReduceSum", b.cast(before, DType.INT32), [before.rank - 1], False)
    return b.reshape(counts, b.result.shape)


@lowers(aten.searchsorted.Tensor, aten.searchsorted.Scalar)
def searchsorted(
    b: Builder, rows: Value, x: Arg, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: object = None,
) -> Value:  # fmt: skip
    if sorter is not None:
        b.refuse("search in what `sorter` sorts: gather it first")
    return _place(b, rows, x, right or side == "right")


@lowers(aten.bucketize.Tensor, aten.bucketize.Scalar)
def bucketize(
    b: Builder, x: Arg, bounds: Value, out_int32: bool = False, right: bool = False
) -> Value:
    return _place(b, bounds, x, right)


__all__ = ["ordered"]
