# SPDX-License-Identifier: BSD-3-Clause
"""Ops whose form in integers differs from that in fp16: QNN's own ops, which are exact there.

In fp16 many functions are built of several ops, because HTP's own are off at the edges of the
range; in integers HTP looks its functions up, to the last step at 8 bits and a few steps at 16.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..compile.ir import DType, Param, QuantType, ScaleOffset
from . import matmul
from .builder import Arg, Builder, Number, Shape, Value, f32, u32
from .elementwise import known
from .layout import axis
from .quantized import S16, U8, U16
from .registry import computes_integers

aten = torch.ops.aten


def stored(
    b: Builder,
    kind: QuantType,
    type: str,
    inputs: Sequence[Value],
    params: dict[str, Param] | None = None,
) -> Value:
    """An op on the way to the result, whose own result is stored as `kind`."""
    wanted, b.wanted = b.wanted, kind
    y = b.op(type, inputs, params=params)
    b.wanted = wanted
    b.computed.discard(id(y.tensor))
    return y


def width(b: Builder, x: Value) -> DType:
    """The type that a function of `x` is computed in."""
    dtypes = {q.dtype for q in (x.quant, b.wanted) if q is not None}
    return U16 if dtypes & {U16, S16} else U8


def _unit(dtype: DType, low: int) -> QuantType:
    """The type for results from `low`, 0 or -1, to 1, for which HTP's Sigmoid and Tanh are made."""
    steps = 256 if dtype is U8 else 65536
    return QuantType(dtype, ScaleOffset((1 - low) / steps, low * steps // (1 - low)))


def _function(type: str, **params: Param) -> Callable[..., Value]:
    def rule(b: Builder, x: Value, *_: object) -> Value:
        return b.elementwise(type, [x], params=params)

    return rule


for targets, function in (
    ([aten.relu.default], _function("Relu")),
    ([aten.relu6.default], _function("ReluMinMax", min_value=f32(0), max_value=f32(6))),
    ([aten.sigmoid.default], _function("Sigmoid")),
    ([aten.exp.default], _function("ElementWiseExp")),
    ([aten.log.default], _function("ElementWiseLog")),
    ([aten.sqrt.default], _function("ElementWiseSquareRoot")),
    ([aten.rsqrt.default], _function("ElementWiseRsqrt")),
    ([aten.sin.default], _function("ElementWiseSin")),
    ([aten.cos.default], _function("ElementWiseCos")),
    ([aten.abs.default], _function("ElementWiseAbs")),
    ([aten.neg.default], _function("ElementWiseNeg")),
    ([aten.gelu.default], _function("Gelu")),
    ([aten.hardswish.default], _function("HardSwish")),
):
    computes_integers(*targets)(function)


@computes_integers(aten.hardtanh.default)
def hardtanh(b: Builder, x: Value, low: Number = -1, high: Number = 1) -> Value:
    return clamp(b, x, low, high)


@computes_integers(aten.clamp.default)
def clamp(b: Builder, x: Value, low: Number | None = None, high: Number | None = None) -> Value:
    bounds = {"min_value": f32(-3e38 if low is None else low)}
    bounds["max_value"] = f32(3e38 if high is None else high)
    return b.elementwise("ReluMinMax", [x], params=bounds)


@computes_integers(aten.elu.default)
def elu(
    b: Builder, x: Value, alpha: Number = 1, scale: Number = 1, input_scale: Number = 1
) -> Value:
    if scale != 1 or input_scale != 1:
        b.refuse("QNN's Elu has no scales")
    return b.elementwise("Elu", [x], params={"alpha": f32(alpha)})


@computes_integers(aten.leaky_relu.default)
def leaky_relu(b: Builder, x: Value, slope: Number = 0.01) -> Value:
    return b.op("Prelu", [x, b.const(torch.full((1,), float(slope)))])


@computes_integers(aten.tanh.default)
def tanh(b: Builder, x: Value) -> Value:
    return stored(b, _unit(width(b, x), -1), "Tanh", [x])


@computes_integers(aten.silu.default)
def silu(b: Builder, x: Value) -> Value:
    gate = stored(b, _unit(width(b, x), 0), "Sigmoid", [x])
    return b.binary("ElementWiseMultiply", x, gate)


def _binary(type: str) -> Callable[..., Value]:
    def rule(b: Builder, x: Arg, y: Arg) -> Value:
        return b.binary(type, b.value(x, DType.FLOAT16), b.value(y, DType.FLOAT16))

    return rule


computes_integers(aten.mul.Tensor, aten.mul.Scalar)(_binary("ElementWiseMultiply"))


@computes_integers(aten.div.Tensor, aten.div.Scalar)
def div(b: Builder, x: Arg, y: Arg) -> Value:
    if (c := known(b, y)) and isinstance(x, Value):
        return b.binary("ElementWiseMultiply", x, b.value(1.0 / float(c), DType.FLOAT16))
    return _binary("ElementWiseDivide")(b, x, y)


@computes_integers(aten.pow.Tensor_Scalar)
def power(b: Builder, x: Value, exponent: Number) -> Value:
    if exponent != 2:
        b.refuse("powers but squares are computed in fp16")
    return b.binary("ElementWiseMultiply", x, x)


@computes_integers(aten.linear.default)
def linear(b: Builder, x: Value, weight: Value, bias: Value | None = None) -> Value:
    """A 1x1 convolution where QNN's FullyConnected is no good.

    With 16-bit weights that is 12 dB less exact than Conv2d, and with a bias beside blocks of 4
    bits it computes garbage in one of ten compilations of the very same graph (QAIRT 2.51).
    """
    steps = weight.const.steps if weight.const is not None else None
    if steps is None or not (steps.bits == 16 or (steps.bits == 4 and bias is not None)):
        return matmul.linear(b, x, weight, bias)
    n, k = weight.shape
    image = b.reshape(x, (1, 1, x.numel // k, k))
    filters = b.reshape(b.transpose(weight, (1, 0)), (1, 1, k, n))
    params: dict[str, Param] = {
        "stride": b.param([1, 1]),
        "pad_amount": b.param([[0, 0], [0, 0]]),
        "dilation": b.param([1, 1]),
        "group": u32(1),
    }
    inputs = [image, filters] if bias is None else [image, filters, bias]
    y = b.op("Conv2d", inputs, (1, 1, image.shape[2], n), params=params)
    return b.reshape(y, (*x.shape[:-1], n))


# -- along an axis -----------------------------------------------------------------------------


def _last(b: Builder, x: Value, dim: int, fn: Callable[[Value], Value]) -> Value:
    """`fn` along an axis, for a QNN op that works along the last one."""
    order = [i for i in range(x.rank) if i != axis(dim, x.rank)] + [axis(dim, x.rank)]
    return b.transpose(fn(b.transpose(x, order)), [order.index(i) for i in range(x.rank)])


def _softmax(type: str) -> Callable[..., Value]:
    def rule(b: Builder, x: Value, dim: int, *_: object) -> Value:
        def fn(v: Value) -> Value:
            flat = b.reshape(v, (v.numel // v.shape[-1], v.shape[-1]))
            return b.reshape(b.op(type, [flat], params={"axis": u32(1), "beta": f32(1)}), v.shape)

        if not x.rank:
            b.refuse("a softmax of one number is computed in fp16")
        return _last(b, x, dim, fn)

    return rule


computes_integers(aten._softmax.default, aten.softmax.int, aten._safe_softmax.default)(
    _softmax("Softmax")
)
computes_integers(aten._log_softmax.default, aten.log_softmax.int)(_softmax("LogSoftmax"))


def _normalized(
    b: Builder, type: str, x: Value, axes: int, weight: Value | None, bias: Value | None, eps: float
) -> Value:
    """QNN's norm over the last `axes` axes; its weight has 8 bits, in a RmsNorm as many as `x`."""
    shape = x.shape[x.rank - axes :]
    n = torch.Size(shape).numel()
    flat = b.reshape(x, (x.numel // n, n))
    scale = b.const(torch.ones(n)) if weight is None else b.reshape(weight, (n,))
    shift = b.const(torch.zeros(n)) if bias is None else b.reshape(bias, (n,))
    params: dict[str, Param] = {"axes": b.param([1]), "epsilon": f32(eps)}
    return b.reshape(b.op(type, [flat, scale, shift], params=params), x.shape)


@computes_integers(aten.layer_norm.default)
def layer_norm(
    b: Builder,
    x: Value,
    shape: Shape,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    return _normalized(b, "LayerNorm", x, len(shape), weight, bias, eps)


@computes_integers(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder, x: Value, shape: Shape, weight: Value | None, bias: Value | None, eps: float
) -> list[Value | None]:
    return [_normalized(b, "LayerNorm", x, len(shape), weight, bias, eps), None, None]


@computes_integers(aten.rms_norm.default)
def rms_norm(
    b: Builder, x: Value, shape: Shape, weight: Value | None = None, eps: float | None = None
) -> Value:
    eps = torch.finfo(torch.float32).eps if eps is None else eps
    return _normalized(b, "RmsNorm", x, len(shape), weight, None, eps)


@computes_integers(aten.scaled_dot_product_attention.default)
def attention(b: Builder, *_: object) -> Value:
    b.refuse("attention is computed in fp16 unless the quantizer writes it as products and softmax")
