# SPDX-License-Identifier: BSD-3-Clause
"""Functions that HTP has no op for: hyperbolic ones, inverses, angles, lengths, signs.

Made of Exp, Log, Tanh, Atan and square roots, in forms that lose no digits where these are near
zero or one, and leave fp16's range only where the function does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ..compile.ir import DType
from .builder import Arg, Builder, Number, Value
from .elementwise import (
    absolute,
    atan,
    clip,
    compare,
    div,
    exponential,
    leaky_relu,
    log1p,
    logarithm,
    minus,
    plus,
    polynomial,
    pow_scalar,
    quotient,
    round_,
    select,
    times,
)
from .reduction import norm
from .registry import lowers

aten = torch.ops.aten

_TINY = 2.0**-24
"""The least number above zero that fp16 has."""


def _root(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseSquareRoot", [x])


def _floats(b: Builder, *xs: Arg) -> list[Value]:
    return [b.value(x, DType.FLOAT16) for x in xs]


def _signed(b: Builder, size: Value, x: Value) -> Value:
    """`size` with the sign of `x`; HTP does not tell -0.0 from 0.0."""
    return select(b, compare(b, "Less", x, 0.0), b.elementwise("ElementWiseNeg", [size]), size)


def _at_least(b: Builder, x: Value, low: float) -> Value:
    return b.binary("ElementWiseMaximum", x, b.value(low))


# -- hyperbolic --------------------------------------------------------------------------------


def _halves(b: Builder, x: Arg) -> tuple[Value, Value]:
    """`2 sinh(x / 2)` and `2 cosh(x / 2)`."""
    half = times(b, b.value(x, DType.FLOAT16), 0.5)
    both = [exponential(b, half), exponential(b, b.elementwise("ElementWiseNeg", [half]))]
    cosine = plus(b, *both)
    return times(b, b.elementwise("Tanh", [half]), cosine), cosine


@lowers(aten.sinh.default)
def sinh(b: Builder, x: Value) -> Value:
    sine, cosine = _halves(b, x)
    return times(b, times(b, sine, 0.5), cosine)


@lowers(aten.cosh.default)
def cosh(b: Builder, x: Value) -> Value:
    sine, _ = _halves(b, x)
    return plus(b, times(b, times(b, sine, 0.5), sine), 1.0)


_FAR = 100.0
"""From here on, `asinh(x)` and `acosh(x)` are `log(2 x)`, and `x * x` leaves fp16's range soon."""


@lowers(aten.asinh.default)
def asinh(b: Builder, x: Value) -> Value:
    (x,) = _floats(b, x)
    size = absolute(b, x)
    near = clip(b, size, 0.0, _FAR)
    square = times(b, near, near)
    rest = quotient(b, square, plus(b, _root(b, plus(b, square, 1.0)), 1.0))
    near = log1p(b, plus(b, near, rest))
    far = plus(b, logarithm(b, size), math.log(2))
    return _signed(b, select(b, compare(b, "Less", size, _FAR), near, far), x)


@lowers(aten.acosh.default)
def acosh(b: Builder, x: Value) -> Value:
    (x,) = _floats(b, x)
    near = clip(b, plus(b, x, -1.0), 0.0, _FAR)
    near = log1p(b, plus(b, near, _root(b, times(b, near, plus(b, near, 2.0)))))
    far = plus(b, logarithm(b, x), math.log(2))
    return select(b, compare(b, "Less", x, _FAR), near, far)


@lowers(aten.atanh.default)
def atanh(b: Builder, x: Value) -> Value:
    (x,) = _floats(b, x)
    size = absolute(b, x)
    rest = _at_least(b, minus(b, 1.0, size), _TINY)
    y = times(b, log1p(b, quotient(b, times(b, size, 2.0), rest)), 0.5)
    return _signed(b, select(b, compare(b, "Less", size, 1.0), y, math.inf), x)


@lowers(aten.erfinv.default)
def erfinv(b: Builder, x: Value) -> Value:
    """`x p(-log(1 - x^2))`, right to 6e-5."""
    (x,) = _floats(b, x)
    rest = times(b, minus(b, 1.0, x), plus(b, x, 1.0))
    w = b.elementwise("ElementWiseNeg", [logarithm(b, _at_least(b, rest, 2.0**-11))])
    p = polynomial(
        b, w, (0.8862786, 0.2312766, 0.01315974, -0.003580918, 0.0002921341, -8.541381e-06)
    )
    inside = compare(b, "Less", absolute(b, x), 1.0)
    return select(b, inside, times(b, x, p), _signed(b, b.value(math.inf), x))


# -- angles ------------------------------------------------------------------------------------


@lowers(aten.asin.default)
def asin(b: Builder, x: Value) -> Value:
    (x,) = _floats(b, x)
    other = _root(b, _at_least(b, times(b, minus(b, 1.0, x), plus(b, x, 1.0)), _TINY))
    return atan(b, quotient(b, x, other))


