# SPDX-License-Identifier: BSD-3-Clause
"""Reductions and what is built on them: sums, means, extrema, softmax, cumulative sums, norms.

HTP sums integers in float32, and takes the maximum of nothing but -inf for -65504; its `Softmax` is
17 dB worse than fp16 allows, and its `LogSoftmax` fails on masked scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from ..compile.ir import DType, Param
from .builder import Builder, Number, Shape, Value, b8, merged_axes, u32
from .elementwise import compare, exponential, minus, plus, power, quotient, select, times
from .layout import axis
from .registry import lowers

aten = torch.ops.aten

_EXACT = 2**24
"""Integers up to here survive HTP's sums, which are floats inside."""


def axes_of(dims: int | Sequence[int] | None, rank: int) -> list[int]:
    """The axes that `dims` names, in order; none named means all."""
    if not rank or dims is None or (not isinstance(dims, int) and not dims):
        return list(range(rank))
    return sorted({axis(d, rank) for d in ([dims] if isinstance(dims, int) else dims)})


def reduced(shape: Shape, axes: Sequence[int], keepdim: bool) -> Shape:
    if keepdim:
        return tuple(1 if i in axes else n for i, n in enumerate(shape))
    return tuple(n for i, n in enumerate(shape) if i not in axes)


def reduce(
    b: Builder,
    type: str,
    x: Value,
    axes: Sequence[int],
    keepdim: bool = True,
    as_it_is: bool = False,
) -> Value:
    """A QNN reduction of `x` over `axes`; `as_it_is` looks for no cheaper order of the axes."""
    shape = reduced(x.shape, axes, keepdim) if x.rank else ()
    axes = [i for i in axes if i < x.rank and x.shape[i] != 1]
    if not axes:
        return b.reshape(x, shape)
    source, perm = (x, ()) if as_it_is else b.unpermuted(x)
    if source is not x:  # what is left is cheaper to permute
        y = reduce(b, type, source, [perm[i] for i in axes], as_it_is=True)
        return b.reshape(b.transpose(y, perm), shape)
    if x.rank > 4:  # more than some reductions take
        gone = reduced(x.shape, axes, True)
        groups = merged_axes(x.shape, gone, most=4)
        x = b.reshape(x, [math.prod(x.shape[i] for i in group) for group in groups])
        axes = [i for i, group in enumerate(groups) if any(k in axes for k in group)]
        if x.rank > 4:  # the last reduced axis first
            return b.reshape(
                reduce(b, type, reduce(b, type, x, axes[-1:], False), axes[:-1]), shape
            )
    params: dict[str, Param] = {"axes": b.param(axes), "keep_dims": b8(True)}
    return b.reshape(b.op(type, [x], reduced(x.shape, axes, True), params=params), shape)


def fold(b: Builder, x: Value, axes: Sequence[int], combine: Combine, keepdim: bool) -> Value:
    """`combine` over all elements along `axes`, halves with halves: exact for integers."""
    shape = reduced(x.shape, axes, keepdim)
    for d in axes:
        left = []
        while (n := x.shape[d]) > 1:
            half = n // 2
            if n % 2:
                left.append(b.slice(x, d, n - 1, n))
            x = combine(b, b.slice(x, d, 0, half), b.slice(x, d, half, 2 * half))
        for y in left:
            x = combine(b, x, y)
    return b.reshape(x, shape)


Combine = Callable[[Builder, Value, Value], Value]


# -- sums and means ----------------------------------------------------------------------------


@lowers(aten.sum.dim_IntList)
def sum_(
    b: Builder, x: Value, dims: Sequence[int] | None, keepdim: bool = False, *_: object
) -> Value:
    axes = axes_of(dims, x.rank)
    counts = x.dtype is DType.BOOL8 and x.numel <= _EXACT
    exact = b.result.dtype is DType.INT32 and not counts
    x = b.cast(x, b.result.dtype)
    if exact:
        return fold(b, x, axes, plus, keepdim)
    return reduce(b, "ReduceSum", x, axes, keepdim)


@lowers(aten.sum.default, keep=True)
def sum_all(b: Builder, x: Value, *_: object) -> Value:
    return sum_(b, x, None)


@lowers(aten.mean.dim)
def mean(
    b: Builder, x: Value, dims: Sequence[int] | None, keepdim: bool = False, *_: object
) -> Value:
    return average(b, b.cast(x, DType.FLOAT16), axes_of(dims, x.rank), keepdim)


@lowers(aten.mean.default)
def mean_all(b: Builder, x: Value, *_: object) -> Value:
    return mean(b, x, None)


