# SPDX-License-Identifier: BSD-3-Clause
"""Elementwise ops: arithmetic, functions, activations, comparisons, logic, selection, casts.

What HTP computes differs from IEEE at the edges, which decides many forms below: its arithmetic
has no infinity (only sums, extrema, comparisons and selections have), `Exp` gives garbage below -88
and NaN above 11.1, `Sigmoid` is off by up to 8e-4, and the compiler takes a chain of casts
float -> int -> float for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..compile.ir import DType, Node, Tensor
from .builder import Arg, Builder, Number, Shape, Value, broadcast, f32
from .registry import lowers

aten = torch.ops.aten

_ORDER = (DType.BOOL8, DType.INT32, DType.FLOAT16)


def promoted(*args: Arg) -> DType:
    """The type in which PyTorch combines the operands: bool, then integer, then float."""
    kinds = [
        a.dtype
        if isinstance(a, Value)
        else DType.BOOL8
        if isinstance(a, bool)
        else DType.INT32
        if isinstance(a, int)
        else DType.FLOAT16
        for a in args
    ]
    return max(kinds, key=_ORDER.index)


def arith(b: Builder, type: str, x: Arg, y: Arg) -> Value:
    """A binary op in the type that the operands promote to."""
    dtype = promoted(x, y)
    return b.binary(type, b.value(x, dtype), b.value(y, dtype), dtype)


def plus(b: Builder, x: Arg, y: Arg) -> Value:
    return arith(b, "ElementWiseAdd", x, y)


def minus(b: Builder, x: Arg, y: Arg) -> Value:
    return arith(b, "ElementWiseSubtract", x, y)


def times(b: Builder, x: Arg, y: Arg) -> Value:
    return arith(b, "ElementWiseMultiply", x, y)


def logical(b: Builder, type: str, *args: Arg) -> Value:
    """An op of bools; numbers are taken as `!= 0`."""
    values = [b.value(a, DType.BOOL8) for a in args]
    return b.elementwise(f"ElementWise{type}", values)


def clip(b: Builder, x: Value, low: float, high: float) -> Value:
    if low != 0 and _of_product(b, x):
        # Up to QAIRT 2.49 a clipped product with a bias is as exact as `low` is, not as its values.
        return _between(b, x, low, high)
    params = {"min_value": f32(low), "max_value": f32(high)}
    return b.elementwise("ReluMinMax", [x], params=params)


def select(b: Builder, condition: Value, x: Arg, y: Arg) -> Value:
    """`x` where `condition` holds, else `y`."""
    dtype = promoted(x, y)
    if dtype is DType.BOOL8:
        held = logical(b, "And", condition, x)
        return logical(b, "Or", held, logical(b, "And", logical(b, "Not", condition), y))
    values = [b.value(x, dtype), b.value(y, dtype)]
    if dtype is DType.INT32:
        values = [
            _spread(b, v, broadcast(condition.shape, *(v.shape for v in values))) for v in values
        ]
    return b.elementwise("ElementWiseSelect", [condition, *values], dtype)


def _spread(b: Builder, x: Value, shape: Shape) -> Value:
    """A single integer as a row: QAIRT 2.47 selects zeros instead of it."""
    if x.numel > 1:
        return x
    y = b.expand(b.reshape(x, ()), shape[-1:] if shape[-1:] != (1,) else shape)
    y = b.reshape(y, (1,) * (len(shape) - y.rank) + y.shape)
    return Value(y.shape, y.dtype, y.tensor, y.const)  # for good: no longer one number


# -- arithmetic --------------------------------------------------------------------------------


def _result_arith(b: Builder, type: str, x: Arg, y: Arg) -> Value:
    dtype = b.result.dtype
    return b.binary(type, b.value(x, dtype), b.value(y, dtype), dtype)


def _scaled(b: Builder, y: Arg, alpha: Number) -> Arg:
    return y if alpha == 1 else times(b, y, alpha)


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(b: Builder, x: Arg, y: Arg, alpha: Number = 1) -> Value:
    if b.result.dtype is DType.BOOL8:
        return logical(b, "Or", x, y)
    return _result_arith(b, "ElementWiseAdd", x, _scaled(b, y, alpha))


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(b: Builder, x: Arg, y: Arg, alpha: Number = 1) -> Value:
    return _result_arith(b, "ElementWiseSubtract", x, _scaled(b, y, alpha))


@lowers(aten.rsub.Tensor, aten.rsub.Scalar, keep=True)
def rsub(b: Builder, x: Arg, y: Arg, alpha: Number = 1) -> Value:
    return sub(b, y, x, alpha)


@lowers(aten.mul.Tensor, aten.mul.Scalar)
def mul(b: Builder, x: Arg, y: Arg) -> Value:
    if b.result.dtype is DType.BOOL8:
        return logical(b, "And", x, y)
    from .norm import recognised  # norm builds on this module

    if (norm := recognised(b, x, y)) is not None:
        return norm
    return _result_arith(b, "ElementWiseMultiply", x, y)


def known(b: Builder, x: Arg) -> Number | None:
    """The number that `x` is, if it is one and known."""
    if not isinstance(x, Value):
        return x
    return b.numbers(x).item() if x.is_const and x.numel == 1 else None


def quotient(b: Builder, x: Arg, y: Arg) -> Value:
    """`x / y` in floats, for known `y` or one of at most 16384: HTP's Divide gives 0 beyond.

    A product with a known reciprocal is nearer to the quotient than what Divide gives.
    """
    x = b.value(x, DType.FLOAT16)
    c = known(b, y)
    if c:
        reciprocal = 1.0 / float(c)
        if 2.0**-14 <= abs(reciprocal) <= 65504:
            return times(b, x, reciprocal)
        if abs(reciprocal) < 2.0**-14:  # the reciprocal alone would lose its digits
            return times(b, times(b, x, 2.0**-12), reciprocal * 2.0**12)
    return b.binary("ElementWiseDivide", x, b.value(y, DType.FLOAT16))


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(b: Builder, x: Arg, y: Arg) -> Value:
    if isinstance(x, Value) and known(b, y) is None:  # the divisor's whole range, see `quotient`
        x, y = times(b, x, 0.25), times(b, y, 0.25)
    return quotient(b, x, y)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(b: Builder, x: Arg, y: Arg, rounding_mode: str | None = None) -> Value:
    if rounding_mode is None:
        return div(b, x, y)
    if b.result.dtype is DType.INT32:
        return (floor_quotient if rounding_mode == "floor" else _int_quotient)(b, x, y)
    return (floor_quotient if rounding_mode == "floor" else trunc_quotient)(b, x, y)


def _int_quotient(b: Builder, x: Arg, y: Arg) -> Value:
    """Integer division towards zero."""
    return b.binary("ElementWiseDivide", b.value(x, DType.INT32), b.value(y, DType.INT32))


def floor_quotient(b: Builder, x: Arg, y: Arg) -> Value:
    """Division towards minus infinity."""
    c = known(b, y)
    if promoted(x, y) is not DType.FLOAT16:
        whole = _int_quotient(b, x, y)
        return minus(b, whole, _beyond(b, minus(b, x, times(b, whole, y)), y, c))
    if c and math.frexp(c)[0] in (0.5, -0.5):  # a power of two divides exactly
        return b.elementwise("ElementWiseFloor", [quotient(b, x, y)])
    x, y = b.value(x, DType.FLOAT16), b.value(y, DType.FLOAT16)
    # The quotient is only nearly right: its nearest integer may be one too many, never too few.
    nearest = b.elementwise("ElementWiseRound", [quotient(b, x, y if c is None else c)])
    return minus(b, nearest, _beyond(b, minus(b, x, times(b, nearest, y)), y, c))


def _beyond(b: Builder, rest: Value, y: Arg, known_y: Number | None) -> Value:
    """Whether a remainder and its divisor have opposite signs: the quotient is one too many."""
    if known_y is not None:
        return compare(b, "Less" if known_y > 0 else "Greater", rest, 0)
    opposite = logical(b, "Xor", compare(b, "Less", rest, 0), compare(b, "Less", y, 0))
    return logical(b, "And", opposite, compare(b, "NotEqual", rest, 0))


def trunc_quotient(b: Builder, x: Arg, y: Arg) -> Value:
    """Division of floats towards zero."""
    x, y = b.value(x, DType.FLOAT16), b.value(y, DType.FLOAT16)
    size = floor_quotient(b, absolute(b, x), absolute(b, y))
    return times(b, size, b.elementwise("ElementWiseSign", [times(b, _sign(b, x), _sign(b, y))]))


@lowers(aten.remainder.Tensor, aten.remainder.Scalar, aten.remainder.Scalar_Tensor)
def remainder(b: Builder, x: Arg, y: Arg) -> Value:
    """The remainder with the divisor's sign."""
    if b.result.dtype is DType.INT32:
        return b.binary("ElementWiseMod", b.value(x, DType.INT32), b.value(y, DType.INT32))
    return minus(b, x, times(b, floor_quotient(b, x, y), y))