@lowers(aten.acos.default)
def acos(b: Builder, x: Value) -> Value:
    """`2 atan(sqrt((1 - x) / (1 + x)))`."""
    (x,) = _floats(b, x)
    below = _root(b, _at_least(b, plus(b, x, 1.0), _TINY))
    return times(b, atan(b, quotient(b, _root(b, minus(b, 1.0, x)), below)), 2.0)


def _sorted(b: Builder, x: Value, y: Value) -> tuple[Value, Value]:
    """A quarter of the smaller and of the larger one in size: HTP divides by up to 16384."""
    x, y = (absolute(b, times(b, v, 0.25)) for v in (x, y))
    return b.binary("ElementWiseMinimum", x, y), b.binary("ElementWiseMaximum", x, y)


@lowers(aten.atan2.default)
def atan2(b: Builder, y: Value, x: Value) -> Value:
    y, x = _floats(b, y, x)
    small, large = _sorted(b, x, y)
    angle = atan(b, quotient(b, small, _at_least(b, large, _TINY)))
    steep = compare(b, "Greater", absolute(b, y), absolute(b, x))
    angle = select(b, steep, minus(b, math.pi / 2, angle), angle)
    angle = select(b, compare(b, "Less", x, 0.0), minus(b, math.pi, angle), angle)
    return _signed(b, angle, y)


@lowers(aten.hypot.default)
def hypot(b: Builder, x: Value, y: Value) -> Value:
    x, y = _floats(b, x, y)
    small, large = _sorted(b, x, y)
    part = quotient(b, small, _at_least(b, large, _TINY))
    root = _root(b, plus(b, times(b, part, part), 1.0))
    return times(b, times(b, large, root), 4.0)


@lowers(aten.dist.default)
def dist(b: Builder, x: Value, y: Value, order: Number = 2) -> Value:
    difference = minus(b, *_floats(b, x, y))
    return norm(b, difference, float(order), range(difference.rank), False)


@lowers(aten._cdist_forward.default)
def cdist(b: Builder, x: Value, y: Value, order: float, *_: object) -> Value:
    """Of differences: the squares of a product would cancel."""
    x = b.reshape(x, (*x.shape[:-1], 1, x.shape[-1]))
    y = b.reshape(y, (*y.shape[:-2], 1, *y.shape[-2:]))
    difference = minus(b, *_floats(b, x, y))
    return norm(b, difference, order, [difference.rank - 1], False)


@lowers(aten._pdist_forward.default)
def pdist(b: Builder, x: Value, order: float = 2) -> Value:
    first, second = torch.triu_indices(x.shape[0], x.shape[0], 1)
    difference = minus(b, b.gather(x, 0, b.const(first)), b.gather(x, 0, b.const(second)))
    return norm(b, difference, order, [1], False)


# -- signs and steps ---------------------------------------------------------------------------


@lowers(aten.copysign.Tensor, aten.copysign.Scalar)
def copysign(b: Builder, x: Value, y: Arg) -> Value:
    size = absolute(b, *_floats(b, x))
    if not isinstance(y, Value):
        return size if math.copysign(1.0, y or 0.0) > 0 else b.elementwise("ElementWiseNeg", [size])
    return _signed(b, size, b.cast(y, DType.FLOAT16))


@lowers(aten.signbit.default)
def signbit(b: Builder, x: Value) -> Value:
    if x.dtype is DType.BOOL8:
        return b.expand(b.value(False), x.shape)
    return compare(b, "Less", x, 0)


@lowers(aten.round.decimals)
def round_decimals(b: Builder, x: Value, decimals: int = 0) -> Value:
    """Beyond 1024 steps fp16 has no digits left to round."""
    if x.dtype is DType.INT32 or not decimals:
        if decimals < 0:
            b.refuse("integers are rounded to whole tens only as floats")
        return round_(b, x)
    step = 10.0**-decimals
    steps = div(b, x, step) if decimals < 0 else times(b, x, 1 / step)
    rounded = b.elementwise("ElementWiseRound", [steps])
    rounded = div(b, rounded, 1 / step) if decimals > 0 else times(b, rounded, step)
    return select(b, compare(b, "Less", absolute(b, x), 1024 * step), rounded, x)


@lowers(aten.ldexp.Tensor)
def ldexp(b: Builder, x: Value, exponent: Value) -> Value:
    return times(b, b.cast(x, DType.FLOAT16), pow_scalar(b, 2.0, exponent))


# -- random in training only -------------------------------------------------------------------


@lowers(aten.native_dropout.default)
def native_dropout(b: Builder, x: Value, p: float, train: bool | None) -> Sequence[Value]:
    if train is None or train:
        b.refuse("dropout has no place in inference: call `model.eval()` first")
    return [x, b.expand(b.value(True), x.shape)]


@lowers(aten.rrelu_with_noise_functional.default)
def rrelu(
    b: Builder, x: Value, noise: Value, lower: Number = 1 / 8, upper: Number = 1 / 3,
    training: bool = False, *_: object,
) -> list[Value]:  # fmt: skip
    if training:
        b.refuse("random slopes have no place in inference: call `model.eval()` first")
    return [leaky_relu(b, x, (lower + upper) / 2), noise]
