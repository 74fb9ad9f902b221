# SPDX-License-Identifier: BSD-3-Clause
"""Quantized graphs: which nodes are computed in integers, and how.

PT2E writes a quantized model as float ops between `dequantize` and `quantize`.  Here a `dequantize`
is nothing: its value stands for real numbers that are stored quantized (`Value.quant`).  Of a node,

* if it only moves elements, the result is stored as its operand is;
* if all that reads its result quantizes it alike, the result is *wanted* so, and the node is
  computed in integers, by the op table's own rule as long as that is one QNN op between moves, or
  by a rule of this module: a second op in a row would need an encoding that nobody knows;
* else its operands are dequantized and it is computed in fp16, in the same graph.

What HTP computes wrongly in integers is refused here (`_WRONG`), and then computed in fp16 too.
Encodings follow QNN: `real = (q + offset) * scale`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ..compile.ir import (
    NUMPY,
    Array,
    DType,
    Encoding,
    Param,
    QuantType,
    Scalar,
    ScaleOffset,
    Tensor,
    blockwise,
    per_channel,
)
from .builder import Builder, Refused, Shape, Steps, Value, qnn_shape

U8, U16, S8, S16 = DType.UFIXED8, DType.UFIXED16, DType.SFIXED8, DType.SFIXED16

OF_TORCH = {torch.uint8: U8, torch.uint16: U16, torch.int8: S8, torch.int16: S16}

_MOVES = frozenset(
    ("BatchToSpace", "Concat", "DepthToSpace", "ElementWiseSelect", "Gather", "GatherElements",
     "GatherNd", "Pad", "PoolMax2d", "PoolMax3d", "ReduceMax", "ReduceMin", "Reshape",
     "ResizeNearestNeighbor", "ScatterElements", "ScatterNd", "SpaceToBatch", "SpaceToDepth",
     "Split", "StridedSlice", "Tile", "Transpose")
)  # fmt: skip
"""QNN ops whose result has the values of their operands."""

_WEIGHTED = {
    "Conv2d": 3, "Conv3d": 4, "DepthWiseConv2d": 3, "FullyConnected": 0, "TransposeConv2d": 3,
}  # fmt: skip
"""QNN ops with a weight, and its axis of output channels."""

_NORMS = {"LayerNorm": U8, "RmsNorm": None}
"""QNN ops with a gain, and its type if that is not the activations'."""

_WRONG = {
    ("ElementWiseLog", U16): "HTP's 16-bit Log gives the ends of the range",
    ("ElementWiseSquareRoot", U16): "HTP's 16-bit SquareRoot is less exact than fp16",
    ("Gelu", U16): "HTP's 16-bit Gelu is less exact than fp16",
    ("ElementWiseDivide", U16): "HTP's 16-bit Divide is less exact than fp16",
}
"""What the HTP simulator of QAIRT 2.47 to 2.51 computes wrongly, or worse than in fp16."""


def limits(dtype: DType) -> tuple[int, int]:
    """The least and the greatest integer of a type."""
    info = np.iinfo(NUMPY[dtype])
    return int(info.min), int(info.max)


def real_range(q: QuantType) -> tuple[float, float]:
    """The real numbers that the least and the greatest integer stand for."""
    low, high = limits(q.dtype)
    return (low + q.encoding.offset) * q.encoding.scale, (
        high + q.encoding.offset
    ) * q.encoding.scale


def covering(low: float, high: float, dtype: DType) -> QuantType:
    """A type of the given width for reals from `low` to `high`; zero is one of its values."""
    least, greatest = limits(dtype)
    low, high = min(low, 0.0), max(high, 0.0)
    scale = float(np.float32((high - low) / (greatest - least))) or 1.0
    zero_point = min(max(round(least - low / scale), least), greatest)
    return QuantType(dtype, ScaleOffset(scale, -zero_point))