@lowers(aten.fmod.Tensor, aten.fmod.Scalar)
def fmod(b: Builder, x: Arg, y: Arg) -> Value:
    """The remainder with the dividend's sign."""
    whole = _int_quotient if b.result.dtype is DType.INT32 else trunc_quotient
    return minus(b, x, times(b, whole(b, x, y), y))


# -- functions of one operand ------------------------------------------------------------------


@lowers(aten.neg.default)
def neg(b: Builder, x: Value) -> Value:
    return minus(b, 0, x) if x.dtype is DType.INT32 else b.elementwise("ElementWiseNeg", [x])


def absolute(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseAbs", [x])


@lowers(aten.abs.default)
def abs_(b: Builder, x: Value) -> Value:
    return x if x.dtype is DType.BOOL8 else absolute(b, x)


def _sign(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseSign", [x])


@lowers(aten.sign.default)
def sign(b: Builder, x: Value) -> Value:
    if x.dtype is DType.FLOAT16:
        return _sign(b, x)
    return x if x.dtype is DType.BOOL8 else _between(b, x, -1, 1)


def _function(type: str) -> Callable[[Builder, Value], Value]:
    def rule(b: Builder, x: Value) -> Value:
        return b.elementwise(type, [b.cast(x, DType.FLOAT16)])

    return rule


for _target, _type in {
    aten.sqrt.default: "ElementWiseSquareRoot",
    aten.rsqrt.default: "ElementWiseRsqrt",
}.items():
    lowers(_target)(_function(_type))


_PRODUCTS = ("FullyConnected", "MatMul", "Conv2d", "DepthWiseConv2d", "TransposeConv2d")


def _of_product(b: Builder, x: Value) -> bool:
    """Whether `x` is a product of matrices or a convolution, or some of it, maybe plus a value."""

    def source(t: Tensor | None) -> Node | None:
        node = None if t is None else b.producer(t)
        moved = node is not None and node.type in ("Reshape", "StridedSlice")
        return source(node.inputs[0]) if node is not None and moved else node

    node = source(x.tensor)
    if node is not None and node.type == "ElementWiseAdd":
        return any((of := source(t)) is not None and of.type in _PRODUCTS for t in node.inputs)
    return node is not None and node.type in _PRODUCTS


@lowers(aten.tanh.default)
def tanh(b: Builder, x: Value) -> Value:
    """HTP fuses it with a product before it, and is then off by 5e-3 instead of 3e-4."""
    x = b.cast(x, DType.FLOAT16)
    return b.elementwise("Tanh", [_between(b, x, -60.0, None) if _of_product(b, x) else x])


@lowers(aten.reciprocal.default)
def reciprocal(b: Builder, x: Value) -> Value:
    return quotient(b, 1.0, x)


def exponential(b: Builder, x: Value, high: float = 11.0859375) -> Value:
    """`exp(x)` for `x` up to `high`, by default up to the largest value that fp16 has."""
    return b.elementwise("ElementWiseExp", [clip(b, x, -20.0, high)])


@lowers(aten.exp.default)
def exp(b: Builder, x: Value) -> Value:
    return exponential(b, b.cast(x, DType.FLOAT16))


@lowers(aten.exp2.default)
def exp2(b: Builder, x: Value) -> Value:
    return pow_scalar(b, 2.0, x)


@lowers(aten.expm1.default)
def expm1(b: Builder, x: Value) -> Value:
    """`tanh(x / 2) * (exp(x) + 1)`: no digit is lost near zero."""
    x = b.cast(x, DType.FLOAT16)
    half = b.elementwise("Tanh", [times(b, x, 0.5)])
    return times(b, half, plus(b, exponential(b, x), 1.0))


def logarithm(b: Builder, x: Value) -> Value:
    """`log(x)`; HTP's own gives -7.6 for zero."""
    y = b.elementwise("ElementWiseLog", [x])
    return select(b, compare(b, "Greater", x, 0.0), y, -math.inf)


def _log(scale: float) -> Callable[[Builder, Value], Value]:
    def rule(b: Builder, x: Value) -> Value:
        x = b.cast(x, DType.FLOAT16)
        if scale == 1.0:
            return logarithm(b, x)
        y = times(b, b.elementwise("ElementWiseLog", [x]), scale)
        return select(b, compare(b, "Greater", x, 0.0), y, -math.inf)

    return rule


lowers(aten.log.default)(_log(1.0))
lowers(aten.log2.default)(_log(1 / math.log(2)))
lowers(aten.log10.default)(_log(1 / math.log(10)))


@lowers(aten.log1p.default)
def log1p(b: Builder, x: Value) -> Value:
    """Near zero by `log((1 + y) / (1 - y)) = 2 (y + y^3/3 + y^5/5 + ...)`, `y = x / (x + 2)`."""
    x = b.cast(x, DType.FLOAT16)
    near = clip(b, x, -0.5, 0.5)
    y = quotient(b, near, plus(b, near, 2.0))
    series = times(b, y, polynomial(b, times(b, y, y), (2.0, 2 / 3, 2 / 5, 2 / 7)))
    small = compare(b, "Less", absolute(b, x), 0.5)
    return select(b, small, series, logarithm(b, plus(b, x, 1.0)))


def polynomial(b: Builder, x: Value, coefficients: tuple[float, ...]) -> Value:
    """`c[0] + c[1] x + c[2] x^2 + ...`."""
    *lower, top = coefficients
    y: Arg = top
    for c in reversed(lower):
        y = plus(b, times(b, x, y), c)
    return b.value(y)


@lowers(aten.erf.default)
def erf(b: Builder, x: Value) -> Value:
    """`tanh(x p(x^2))`, right to 4e-5."""
    x = clip(b, b.cast(x, DType.FLOAT16), -4.0, 4.0)
    p = polynomial(b, times(b, x, x), (1.12814338, 0.1040812, -0.00178648))
    return b.elementwise("Tanh", [times(b, x, p)])


@lowers(aten.erfc.default)
def erfc(b: Builder, x: Value) -> Value:
    return minus(b, 1.0, erf(b, x))


def _turned(b: Builder, x: Value) -> Value:
    """`x` less whole turns: within +-pi.  HTP's own reduction loses as many digits as `x` has.

    2 pi is taken away in parts whose products with the number of turns are exact in fp16.
    """
    turns = b.elementwise("ElementWiseRound", [times(b, x, 1 / (2 * math.pi))])
    for part in (6.0, 0.25, 0.03125, 2 * math.pi - 6.28125):
        x = minus(b, x, times(b, turns, part))
    return x


@lowers(aten.sin.default)
def sin(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseSin", [_turned(b, b.cast(x, DType.FLOAT16))])


@lowers(aten.cos.default)
def cos(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseCos", [_turned(b, b.cast(x, DType.FLOAT16))])


@lowers(aten.tan.default)
def tan(b: Builder, x: Value) -> Value:
    return quotient(b, sin(b, x), cos(b, x))


@lowers(aten.atan.default)
def atan(b: Builder, x: Value) -> Value:
    return b.elementwise("ElementWiseAtan", [clip(b, b.cast(x, DType.FLOAT16), -30000.0, 30000.0)])


# -- rounding ----------------------------------------------------------------------------------


@lowers(aten.floor.default)
def floor(b: Builder, x: Value) -> Value:
    return x if x.dtype is DType.INT32 else b.elementwise("ElementWiseFloor", [x])


@lowers(aten.ceil.default)
def ceil(b: Builder, x: Value) -> Value:
    return x if x.dtype is DType.INT32 else b.elementwise("ElementWiseCeil", [x])


@lowers(aten.round.default)
def round_(b: Builder, x: Value) -> Value:
    """To the nearest, ties to even; HTP's own moves numbers from 1024 on."""
    if x.dtype is DType.INT32:
        return x
    small = compare(b, "Less", absolute(b, x), 1024.0)
    return select(b, small, b.elementwise("ElementWiseRound", [x]), x)


@lowers(aten.trunc.default)
def trunc(b: Builder, x: Value) -> Value:
    if x.dtype is DType.INT32:
        return x
    return times(b, _sign(b, x), b.elementwise("ElementWiseFloor", [absolute(b, x)]))


# -- powers ------------------------------------------------------------------------------------


@lowers(aten.pow.Tensor_Scalar)
def pow_(b: Builder, x: Value, exponent: Number) -> Value:
    dtype = b.result.dtype
    x = b.cast(x, dtype)
    if dtype is DType.FLOAT16:
        return power(b, x, float(exponent))
    if exponent < 0 or not float(exponent).is_integer():
        b.refuse(f"HTP raises no integers to the power {exponent}")
    return _repeated(b, x, int(exponent))


def power(b: Builder, x: Value, exponent: float) -> Value:
    """Floats to a known power, by products where it is a small integer."""
    if exponent.is_integer() and abs(exponent) <= 64:
        y = _repeated(b, x, abs(int(exponent)))
        return quotient(b, 1.0, y) if exponent < 0 else y
    if exponent == 0.5:
        return b.elementwise("ElementWiseSquareRoot", [x])
    if exponent == -0.5:
        return b.elementwise("ElementWiseRsqrt", [x])
    return b.binary("ElementWisePower", x, b.value(exponent))


def _repeated(b: Builder, x: Value, n: int) -> Value:
    """`x` to the power `n`, by squaring."""
    if n == 0:
        return b.expand(b.value(1, x.dtype), x.shape)
    if n == 1:
        return x
    half = _repeated(b, x, n // 2)
    square = times(b, half, half)
    return times(b, square, x) if n % 2 else square


@lowers(aten.pow.Scalar)
def pow_scalar(b: Builder, base: Number, x: Value) -> Value:
    if b.result.dtype is DType.INT32:
        b.refuse("HTP raises no integers to a power that is a tensor")
    x = b.cast(x, DType.FLOAT16)
    if base <= 0:
        b.refuse(f"HTP's power of {base}, which is not positive, is undefined")
    scale = math.log2(base)
    if scale:  # HTP's own leaves the range of fp16 with garbage
        low, high = sorted((-25.0 / scale, 15.999 / scale))
        x = clip(b, x, low, high)
    return b.binary("ElementWisePower", b.value(float(base), DType.FLOAT16), x)


@lowers(aten.pow.Tensor_Tensor)
def pow_tensor(b: Builder, x: Value, y: Value) -> Value:
    if b.result.dtype is DType.INT32:
        b.refuse("HTP raises no integers to a power that is a tensor")
    if (c := known(b, y)) is not None and y.is_const:
        return b.reshape(b.expand(pow_(b, x, c), b.result.shape), b.result.shape)
    return _result_arith(b, "ElementWisePower", x, y)


# -- activations -------------------------------------------------------------------------------


@lowers(aten.relu.default)
def relu(b: Builder, x: Value) -> Value:
    return _extreme(b, "Maximum", x, 0) if x.dtype is DType.INT32 else b.elementwise("Relu", [x])


@lowers(aten.sigmoid.default)
def sigmoid(b: Builder, x: Value) -> Value:
    half = b.elementwise("Tanh", [times(b, b.cast(x, DType.FLOAT16), 0.5)])
    return plus(b, times(b, half, 0.5), 0.5)


@lowers(aten.silu.default, keep=True)
def silu(b: Builder, x: Value) -> Value:
    """`x sigmoid(x)`, that is `h + h tanh(h)` with `h = x / 2`."""
    half = times(b, x, 0.5)
    return plus(b, half, times(b, half, b.elementwise("Tanh", [half])))


@lowers(aten.gelu.default)
def gelu(b: Builder, x: Value, approximate: str = "none") -> Value:
    return b.elementwise("Gelu", [x])


@lowers(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: Value, slope: Number = 0.01) -> Value:
    return b.elementwise("Prelu", [x, b.value(float(slope), x.dtype)])


@lowers(aten.elu.default)
def elu(b: Builder, x: Value, alpha: Number, scale: Number, input_scale: Number) -> Value:
    below = times(b, b.elementwise("ElementWiseMinimum", [x, _like(b, 0.0, x)]), input_scale)
    below = times(b, plus(b, exponential(b, below, 0.0), -1.0), float(alpha) * float(scale))
    above = b.elementwise("Relu", [x])
    return plus(b, above if scale == 1 else times(b, above, scale), below)


def _like(b: Builder, number: Number, x: Value) -> Value:
    """A number with the rank of `x`."""
    return b.reshape(b.value(number, x.dtype), (1,) * x.rank)


@lowers(aten.hardswish.default, keep=True)
def hardswish(b: Builder, x: Value) -> Value:
    return b.elementwise("HardSwish", [x])


@lowers(aten.hardsigmoid.default, keep=True)
def hardsigmoid(b: Builder, x: Value) -> Value:
    return clip(b, plus(b, times(b, x, 1 / 6), 0.5), 0.0, 1.0)


@lowers(aten.softplus.default, keep=True)
def softplus(b: Builder, x: Value, beta: Number = 1, threshold: Number = 20) -> Value:
    """`max(y, 0) + log(1 + exp(-|y|))` with `y = beta x`."""
    y = x if beta == 1 else times(b, x, beta)
    tail = exponential(b, b.elementwise("ElementWiseNeg", [absolute(b, y)]), 0.0)
    tail = b.elementwise("ElementWiseLog", [plus(b, tail, 1.0)])
    y = plus(b, b.elementwise("Relu", [y]), tail)
    return y if beta == 1 else quotient(b, y, beta)


@lowers(aten.mish.default, keep=True)
def mish(b: Builder, x: Value) -> Value:
    """`x tanh(log(1 + e^x)) = x w / (w + 2)` with `w = e^x (e^x + 2)`."""
    e = exponential(b, x, 4.8)
    w = times(b, e, plus(b, e, 2.0))
    return times(b, x, quotient(b, w, plus(b, w, 2.0)))


# -- bounds ------------------------------------------------------------------------------------


def _extreme(b: Builder, type: str, x: Arg, y: Arg) -> Value:
    dtype = promoted(x, y)
    if dtype is DType.BOOL8:
        return logical(b, "Or" if type == "Maximum" else "And", x, y)
    return b.binary(f"ElementWise{type}", b.value(x, dtype), b.value(y, dtype))


def _between(b: Builder, x: Value, low: Arg, high: Arg) -> Value:
    if low is not None:
        x = _extreme(b, "Maximum", x, low)
    return x if high is None else _extreme(b, "Minimum", x, high)


@lowers(aten.minimum.default, aten.fmin.default)
def minimum(b: Builder, x: Value, y: Value) -> Value:
    return _extreme(b, "Minimum", x, y)


@lowers(aten.maximum.default, aten.fmax.default)
def maximum(b: Builder, x: Value, y: Value) -> Value:
    return _extreme(b, "Maximum", x, y)


@lowers(aten.clamp.default, aten.clamp.Tensor, aten.hardtanh.default)
def clamp(b: Builder, x: Value, low: Arg = None, high: Arg = None) -> Value:
    x = b.cast(x, b.result.dtype)
    if (
        x.dtype is DType.FLOAT16
        and isinstance(low, (int, float))
        and isinstance(high, (int, float))
        and low <= high
    ):
        return clip(b, x, low, high)
    if x.dtype is DType.INT32:  # hardtanh's limits are floats
        low, high = (int(v) if isinstance(v, float) else v for v in (low, high))
    return _between(b, x, low, high)


# -- comparisons -------------------------------------------------------------------------------

_OF_BOOLS: dict[str, Callable[[Builder, Arg, Arg], Value]] = {
    "Equal": lambda b, x, y: logical(b, "Not", logical(b, "Xor", x, y)),
    "NotEqual": lambda b, x, y: logical(b, "Xor", x, y),
    "Less": lambda b, x, y: logical(b, "And", logical(b, "Not", x), y),
    "LessEqual": lambda b, x, y: logical(b, "Or", logical(b, "Not", x), y),
    "Greater": lambda b, x, y: logical(b, "And", x, logical(b, "Not", y)),
    "GreaterEqual": lambda b, x, y: logical(b, "Or", x, logical(b, "Not", y)),
}


# Up to QAIRT 2.49, -0.0 is less than 0.0.  Beside fp16's smallest number it makes no difference.
_STRICTLY = {"GreaterEqual": ("Greater", -(2.0**-24)), "LessEqual": ("Less", 2.0**-24)}


def compare(b: Builder, op: str, x: Arg, y: Arg) -> Value:
    """A comparison in the type that PyTorch promotes the operands to."""
    dtype = promoted(x, y)
    if dtype is DType.BOOL8:
        return _OF_BOOLS[op](b, x, y)
    if isinstance(x, Value) and isinstance(y, float) and x.dtype is not DType.FLOAT16:
        # Integers are compared as integers: fp16 does not tell 4001 from 4000.
        dtype, y = DType.INT32, _whole(b, op, y)
    if dtype is DType.FLOAT16 and isinstance(x, Value) and not isinstance(y, Value) and y == 0:
        x = b.cast(x, dtype)
        if op in ("Equal", "NotEqual"):
            x = absolute(b, x)
        elif op in _STRICTLY:
            op, y = _STRICTLY[op]
    return b.binary(f"ElementWise{op}", b.value(x, dtype), b.value(y, dtype), DType.BOOL8)


def _whole(b: Builder, type: str, bound: float) -> int:
    """The integer that integers compare with as they do with `bound`."""
    if bound.is_integer():
        return int(bound)
    if type in ("Equal", "NotEqual") or not math.isfinite(bound):
        b.refuse(f"integers are compared with {bound}")
    return math.floor(bound) if type in ("LessEqual", "Greater") else math.ceil(bound)


def _comparison(type: str) -> Callable[[Builder, Arg, Arg], Value]:
    def rule(b: Builder, x: Arg, y: Arg) -> Value:
        return compare(b, type, x, y)

    return rule


for _packet, _type in {
    aten.eq: "Equal",
    aten.ne: "NotEqual",
    aten.lt: "Less",
    aten.le: "LessEqual",
    aten.gt: "Greater",
    aten.ge: "GreaterEqual",
}.items():
    lowers(_packet.Tensor, _packet.Scalar)(_comparison(_type))


@lowers(aten.isnan.default)
def isnan(b: Builder, x: Value) -> Value:
    if x.dtype is not DType.FLOAT16:
        return b.expand(b.value(False), x.shape)
    return b.elementwise("IsNan", [x], dtype=DType.BOOL8)


@lowers(aten.isinf.default)
def isinf(b: Builder, x: Value) -> Value:
    if x.dtype is not DType.FLOAT16:
        return b.expand(b.value(False), x.shape)
    return compare(b, "Equal", absolute(b, x), math.inf)


# -- logic -------------------------------------------------------------------------------------


def _logic(type: str) -> Callable[..., Value]:
    def rule(b: Builder, *args: Arg) -> Value:
        return logical(b, type, *args)

    return rule


for _name in ("not", "and", "or", "xor"):  # those of bits are in `bits`
    lowers(getattr(aten, f"logical_{_name}").default)(_logic(_name.title()))


# -- selection and casts -----------------------------------------------------------------------


@lowers(aten.where.self)
def where(b: Builder, condition: Value, x: Value, y: Value) -> Value:
    return select(b, condition, x, y)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor, keep=True)
def masked_fill(b: Builder, x: Value, mask: Value, value: Arg) -> Value:
    return select(b, mask, b.value(value, x.dtype), x)


@lowers(
    aten.clone.default,
    aten.alias.default,
    aten.alias_copy.default,
    aten.detach.default,
    aten.detach_copy.default,
    aten.lift_fresh_copy.default,
    aten._to_copy.default,
)
def to(b: Builder, x: Value, *_: object) -> Value:
    """A copy, in another type or the same: values have no identity and no memory format here."""
    dtype = b.result.dtype
    if x.dtype is DType.FLOAT16 and dtype is DType.INT32:
        x = trunc(b, x)  # a cast back would be taken to undo this one
    return b.cast(x, dtype)
