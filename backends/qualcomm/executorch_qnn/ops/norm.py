# SPDX-License-Identifier: BSD-3-Clause
"""Normalisation layers.

QNN's RmsNorm and LayerNorm square in float32 inside, so outlier channels beyond 255, whose squares
fp16 does not hold, are right.  They normalise the last axis only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from ..compile.ir import DType, Node, Param, Tensor
from .builder import FP16_MAX, Arg, Builder, Const, Shape, Value, f32, same_axis, u32
from .elementwise import minus, plus, times
from .reduction import moments
from .registry import lowers

aten = torch.ops.aten


def _ones(b: Builder, n: int) -> Value:
    return b.const(torch.ones(n))


def _zeros(b: Builder, n: int) -> Value:
    return b.const(torch.zeros(n))


def _normalised(
    b: Builder, type: str, x: Value, shape: Sequence[int], weight: Value | None,
    bias: Value | None, eps: float,
) -> Value:  # fmt: skip
    """RmsNorm or LayerNorm over the trailing axes `shape`."""
    n = math.prod(shape)
    rows = x
    if len(shape) > 1 or x.rank > 4:
        rows = b.reshape(x, (x.numel // n, n))
    # Always with both operands: older releases of QNN fail without.
    gamma = _ones(b, n) if weight is None else b.reshape(weight, (n,))
    beta = _zeros(b, n) if bias is None else b.reshape(bias, (n,))
    params: dict[str, Param] = {"axes": b.param([rows.rank - 1]), "epsilon": f32(eps)}
    return b.reshape(b.op(type, [rows, gamma, beta], params=params), x.shape)


@lowers(aten.rms_norm.default, keep=True)
def rms_norm(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    eps: float | None = None,
) -> Value:
    if eps is None:
        eps = torch.finfo(b.result.torch_dtype).eps
    return _normalised(b, "RmsNorm", x, shape, weight, None, eps)


@lowers(aten.layer_norm.default, keep=True)
def layer_norm(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    return _normalised(b, "LayerNorm", x, shape, weight, bias, eps)


@lowers(aten.native_layer_norm.default)
def native_layer_norm(
    b: Builder,
    x: Value,
    shape: Sequence[int],
    weight: Value | None,
    bias: Value | None,
    eps: float,
) -> list[Value]:
    y = layer_norm(b, x, shape, weight, bias, eps)
    return [y, *_statistics(b, x, list(range(x.rank - len(shape), x.rank)), eps)]


def _statistics(b: Builder, x: Value, axes: Sequence[int], eps: float) -> list[Value]:
    """Mean and reciprocal deviation; ops that nobody needs are dropped in the end."""
    mean, var = moments(b, x, axes)
    return [mean, b.elementwise("ElementWiseRsqrt", [plus(b, var, eps)])]


# -- over groups of channels -------------------------------------------------------------------


def _channels_last(
    b: Builder, type: str, x: Value, weight: Value | None, bias: Value | None, eps: float,
    groups: int | None = None,
) -> Value:  # fmt: skip
    """GroupNorm or InstanceNorm; QNN's are right on (N, H, W, C) alone."""
    n, c, *spatial = x.shape
    h, w = spatial if len(spatial) == 2 else (1, math.prod(spatial))
    image = b.transpose(b.reshape(x, (n, c, h, w)), (0, 2, 3, 1))
    gamma = _ones(b, c) if weight is None else weight
    beta = _zeros(b, c) if bias is None else bias
    params: dict[str, Param] = {"epsilon": f32(eps)}
    if groups is not None:
        params["group"] = u32(groups)
    y = b.op(type, [image, gamma, beta], params=params)
    return b.reshape(b.transpose(y, (0, 3, 1, 2)), x.shape)


@lowers(aten.group_norm.default, keep=True)
def group_norm(
    b: Builder,
    x: Value,
    groups: int,
    weight: Value | None = None,
    bias: Value | None = None,
    eps: float = 1e-5,
    *_: object,
) -> Value:
    return _channels_last(b, "GroupNorm", x, weight, bias, eps, groups)