def symmetric(bound: float, dtype: DType) -> QuantType:
    """A type for reals from `-bound` to `bound`, with zero in the middle."""
    least, greatest = limits(dtype)
    scale = float(np.float32(bound / ((greatest - least) // 2))) or 1.0
    return QuantType(dtype, ScaleOffset(scale, -((least + greatest + 1) // 2)))


def widened(q: QuantType, dtype: DType) -> QuantType:
    """The same type, or a wider one that has all its values."""
    if q.dtype is dtype:
        return q
    steps = 2 ** (8 * (dtype.itemsize - q.dtype.itemsize))
    shift = limits(dtype)[0] - limits(q.dtype)[0] * steps
    return QuantType(
        dtype, ScaleOffset(q.encoding.scale / steps, q.encoding.offset * steps - shift)
    )


def quantized(real: torch.Tensor, q: QuantType) -> Array:
    """The integers that stand for real numbers, as `quantize_per_tensor` and the runtime round."""
    low, high = limits(q.dtype)
    t = torch.round(real.detach().float() * float(np.float32(1.0 / q.encoding.scale)))
    array = (t - q.encoding.offset).clamp(low, high).numpy().astype(NUMPY[q.dtype])
    return np.ascontiguousarray(array).reshape(qnn_shape(tuple(real.shape)))


# -- the nodes of PT2E -------------------------------------------------------------------------


def _schema_name(target: Any) -> str:
    schema = getattr(target, "_schema", None)  # of the edge dialect's ops, too
    return schema.name if schema is not None else ""


def is_quantize(node: torch.fx.Node) -> bool:
    return _schema_name(node.target) == "quantized_decomposed::quantize_per_tensor"


def is_dequantize(node: torch.fx.Node) -> bool:
    return _schema_name(node.target) == "quantized_decomposed::dequantize_per_tensor"


def type_of(node: torch.fx.Node) -> QuantType | None:
    """The type that a `quantize` or `dequantize` node names; None if HTP has none like it."""
    _, scale, zero_point, low, high, dtype = node.args[:6]
    stored = OF_TORCH.get(dtype)  # type: ignore[arg-type]
    if stored is None or (low, high) != limits(stored) or isinstance(scale, torch.fx.Node):
        return None
    return QuantType(stored, ScaleOffset(float(np.float32(scale)), -int(zero_point)))  # type: ignore[arg-type]


def wanted_of(node: torch.fx.Node) -> QuantType | None:
    """How everybody who reads a node's value quantizes it; None if not all do, or not alike."""
    types = {type_of(u) if is_quantize(u) else None for u in node.users}
    return types.pop() if len(types) == 1 else None


WEIGHT_OPS = {
    "quantized_decomposed::dequantize_per_tensor",
    "quantized_decomposed::dequantize_per_channel",
    "torchao::dequantize_affine",
}


def steps_of(node: torch.fx.Node, evaluate: Callable[[torch.fx.Node], Any]) -> Steps | None:
    """The grid of a constant that a `dequantize` node gives; None if it has none.

    Args:
        evaluate: gives the value of a constant node.
    """
    name = _schema_name(node.target)
    if name not in WEIGHT_OPS:
        return None
    shape = tuple(node.meta["val"].shape)
    held_in: Any = node.args[0]

    def integers() -> torch.Tensor:
        return evaluate(held_in)  # type: ignore[no-any-return]

    if name == "torchao::dequantize_affine":
        return _affine_steps(node, shape, integers, evaluate)
    if name.endswith("per_tensor"):
        _, scale, zero_point, _low, high, dtype = node.args[:6]
        held = OF_TORCH.get(dtype)  # type: ignore[arg-type]
        if held is None:
            return None
        bits = 4 if high == 7 else 8 * held.itemsize
        single = torch.tensor(float(scale))  # type: ignore[arg-type]
        return Steps(held, bits, integers, lambda: single.expand(shape), int(zero_point))  # type: ignore[arg-type]
    _, scales, zero_points, axis, _low, high, dtype = node.args[:7]
    held = OF_TORCH.get(dtype)  # type: ignore[arg-type]
    if held is None or (zero_points is not None and bool(evaluate(zero_points).any())):  # type: ignore[arg-type]
        return None
    along = [1] * len(shape)
    along[int(axis)] = -1  # type: ignore[arg-type]
    bits = 4 if high == 7 else 8 * held.itemsize

    def each() -> torch.Tensor:
        t: torch.Tensor = evaluate(scales)  # type: ignore[arg-type]
        return t.float().reshape(along).expand(shape)

    return Steps(held, bits, integers, each)


def _affine_steps(
    node: torch.fx.Node,
    shape: Shape,
    integers: Callable[[], torch.Tensor],
    evaluate: Callable[[torch.fx.Node], Any],
) -> Steps | None:
    _, block, scales, zero_points, dtype, _low, high = [*node.args, *[None] * 7][:7]
    held = OF_TORCH.get(dtype)  # type: ignore[arg-type]
    if held is None or (isinstance(zero_points, torch.fx.Node) and evaluate(zero_points).any()):
        return None

    def scale() -> torch.Tensor:
        t: torch.Tensor = evaluate(scales).float()  # type: ignore[arg-type]
        sizes: Sequence[int] = block  # type: ignore[assignment]
        t = t.reshape([n // k for n, k in zip(shape, sizes, strict=True)])
        for d, k in enumerate(sizes):
            t = t.repeat_interleave(k, d)
        return t

    return Steps(held, 4 if high == 7 else 8 * held.itemsize, integers, scale)


# -- changes of type ---------------------------------------------------------------------------


def dequantize(b: Builder, x: Value) -> Value:
    """`x` in fp16."""
    if x.quant is None:
        return x
    (y,) = b.emit("Dequantize", [b.tensor(x)], [(x.shape, DType.FLOAT16, None)], {})
    return y


def requantize(b: Builder, x: Value, q: QuantType) -> Value:
    """`x`, however it is stored, stored as `q`."""
    if x.quant == q:
        return x
    if x.is_const:
        return Value(x.shape, x.dtype, _static(b, x, q))
    type_ = "Quantize" if x.quant is None else "Convert"
    (y,) = b.emit(type_, [b.tensor(x)], [(x.shape, DType.FLOAT16, q)], {})
    if id(x.tensor) in b.computed:
        b.computed.add(id(y.tensor))
    return y


def _static(b: Builder, x: Value, q: QuantType) -> Tensor:
    """A constant stored as `q`."""
    assert x.const is not None
    const = x.const

    def data() -> Array:
        if const.steps is not None and _own_type(x) == q:
            return np.ascontiguousarray(const.steps.integers().numpy())
        return quantized(const.make(), q)

    return b.static((const.key, q, x.shape), q.dtype, x.shape, q.encoding, data)


def _own_type(x: Value) -> QuantType | None:
    """The per-tensor type that a constant was given when the model was quantized."""
    steps = x.const.steps if x.const is not None else None
    if steps is None or steps.bits != 8 * steps.dtype.itemsize:
        return None
    scale = steps.scale()
    first = float(scale.reshape(-1)[0]) if scale.numel() else 1.0
    if any(
        stride and n > 1 for n, stride in zip(scale.shape, scale.stride(), strict=True)
    ) and not bool((scale == first).all()):
        return None
    return QuantType(steps.dtype, ScaleOffset(first, -steps.zero_point))


def _constant_type(b: Builder, x: Value, dtype: DType) -> QuantType:
    """A type of the given width for a constant.

    Raises:
        Refused: the constant would lose what 8 bits cannot hold, and nobody asked for that.
    """
    own = _own_type(x)
    if own is not None and own.dtype in (U8, dtype):
        return widened(own, dtype)
    data = b.numbers(x).double()
    if not bool(torch.isfinite(data).all()):
        b.refuse("an infinite constant has no integer")
    low, high = (float(v) for v in torch.aminmax(data))
    single = low == high or (data == 0).logical_or(data == data.abs().max()).all()
    if dtype is U8 and not single:
        b.refuse("a constant of it is not quantized, and 8 bits would change it")
    return covering(low, high, dtype)


# -- emitting ----------------------------------------------------------------------------------


def emit(
    b: Builder,
    type: str,
    inputs: Sequence[Value],
    outputs: Sequence[tuple[Shape, DType]],
    params: Mapping[str, Param],
) -> list[Value]:
    """`Builder.ops` where reals are stored quantized.

    Raises:
        Refused: it cannot be done in integers.
    """
    how = _moved if type in _MOVES else _computed
    return how(b, type, inputs, outputs, params)


def _moved(
    b: Builder,
    type: str,
    inputs: Sequence[Value],
    outputs: Sequence[tuple[Shape, DType]],
    params: Mapping[str, Param],
) -> list[Value]:
    reals = [v for v in inputs if v.dtype is DType.FLOAT16]
    kinds = {v.quant for v in reals if not v.is_const}
    if not reals or kinds == {None}:  # positions, masks; reals on their way to be quantized
        return b.emit(
            type, [b.tensor(v) for v in inputs], [(s, d, None) for s, d in outputs], params
        )
    fill = params.get("pad_constant_value")
    if isinstance(fill, Scalar) and fill.value:
        b.refuse("QNN's Pad fills quantized tensors with zero")
    if not kinds and (own := _own_type(reals[0])) is not None and own.dtype in (U8, U16):
        kinds = {own}
    mixed = len(kinds) > 1 or (b.wanted is not None and any(v.is_const for v in reals))
    kind = b.wanted if mixed else kinds.pop()
    if kind is None:
        b.refuse("its operands are stored in different encodings")
    ins = [b.tensor(_as(b, v, kind)) if v.dtype is DType.FLOAT16 else b.tensor(v) for v in inputs]
    outs = [(s, d, kind if d is DType.FLOAT16 else None) for s, d in outputs]
    values = b.emit(type, ins, outs, params)
    if any(id(t) in b.computed for t in ins):
        b.computed.update(id(v.tensor) for v in values)
    return values


def _as(b: Builder, x: Value, kind: QuantType) -> Value:
    """An operand of a move, stored as `kind`."""
    if x.quant is None and not x.is_const:
        b.refuse("an operand is not quantized")
    if x.is_const and kind != b.wanted:
        real = b.numbers(x).double()
        low, high = real_range(kind)
        if not bool(((real >= low) & (real <= high)).all()):
            b.refuse("a constant of it is out of the range that its operand is quantized to")
    return requantize(b, x, kind)


def _computed(
    b: Builder,
    type: str,
    inputs: Sequence[Value],
    outputs: Sequence[tuple[Shape, DType]],
    params: Mapping[str, Param],
) -> list[Value]:
    reals = [v for v in inputs if v.dtype is DType.FLOAT16]
    if not any(v.quant for v in reals):
        if reals and any(not v.is_const for v in reals):
            b.refuse("an operand is not quantized")
        return b.emit(
            type, [b.tensor(v) for v in inputs], [(s, d, None) for s, d in outputs], params
        )
    if any(id(v.tensor) in b.computed for v in reals):
        b.refuse("what it computes on the way has no encoding")
    wants = any(d is DType.FLOAT16 for _, d in outputs)
    if wants and b.wanted is None:
        b.refuse("its result is not quantized")
    dtypes = {v.quant.dtype for v in reals if v.quant} | (
        {b.wanted.dtype} if wants and b.wanted else set()
    )
    dtype = U16 if dtypes & {U16, S16} else U8
    if why := _WRONG.get((type, dtype)):
        b.refuse(why)
    if not dtypes <= {U8, U16}:
        b.refuse("HTP computes in unsigned integers")
    ins: list[Tensor] = []
    scales: tuple[float, ...] | float = 1.0
    for i, v in enumerate(inputs):
        if type == "FullyConnected" and i == 2 and _is_blockwise(ins[1]):
            b.refuse(
                "a bias beside blocks of 4 bits makes garbage at random; see ops.integers.linear"
            )
        if v.dtype is not DType.FLOAT16:
            ins.append(b.tensor(v))
        elif type in _WEIGHTED and i == 1 and v.is_const:
            weight, scales = _weight(b, v, type)
            ins.append(weight)
        elif type in _NORMS and i == 1:
            kind = _constant_type(b, v, _NORMS[type] or dtype)
            ins.append(_static(b, v, kind))
            scales = kind.encoding.scale
        elif (type in _WEIGHTED or type in _NORMS) and i == 2:
            x = inputs[0].quant
            assert x is not None
            ins.append(_bias(b, v, widened(x, dtype).encoding.scale, scales))
        elif type == "MatMul" and i == 1:
            ins.append(_right_operand(b, v, dtype))
        elif v.quant is not None:
            ins.append(b.tensor(requantize(b, v, widened(v.quant, dtype))))
        elif v.is_const:
            ins.append(_static(b, v, _constant_type(b, v, dtype)))
        else:
            b.refuse("an operand is not quantized")
    out = None if not wants or b.wanted is None else widened(b.wanted, dtype)
    values = b.emit(
        type, ins, [(s, d, out if d is DType.FLOAT16 else None) for s, d in outputs], params
    )
    if out is not None and b.wanted is not None:
        values = [requantize(b, v, b.wanted) if v.quant else v for v in values]
        b.computed.update(id(v.tensor) for v in values if v.quant)
    return values


def _is_blockwise(t: Tensor) -> bool:
    return t.encoding is not None and t.encoding[0] == "blockwise"


def _right_operand(b: Builder, y: Value, dtype: DType) -> Tensor:
    """A MatMul's second operand; HTP ignores its offset at 16 bits, unless it is in the middle."""
    if y.is_const:
        bound = float(b.numbers(y).abs().max())
        kind = symmetric(bound, dtype) if dtype is U16 else _constant_type(b, y, dtype)
        return _static(b, y, kind)
    assert y.quant is not None
    if dtype is U8:
        return b.tensor(y)
    low, high = real_range(y.quant)
    middle = symmetric(max(-low, high), y.quant.dtype)
    return b.tensor(
        y if y.quant.encoding.offset == middle.encoding.offset else requantize(b, y, middle)
    )


# -- weights -----------------------------------------------------------------------------------


def _weight(b: Builder, w: Value, type: str) -> tuple[Tensor, tuple[float, ...] | float]:
    """A constant weight of an op in integers, and the scales of its output channels.

    Raises:
        Refused: it is not quantized, or in a way that HTP does not have.
    """
    assert w.const is not None
    steps = w.const.steps
    if steps is None:
        steps = _single_step(b, w)
    if steps.zero_point:
        b.refuse("HTP takes no weights with a zero point")
    axis = _WEIGHTED[type]
    bits = 8 if type == "Conv3d" else steps.bits  # QNN compiles none of 4 bits
    grid = steps.scale()
    scales, factors = _by_channel(grid, axis)
    held = S16 if steps.bits == 16 else S8

    def data() -> Array:
        return np.ascontiguousarray(
            steps.integers().detach().numpy().astype(NUMPY[held], copy=False)
        )

    encoding: Encoding
    result: tuple[float, ...] | float = tuple(scales)
    if factors is not None:
        encoding = blockwise(axis, scales, factors)
    elif held is S16:
        if len(set(scales)) > 1:
            b.refuse("HTP takes 16-bit weights with one scale only")
        encoding, result = ScaleOffset(scales[0], 0), scales[0]
    else:
        encoding = per_channel(axis, scales, bits)
    tensor = b.static((w.const.key, w.shape, encoding), held, w.shape, encoding, data)
    return tensor, result


def _single_step(b: Builder, w: Value) -> Steps:
    """The grid of a weight of zeros and one other number, which any grid can hold."""
    data = b.numbers(w).float().abs()
    top = float(data.max())
    if not bool(((data == 0) | (data == top)).all()):
        b.refuse("its weight is not quantized")
    scale = torch.tensor(top / 64 or 1.0)
    assert w.const is not None
    make = w.const.make
    return Steps(S8, 8, lambda: torch.round(make() / scale), lambda: scale.expand(w.shape))


def _by_channel(grid: torch.Tensor, axis: int) -> tuple[list[float], Array | None]:
    """The scales along `axis`, and the integers by which those of blocks differ from them."""
    others = [d for d in range(grid.dim()) if d != axis]
    varying = [d for d in others if grid.stride(d) and grid.shape[d] > 1]
    first = grid  # zeros are what weights are padded with
    for d in sorted(others, reverse=True):
        first = first.amax(d) if d in varying else first.select(d, 0)
    shape = [-1 if d == axis else 1 for d in range(grid.dim())]
    if not varying or bool(((grid == first.reshape(shape)) | (grid == 0)).all()):
        return [s or 1.0 for s in first.tolist()], None
    return _by_block(grid, axis)


def _by_block(grid: torch.Tensor, axis: int) -> tuple[list[float], Array]:
    """LPBQ: each block's scale is its channel's times 1 to 16."""
    rest = grid.movedim(axis, 0).flatten(1)
    size = next((n for n in (64, 32, 16) if _is_blocked(rest, n)), None)
    if size is None:
        raise Refused("its weight has blocks that are no multiples of 16 long")
    blocks = rest[:, ::size].double()
    for top in range(16, 0, -1):
        scales = blocks.amax(1, keepdim=True) / top
        factors = torch.round(blocks / scales)
        if bool(((factors * scales - blocks).abs() <= 1e-5 * blocks).all()):
            return scales.flatten().tolist(), factors.to(torch.uint8).numpy()
    raise Refused("its blocks' scales are no multiples, 1 to 16, of one scale per channel (LPBQ)")


def _is_blocked(rows: torch.Tensor, size: int) -> bool:
    """Whether each row is made of blocks of so many equal numbers."""
    if rows.shape[1] % size:
        return False
    blocks = rows.unflatten(1, (-1, size))
    return bool((blocks == blocks[..., :1]).all())


def _bias(b: Builder, x: Value, act_scale: float, scales: tuple[float, ...] | float) -> Tensor:
    """A bias in 32-bit integers, in steps of the products that it is added to."""
    if not x.is_const:
        b.refuse("its bias is not known when the model is lowered")
    assert x.const is not None
    make = x.const.make
    steps = np.asarray(scales, np.float64) * act_scale
    encoding: Encoding = (
        ScaleOffset(float(steps), 0) if steps.ndim == 0 else per_channel(0, steps.tolist())
    )

    def data() -> Array:
        q = np.rint(make().detach().double().numpy() / steps)
        return np.clip(q, -(2**31), 2**31 - 1).astype(np.int32)

    return b.static((x.const.key, encoding, x.shape), DType.SFIXED32, x.shape, encoding, data)