def average(b: Builder, x: Value, axes: Sequence[int], keepdim: bool = True) -> Value:
    return reduce(b, "ReduceMean", x, axes, keepdim)


@lowers(aten.prod.default)
def prod_all(b: Builder, x: Value, *_: object) -> Value:
    return fold(b, b.cast(x, b.result.dtype), range(x.rank), times, False)


@lowers(aten.prod.dim_int)
def prod(b: Builder, x: Value, dim: int, keepdim: bool = False, *_: object) -> Value:
    return fold(b, b.cast(x, b.result.dtype), axes_of(dim, x.rank), times, keepdim)


def square_sums(b: Builder, x: Value, axes: Sequence[int]) -> Value:
    """Sums of squares along `axes`, by products of rows: nothing in between leaves fp16's range."""
    last = [i for i in range(x.rank) if i not in axes]
    shape = reduced(x.shape, axes, True)
    n = math.prod(x.shape[i] for i in axes)
    rows = b.reshape(b.transpose(x, [*last, *axes]), (x.numel // n, 1, n))
    params = {"transpose_in0": b8(False), "transpose_in1": b8(True)}
    return b.reshape(b.op("MatMul", [rows, rows], (x.numel // n, 1, 1), params=params), shape)


def moments(
    b: Builder, x: Value, axes: Sequence[int], correction: float = 0.0
) -> tuple[Value, Value]:
    """Mean and variance along `axes`, which are kept with length one."""
    n = math.prod(x.shape[i] for i in axes) - correction
    if n <= 0:
        b.refuse("a variance of too few elements is not a number")
    mean = average(b, x, axes)
    return mean, square_sums(b, times(b, minus(b, x, mean), 1 / math.sqrt(n)), axes)


@lowers(aten.var_mean.correction)
def var_mean(
    b: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> list[Value]:
    axes = axes_of(dims, x.rank)
    mean, var = moments(b, x, axes, 1.0 if correction is None else float(correction))
    shape = reduced(x.shape, axes, keepdim)
    return [b.reshape(var, shape), b.reshape(mean, shape)]


@lowers(aten.var.correction)
def var(
    b: Builder,
    x: Value,
    dims: Sequence[int] | None = None,
    correction: Number | None = None,
    keepdim: bool = False,
) -> Value:
    return var_mean(b, x, dims, correction, keepdim)[0]


@lowers(aten.var.dim)
def var_dim(
    b: Builder, x: Value, dims: Sequence[int] | None, unbiased: bool = True, keepdim: bool = False
) -> Value:
    return var(b, x, dims, int(unbiased), keepdim)


@lowers(aten.linalg_vector_norm.default, keep=True)
def vector_norm(
    b: Builder,
    x: Value,
    order: Number = 2,
    dims: Sequence[int] | None = None,
    keepdim: bool = False,
    *_: object,
) -> Value:
    return norm(b, x, float(order), axes_of(dims, x.rank), keepdim)


def norm(b: Builder, x: Value, order: float, axes: Sequence[int], keepdim: bool) -> Value:
    """`(|x|^order).sum() ^ (1 / order)` along `axes`, and its limits for 0 and infinities."""
    if order == 0:
        return reduce(b, "ReduceSum", b.cast(b.cast(x, DType.BOOL8), DType.FLOAT16), axes, keepdim)
    size = b.elementwise("ElementWiseAbs", [b.cast(x, DType.FLOAT16)])
    if order == 1:
        return reduce(b, "ReduceSum", size, axes, keepdim)
    extreme = "ReduceMax" if order > 0 else "ReduceMin"
    if math.isinf(order):
        return reduce(b, extreme, size, axes, keepdim)
    # Relative to the element that counts most, no power leaves fp16's range.
    most = b.binary("ElementWiseMaximum", reduce(b, extreme, size, axes), b.value(2.0**-14))
    part = quotient(b, size, most)
    total = reduce(b, "ReduceSum", power(b, part, order), axes)
    return b.reshape(times(b, most, power(b, total, 1 / order)), reduced(x.shape, axes, keepdim))


# -- extrema -----------------------------------------------------------------------------------


def extreme(b: Builder, type: str, x: Value, axes: Sequence[int], keepdim: bool) -> Value:
    """`ReduceMax` or `ReduceMin`, of bools and integers too."""
    if x.dtype is DType.INT32:  # HTP has it only from QAIRT 2.51 on
        return fold(b, x, axes, larger if type == "ReduceMax" else smaller, keepdim)
    return b.numerically(x, lambda v: reduce(b, type, v, axes, keepdim))


def larger(b: Builder, x: Value, y: Value) -> Value:
    return b.binary("ElementWiseMaximum", x, y)


def smaller(b: Builder, x: Value, y: Value) -> Value:
    return b.binary("ElementWiseMinimum", x, y)


def _amax(type: str) -> Callable[..., Value]:
    def rule(b: Builder, x: Value, dims: Sequence[int] = (), keepdim: bool = False) -> Value:
        return extreme(b, type, x, axes_of(dims, x.rank), keepdim)

    return rule


lowers(aten.amax.default)(_amax("ReduceMax"))
lowers(aten.amin.default)(_amax("ReduceMin"))
lowers(aten.max.default)(_amax("ReduceMax"))
lowers(aten.min.default)(_amax("ReduceMin"))


def position(b: Builder, op: str, x: Value, dim: int | None, keepdim: bool) -> Value:
    """The index of the first extreme value."""
    if x.dtype is DType.BOOL8:
        x = b.cast(x, DType.INT32)
    if op == "Argmin" and x.dtype is DType.INT32:  # HTP has none; -1 - x turns the order round
        op, x = "Argmax", minus(b, -1, x)
    shape = b.result.shape if dim is None else reduced(x.shape, axes_of(dim, x.rank), keepdim)
    n = x.numel if dim is None or not x.rank else x.shape[dim]
    inner = 1 if dim is None else math.prod(x.shape[axis(dim, x.rank) + 1 :])
    x = b.reshape(x, (x.numel // n // inner, n, inner))
    params = {"axis": u32(1), "keep_dims": b8(True)}
    return b.reshape(b.op(op, [x], reduced(x.shape, [1], True), DType.INT32, params), shape)


def _arg(type: str) -> Callable[..., Value]:
    def rule(b: Builder, x: Value, dim: int | None = None, keepdim: bool = False) -> Value:
        return position(b, type, x, dim, keepdim)

    return rule


lowers(aten.argmax.default)(_arg("Argmax"))
lowers(aten.argmin.default)(_arg("Argmin"))


def _max_dim(type: str, arg: str) -> Callable[..., list[Value]]:
    def rule(b: Builder, x: Value, dim: int, keepdim: bool = False) -> list[Value]:
        values = extreme(b, type, x, axes_of(dim, x.rank), keepdim)
        return [values, position(b, arg, x, dim, keepdim)]

    return rule


lowers(aten.max.dim)(_max_dim("ReduceMax", "Argmax"))
lowers(aten.min.dim)(_max_dim("ReduceMin", "Argmin"))


def _truth(type: str) -> Callable[..., Value]:
    def rule(
        b: Builder, x: Value, dims: int | Sequence[int] | None = None, keepdim: bool = False
    ) -> Value:
        return extreme(b, type, b.cast(x, DType.BOOL8), axes_of(dims, x.rank), keepdim)

    return rule


lowers(aten.any.default, aten.any.dim, aten.any.dims)(_truth("ReduceMax"))
lowers(aten.all.default, aten.all.dim, aten.all.dims, keep=True)(_truth("ReduceMin"))


# -- softmax -----------------------------------------------------------------------------------


def _below_maximum(b: Builder, x: Value, d: int) -> tuple[Value, Value]:
    """`x` less its maximum along `d`, and that maximum.

    Added, not subtracted: HTP's subtraction makes NaN of what leaves its range, its addition
    infinity.
    """
    top = reduce(b, "ReduceMax", x, [d])
    return plus(b, x, b.elementwise("ElementWiseNeg", [top])), top


@lowers(aten.softmax.int, aten._safe_softmax.default, keep=True)
@lowers(aten._softmax.default)
def softmax(b: Builder, x: Value, dim: int, *_: object) -> Value:
    """Seven ops for QNN's one, which is biased and 10 dB worse; a row of -inf gives zeros."""
    x = b.cast(x, DType.FLOAT16)
    d = axis(dim, x.rank)
    if d >= x.rank:
        return b.expand(b.value(1.0), x.shape)
    shape = x.shape
    if math.prod(shape[d + 1 :]) == 1:
        # HTP takes the ops below for its softmax of the last axis, also if that has length one.
        x = b.reshape(x, shape[: d + 1])
    e = exponential(b, _below_maximum(b, x, d)[0], 0.0)
    return b.reshape(quotient(b, e, reduce(b, "ReduceSum", e, [d])), shape)


def _log_of_sum(b: Builder, below: Value, d: int) -> Value:
    e = exponential(b, below, 0.0)
    return b.elementwise("ElementWiseLog", [reduce(b, "ReduceSum", e, [d])])


@lowers(aten.log_softmax.int, keep=True)
@lowers(aten._log_softmax.default)
def log_softmax(b: Builder, x: Value, dim: int, *_: object) -> Value:
    x = b.cast(x, DType.FLOAT16)
    d = axis(dim, x.rank)
    below, _top = _below_maximum(b, x, d)
    return plus(b, below, b.elementwise("ElementWiseNeg", [_log_of_sum(b, below, d)]))


@lowers(aten.logsumexp.default, keep=True)
def logsumexp(b: Builder, x: Value, dims: Sequence[int], keepdim: bool = False) -> Value:
    x = b.cast(x, DType.FLOAT16)
    shape = reduced(x.shape, axes_of(dims, x.rank), keepdim)
    for d in axes_of(dims, x.rank):
        below, top = _below_maximum(b, x, d)
        x = plus(b, top, _log_of_sum(b, below, d))
    return b.reshape(x, shape)


# -- cumulative --------------------------------------------------------------------------------

_TRIANGLE = 1024


@lowers(aten.cumsum.default)
def cumsum(b: Builder, x: Value, dim: int, *_: object) -> Value:
    d = axis(dim, x.rank)
    n = x.shape[d] if x.rank else 1
    counts = x.dtype is DType.BOOL8 and n <= _EXACT
    dtype = b.result.dtype
    x = b.cast(x, dtype)
    if n == 1:
        return x
    if (dtype is DType.INT32 and not counts) or (dtype is DType.FLOAT16 and n > _TRIANGLE):
        return scan(b, x, d, plus)
    # Along the last axis: HTP's own op is wrong along others, and rounds floats at each step.
    swap = [i for i in range(x.rank) if i != d] + [d]
    moved = b.transpose(x, swap)
    rows = b.reshape(moved, (x.numel // n, n))
    if dtype is DType.INT32:
        y = running_counts(b, rows)
    else:
        ones = b.const(torch.ones(n, n).triu(), dtype)
        params = {"transpose_in0": b8(False), "transpose_in1": b8(False)}
        y = b.op("MatMul", [rows, ones], params=params)
    return b.transpose(b.reshape(y, moved.shape), [swap.index(i) for i in range(x.rank)])


def running_counts(b: Builder, rows: Value) -> Value:
    """Of each place in a row, how many are one up to there; `rows` (rows, n) are zeros and ones."""
    params = {"axis": u32(1), "exclusive": b8(False), "reverse": b8(False)}
    return b.op("CumulativeSum", [b.cast(rows, DType.INT32)], params=params)


@lowers(aten.cumprod.default)
def cumprod(b: Builder, x: Value, dim: int, *_: object) -> Value:
    return scan(b, b.cast(x, b.result.dtype), axis(dim, x.rank), times)


def _running_extreme(combine: Combine, op: str) -> Callable[..., list[Value]]:
    def rule(b: Builder, x: Value, dim: int) -> list[Value]:
        """The place is that of the last element that is none less than those before it."""
        if not x.rank:
            return [x, b.const(torch.tensor(0))]
        d = axis(dim, x.rank)
        numbers = b.cast(x, DType.INT32) if x.dtype is DType.BOOL8 else x
        values = scan(b, numbers, d, combine)
        places = b.const(torch.arange(x.shape[d]).reshape(-1, *(1,) * (x.rank - 1 - d)))
        at = select(b, compare(b, op, numbers, values), places, 0)
        return [b.cast(values, x.dtype), scan(b, b.expand(at, x.shape), d, larger)]

    return rule


@lowers(aten.logcumsumexp.default)
def logcumsumexp(b: Builder, x: Value, dim: int) -> Value:
    return scan(b, b.cast(x, DType.FLOAT16), axis(dim, x.rank), log_of_both)


def log_of_both(b: Builder, x: Value, y: Value) -> Value:
    """`log(exp(x) + exp(y))`; added, as in `_below_maximum`."""
    top, low = larger(b, x, y), smaller(b, x, y)
    e = exponential(b, plus(b, low, b.elementwise("ElementWiseNeg", [top])), 0.0)
    return plus(b, top, b.elementwise("ElementWiseLog", [plus(b, e, 1.0)]))


def scan(b: Builder, x: Value, d: int, combine: Combine) -> Value:
    """Prefixes of all lengths, each step doubling how far an element sees back."""
    n = x.shape[d] if x.rank else 1
    step = 1
    while step < n:
        later = combine(b, b.slice(x, d, step, n), b.slice(x, d, 0, n - step))
        x = b.concat([b.slice(x, d, 0, step), later], d)
        step *= 2
    return x


lowers(aten.cummax.default)(_running_extreme(larger, "GreaterEqual"))
lowers(aten.cummin.default)(_running_extreme(smaller, "LessEqual"))