@lowers(aten.native_group_norm.default)
def native_group_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    n: int,
    c: int,
    inner: int,
    groups: int,
    eps: float,
) -> list[Value]:
    rows = b.reshape(x, (n, groups, c // groups * inner))
    statistics = _statistics(b, rows, [2], eps)
    y = group_norm(b, x, groups, weight, bias, eps)
    return [y, *(b.reshape(s, (n, groups)) for s in statistics)]


@lowers(aten.instance_norm.default, keep=True)
def instance_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value | None,
    var: Value | None,
    use_input_stats: bool,
    momentum: float,
    eps: float,
    *_: object,
) -> Value:
    if use_input_stats:
        return _channels_last(b, "InstanceNorm", x, weight, bias, eps)
    return _affine(b, x, weight, bias, mean, var, eps)


# -- over the batch ----------------------------------------------------------------------------


@lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm(
    b: Builder,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    mean: Value,
    var: Value,
    momentum: float,
    eps: float,
) -> list[Value | None]:
    return [_affine(b, x, weight, bias, mean, var, eps), None, None]


@lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_of_batch(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, training: bool,
    momentum: float, eps: float,
) -> list[Value]:  # fmt: skip
    """Statistics of the batch itself: a LayerNorm of each channel."""
    c = x.shape[1]
    order = [1, 0, *range(2, x.rank)]
    channels = b.transpose(x, order)
    n = x.numel // c
    rows = _normalised(b, "LayerNorm", b.reshape(channels, (c, n)), [n], None, None, eps)
    if weight is not None:
        rows = times(b, rows, b.reshape(weight, (c, 1)))
    if bias is not None:
        rows = plus(b, rows, b.reshape(bias, (c, 1)))
    y = b.transpose(b.reshape(rows, channels.shape), order)
    axes = [i for i in range(x.rank) if i != 1]
    return [y, *(b.reshape(s, (c,)) for s in _statistics(b, x, axes, eps))]


def _affine(
    b: Builder, x: Value, weight: Value | None, bias: Value | None, mean: Value | None,
    var: Value | None, eps: float,
) -> Value:  # fmt: skip
    """`x * scale + shift`, which are computed in float32 once if everything is known."""
    if mean is None or var is None:
        b.refuse("running statistics are missing")
    known = [v for v in (weight, bias, mean, var) if v is not None]
    shape: Shape = (x.shape[1], *(1,) * (x.rank - 2))
    if not all(v.is_const for v in known):
        y = minus(b, x, b.reshape(mean, shape))
        y = times(b, y, b.elementwise("ElementWiseRsqrt", [plus(b, b.reshape(var, shape), eps)]))
        y = y if weight is None else times(b, y, b.reshape(weight, shape))
        return y if bias is None else plus(b, y, b.reshape(bias, shape))

    def numbers(v: Value | None, default: float) -> torch.Tensor:
        return torch.tensor(default) if v is None else b.numbers(v).float()

    def scale() -> torch.Tensor:
        return (numbers(weight, 1.0) * (numbers(var, 1.0) + eps).rsqrt()).reshape(shape)

    def shift() -> torch.Tensor:
        return (
            numbers(bias, 0.0).reshape(-1, *shape[1:]) - numbers(mean, 0.0).reshape(shape) * scale()
        )

    key = (eps, *(v.const.key for v in known if v.const), weight is None, bias is None)
    make = [Value(shape, DType.FLOAT16, const=Const(f, (f.__name__, key))) for f in (scale, shift)]
    if b.sole and (folded := _in_weights(b, x, *make)) is not None:
        return folded
    return plus(b, times(b, x, make[0]), make[1])


_OUTPUTS = {"Conv2d": -1, "Conv3d": -1, "DepthWiseConv2d": -1, "FullyConnected": 0,
            "TransposeConv2d": -1, "TransposeConv3d": -1}  # fmt: skip
"""QNN ops with weights, and along which axis of the weight the channels of the result lie."""
_FP16_NORMAL = 2.0**-14


def _in_weights(b: Builder, x: Value, scale: Value, shift: Value) -> Value | None:
    """`x * scale + shift` by channel, done by the weights of the op that makes `x`, if it has any.

    Not where weights would come to lie outside of the numbers that fp16 has in full precision.
    """
    node, moves = None if x.tensor is None else b.producer(x.tensor), list[Node]()
    while node is not None and node.type in ("Reshape", "Transpose"):
        moves.insert(0, node)
        node = b.producer(node.inputs[0])
    if node is None or node.type not in _OUTPUTS or any(n.source != node.source for n in moves):
        return None
    image, weight, *biases = (b.value_of(t) for t in node.inputs)
    shape, channel = node.outputs[0].shape, _channel(node, moves, x.shape)
    known = [v.const for v in (weight, *biases, scale, shift)]
    if channel != 1 or node.outputs[0].encoding or any(c is None or c.steps for c in known):
        return None
    w, *rest, s, t = (c.make for c in known if c)
    axis = _OUTPUTS[node.type] % weight.rank
    along = [-1 if i == axis else 1 for i in range(weight.rank)]

    def scaled() -> torch.Tensor:
        return w().float() * s().reshape(along)

    def shifted() -> torch.Tensor:
        return sum((f().float() * s().flatten() for f in rest), t().flatten())

    largest = scaled().abs().amax([i for i in range(weight.rank) if i != axis])
    tiny = (largest < _FP16_NORMAL) & (largest > 0) & (s().flatten().abs() > _FP16_NORMAL)
    if tiny.any() or largest.max() > FP16_MAX:
        return None
    key = [c.key for c in known if c]
    operands = [
        image,
        Value(weight.shape, weight.dtype, const=Const(scaled, ("scaled", *key))),
        Value((shape[-1],), weight.dtype, const=Const(shifted, ("shifted", *key))),
    ]
    y = b.op(node.type, operands, shape, params=node.params)
    for n in moves:
        y = b.reshape(y, n.outputs[0].shape) if n.type == "Reshape" else b.transpose(y, _order(n))
    return b.reshape(y, x.shape)


def _channel(node: Node, moves: Sequence[Node], shape: Shape) -> int | None:
    """The axis to which the last axis of the result of `node` comes, `None` if to none."""
    channel: int | None = len(node.outputs[0].shape) - 1
    last = node.outputs[0].shape
    for n in (*moves, None):
        if channel is None:
            break
        after = shape if n is None else n.outputs[0].shape
        if n is not None and n.type == "Transpose":
            channel = _order(n).index(channel)
        else:
            channel = same_axis(last, after, channel)
        last = after
    return channel


def _order(node: Node) -> list[int]:
    perm = node.params["perm"]
    assert isinstance(perm, Tensor)
    assert isinstance(perm.data, np.ndarray)
    return [int(i) for i in perm.data]


# -- written out by hand -----------------------------------------------------------------------


def recognised(b: Builder, x: Arg, y: Arg) -> Value | None:
    """An RMS norm that a model writes as its formula, `x * rsqrt(mean(x ** 2) + eps)`.

    QNN's own op does not overflow where the formula does.  Returns `None` for any other product.
    """
    for value, factor in ((x, y), (y, x)):
        if not isinstance(value, Value) or not isinstance(factor, Value) or value.is_const:
            continue
        if (eps := _mean_square(b, value, factor)) is not None:
            return _normalised(b, "RmsNorm", value, value.shape[-1:], None, None, eps)
        norm = _made_by(b, value, "RmsNorm")
        if norm is not None and _is_gain(b, norm, factor):
            source = b.value_of(norm.inputs[0])
            gamma = b.reshape(factor, (factor.numel,))
            return b.op("RmsNorm", [source, gamma, b.value_of(norm.inputs[2])], params=norm.params)
    return None


def _mean_square(b: Builder, x: Value, factor: Value) -> float | None:
    """Epsilon, if `factor` is `rsqrt(mean(x * x, -1, keepdim) + epsilon)`."""
    root = _made_by(b, factor, "ElementWiseRsqrt")
    total = root and _made_by(b, b.value_of(root.inputs[0]), "ElementWiseAdd")
    if not total:
        return None
    mean = _made_by(b, b.value_of(total.inputs[0]), "ReduceMean")
    eps = b.value_of(total.inputs[1])
    square = mean and _made_by(b, b.value_of(mean.inputs[0]), "ElementWiseMultiply")
    if not mean or not square or not eps.is_const or eps.numel != 1:
        return None
    axes = mean.params["axes"]
    assert isinstance(axes, Tensor)
    same = all(t is x.tensor for t in square.inputs)
    last = list(axes.data) == [x.rank - 1]  # type: ignore[arg-type]
    return float(b.numbers(eps)) if same and last and factor.shape[-1] == 1 else None


def _made_by(b: Builder, x: Value, type: str) -> Node | None:
    """The op that `x` is the result of, if it is one of that type."""
    node = None if x.tensor is None else b.producer(x.tensor)
    if node is None or node.type != type or node.outputs[0].shape != x.shape:
        return None
    return node


def _is_gain(b: Builder, norm: Node, factor: Value) -> bool:
    """Whether `factor` can become the weight of `norm`, which has none yet."""
    n = norm.inputs[0].shape[-1]
    return (
        factor.is_const
        and factor.dtype is DType.FLOAT16
        and factor.shape[-1:] == (n,)
        and factor.numel == n
        and norm.inputs[1] is b.tensor(_ones(b, n))
    )
