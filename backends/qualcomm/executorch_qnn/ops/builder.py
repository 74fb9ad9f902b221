# SPDX-License-Identifier: BSD-3-Clause
"""Emits QNN ops.  What the op table's functions see: values in, values out.

Every op is pure, so equal ops on equal inputs are emitted once (hash-consing): an index that all
layers of a decoder need is computed once per step, without anybody arranging for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from ..compile.ir import (
    NUMPY,
    Array,
    DType,
    Graph,
    Kind,
    LazyData,
    Node,
    Param,
    Scalar,
    Tensor,
)

Shape: TypeAlias = tuple[int, ...]
Number: TypeAlias = int | float | bool

MAX_RANK = 5
FP16_MAX = 65504.0

_INTERNAL: dict[torch.dtype, DType] = {
    torch.float32: DType.FLOAT16,
    torch.float16: DType.FLOAT16,
    torch.bfloat16: DType.FLOAT16,
    torch.float64: DType.FLOAT16,
    torch.int64: DType.INT32,
    torch.int32: DType.INT32,
    torch.bool: DType.BOOL8,
}


class Refused(Exception):
    """An op, as it stands in this graph, has no QNN form; the message is the reason, in words."""


def internal(dtype: torch.dtype) -> DType:
    """The element type in which a QNN graph computes with values of `dtype`.

    Raises:
        Refused: HTP has no type that computes as PyTorch does (narrow integers wrap, complex, ...).
    """
    try:
        return _INTERNAL[dtype]
    except KeyError:
        raise Refused(f"HTP does not compute in {dtype}") from None


@dataclass(frozen=True, eq=False)
class Const:
    """A value that is known when the model is lowered; made when it is needed, not before."""

    make: Callable[[], torch.Tensor]
    key: object
    """Equal keys mean equal values: one static tensor for all of them."""


@dataclass(eq=False)
class Value:
    """What an FX node stands for: a tensor of the graph, or a constant that is not yet in it.

    Attributes:
        shape: the torch shape; `()` is a 0-d value.
        dtype: the type that the graph computes in.
    """

    shape: Shape
    dtype: DType
    tensor: Tensor | None = None
    const: Const | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_const(self) -> bool:
        return self.const is not None


Arg: TypeAlias = Value | Number | None


@dataclass(frozen=True)
class Result:
    """Shape and types of what the ATen node must give, from its metadata."""

    shape: Shape
    torch_dtype: torch.dtype

    @property
    def dtype(self) -> DType:
        return internal(self.torch_dtype)


def u32(value: int) -> Scalar:
    return Scalar(DType.UINT32, int(value))


def i32(value: int) -> Scalar:
    return Scalar(DType.INT32, int(value))


def f32(value: float) -> Scalar:
    return Scalar(DType.FLOAT32, float(value))


def b8(value: bool) -> Scalar:
    return Scalar(DType.BOOL8, bool(value))


def qnn_shape(shape: Shape) -> Shape:
    """QNN has no 0-d tensors: they are stored with one element."""
    return shape or (1,)


def to_array(tensor: torch.Tensor, dtype: DType) -> Array:
    """The values of `tensor` as QNN stores them.

    Finite floats beyond fp16's range are clamped, not turned into infinities: a mask of -1e9 must
    stay a finite number, or a row that is masked whole gives NaN instead of a uniform softmax.
    """
    t = tensor.detach()
    if dtype is DType.FLOAT16:
        t = t.float() if t.dtype in (torch.float64, torch.bfloat16) else t
        if t.dtype is torch.float32:
            beyond = (t.abs() > FP16_MAX) & torch.isfinite(t)
            if bool(beyond.any()):
                t = torch.where(beyond, t.sign() * FP16_MAX, t)
        t = t.half()
    elif dtype is DType.INT32 and t.dtype is torch.int64 and t.numel():
        if int(t.max()) > 2**31 - 1 or int(t.min()) < -(2**31):
            raise Refused("a constant does not fit into int32, HTP's widest integer")
    return np.ascontiguousarray(t.contiguous().numpy().astype(NUMPY[dtype], copy=False)).reshape(
        qnn_shape(tuple(t.shape))
    )


class Builder:
    """Builds one `Graph`.

    `result` holds what the node that is being lowered must give; functions of the op table read
    their output's shape from there instead of computing it again.
    """

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.results: list[Result] = []
        self.source = ""
        self._cons: dict[object, list[Value]] = {}
        self._statics: dict[object, Tensor] = {}
        self._views: dict[int, Value] = {}
        self._names: dict[str, int] = {}

    # -- values ------------------------------------------------------------------------------

    @property
    def result(self) -> Result:
        return self.results[0]

    def refuse(self, reason: str) -> NoReturn:
        raise Refused(reason)

    def unique(self, stem: str) -> str:
        n = self._names.get(stem, 0)
        self._names[stem] = n + 1
        return f"{stem}_{n}" if n else stem

    def add_tensor(self, tensor: Tensor) -> Tensor:
        self.graph.tensors.append(tensor)
        return tensor

    def input(self, name: str, shape: Shape, dtype: DType) -> Value:
        t = Tensor(self.unique(name), dtype, qnn_shape(shape), Kind.INPUT)
        return Value(shape, dtype, self.add_tensor(t))

    def const(self, data: torch.Tensor | Array | Number, dtype: DType | None = None) -> Value:
        """A constant from data at hand."""
        t = torch.as_tensor(data)
        d = dtype or internal(t.dtype)
        key = (d, tuple(t.shape), t.numpy().tobytes(), t.dtype)
        return Value(tuple(t.shape), d, const=Const(lambda: t, key))

    def value(self, arg: Arg, dtype: DType | None = None) -> Value:
        """`arg` as a value of `dtype`: numbers become constants, other types are cast."""
        if arg is None:
            self.refuse("an operand is missing")
        if not isinstance(arg, Value):
            d = dtype or (DType.BOOL8 if isinstance(arg, bool) else None)
            d = d or (DType.INT32 if isinstance(arg, int) else DType.FLOAT16)
            t = torch.tensor(arg, dtype=torch.float32 if d.is_float else None)
            return self.const(t, d)
        return arg if dtype is None else self.cast(arg, dtype)

    def numbers(self, arg: Value) -> torch.Tensor:
        """The data of a constant, for ops whose parameters it decides."""
        if arg.const is None:
            self.refuse("an operand must be known when the model is lowered")
        return arg.const.make()

    def tensor(self, value: Value) -> Tensor:
        """The graph's tensor for `value`; constants become static tensors, one per content."""
        if value.tensor is None:
            assert value.const is not None
            key = (value.const.key, value.dtype, value.shape)
            if key not in self._statics:
                make, dtype, shape = value.const.make, value.dtype, value.shape

                def data() -> Array:
                    return to_array(make(), dtype).reshape(qnn_shape(shape))

                t = Tensor(
                    self.unique("const"), dtype, qnn_shape(shape), Kind.STATIC, data=LazyData(data)
                )
                self._statics[key] = self.add_tensor(t)
            value.tensor = self._statics[key]
        return value.tensor

    def derived(self, value: Value, what: str, fn: Callable[[torch.Tensor], torch.Tensor],
                shape: Shape, dtype: DType | None = None) -> Value:  # fmt: skip
        """A constant computed from a constant, still not made; `what` names the function."""
        assert value.const is not None
        make = value.const.make
        const = Const(lambda: fn(make()), (value.const.key, what, shape))
        return Value(shape, dtype or value.dtype, const=const)

    def param(self, data: Sequence[Any] | Array, dtype: DType = DType.UINT32) -> Tensor:
        """A small tensor parameter (axes, permutations, ranges)."""
        array = np.ascontiguousarray(np.asarray(data, NUMPY[dtype]))
        key = (dtype, array.shape, array.tobytes())
        if key not in self._statics:
            name = self.unique("param")
            t = Tensor(name, dtype, tuple(array.shape), Kind.STATIC, data=array)
            self._statics[key] = self.add_tensor(t)
        return self._statics[key]

    # -- ops ---------------------------------------------------------------------------------

    def ops(
        self,
        type: str,
        inputs: Sequence[Value],
        outputs: Sequence[tuple[Shape, DType]],
        params: Mapping[str, Param] | None = None,
    ) -> list[Value]:
        """Emits a QNN op with several outputs, or finds the equal one emitted before."""
        params = dict(params or {})
        ins = [self.tensor(v) for v in inputs]
        for shape in (*(t.shape for t in ins), *(s for s, _ in outputs)):
            if len(shape) > MAX_RANK:
                self.refuse(f"rank {len(shape)} is above {MAX_RANK}, the highest of QNN's {type}")
            if 0 in shape:
                self.refuse("QNN has no tensors without elements")
        key = (
            type,
            tuple(id(t) for t in ins),
            tuple(outputs),
            tuple((k, p if isinstance(p, Scalar) else id(p)) for k, p in params.items()),
        )
        if key in self._cons:
            return self._cons[key]
        name = self.unique(type)
        outs = [
            self.add_tensor(Tensor(f"{name}_out{i}", d, qnn_shape(s)))
            for i, (s, d) in enumerate(outputs)
        ]
        self.graph.nodes.append(Node(name, type, ins, outs, params, self.source))
        values = [Value(s, d, t) for (s, d), t in zip(outputs, outs, strict=True)]
        self._cons[key] = values
        return values

    def op(
        self,
        type: str,
        inputs: Sequence[Value],
        shape: Shape | None = None,
        dtype: DType | None = None,
        params: Mapping[str, Param] | None = None,
    ) -> Value:
        """Emits a QNN op with one output; shape and type default to the first input's."""
        s = inputs[0].shape if shape is None else shape
        return self.ops(type, inputs, [(s, dtype or inputs[0].dtype)], params)[0]

    # -- the ops that every family needs ----------------------------------------------------

    def cast(self, x: Value, dtype: DType) -> Value:
        """`x` as `dtype`; numbers become bools by `!= 0`, as in PyTorch."""
        if x.dtype is dtype:
            return x
        if x.is_const:
            return self._cast_const(x, dtype)
        if dtype is DType.BOOL8:
            return self.op("ElementWiseNotEqual", [x, self.value(0, x.dtype)], dtype=dtype)
        return self.op("Cast", [x], dtype=dtype)

    def _cast_const(self, x: Value, dtype: DType) -> Value:
        def convert(t: torch.Tensor) -> torch.Tensor:
            if dtype is DType.BOOL8:
                return t != 0
            return t.to(torch.int64) if dtype.is_int else t.to(torch.float32)

        return self.derived(x, f"cast {dtype}", convert, x.shape, dtype)

    def reshape(self, x: Value, shape: Sequence[int]) -> Value:
        s = tuple(shape)
        if s == x.shape:
            return x
        if x.is_const:
            return self.derived(x, "reshape", lambda t: t.reshape(s), s)
        base = self._views.get(id(x.tensor), x)
        if qnn_shape(s) == qnn_shape(base.shape):
            return Value(s, x.dtype, base.tensor)
        y = self.op("Reshape", [base], s)
        self._views.setdefault(id(y.tensor), base)
        return Value(s, x.dtype, y.tensor)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        p = tuple(perm)
        if p == tuple(range(x.rank)):
            return x
        shape = tuple(x.shape[i] for i in p)
        if x.is_const:
            return self.derived(x, f"permute {p}", lambda t: t.permute(p), shape)
        moved = [i for i in p if x.shape[i] != 1]
        if moved == sorted(moved):  # only axes of length one move
            return self.reshape(x, shape)
        return self.op("Transpose", [x], shape, params={"perm": self.param(p)})

    def slice(self, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
        """`x[..., start:stop:step, ...]` along `dim`, bounds already within the shape."""
        n = x.shape[dim]
        if (start, stop, step) == (0, n, 1):
            return x
        length = max(0, -(-(stop - start) // step))
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        if x.is_const:
            index = (slice(None),) * dim + (slice(start, stop, step),)
            return self.derived(x, f"slice {dim} {start} {stop} {step}", lambda t: t[index], shape)
        ranges = [[0, s, 1] for s in x.shape]
        ranges[dim] = [start, stop, step]
        return self.op(
            "StridedSlice", [x], shape, params={"ranges": self.param(ranges, DType.INT32)}
        )

    def concat(self, xs: Sequence[Value], dim: int) -> Value:
        if len(xs) == 1:
            return xs[0]
        length = sum(x.shape[dim] for x in xs)
        shape = (*xs[0].shape[:dim], length, *xs[0].shape[dim + 1 :])
        if all(x.is_const for x in xs):
            makes = [x.const.make for x in xs if x.const]
            key = ("cat", dim, *(x.const.key for x in xs if x.const))
            const = Const(lambda: torch.cat([m() for m in makes], dim), key)
            return Value(shape, xs[0].dtype, const=const)
        return self.op("Concat", xs, shape, params={"axis": u32(dim)})

    def align(self, xs: Sequence[Value]) -> list[Value]:
        """Gives all values one rank, by leading axes of length one, so that they broadcast."""
        rank = max(x.rank for x in xs)
        return [self.reshape(x, (1,) * (rank - x.rank) + x.shape) for x in xs]

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` broadcast to `shape`."""
        s = tuple(shape)
        if x.is_const:
            return self.derived(x, "expand", lambda t: t.expand(s), s)
        x = self.reshape(x, (1,) * (len(s) - x.rank) + x.shape)
        times = [1 if a == b else b for a, b in zip(x.shape, s, strict=True)]
        if all(n == 1 for n in times):
            return x
        return self.op("Tile", [x], s, params={"multiples": self.param(times)})

    def binary(self, type: str, a: Value, b: Value, dtype: DType | None = None) -> Value:
        """An elementwise op of two values of one type, with broadcasting."""
        a, b = self.align([a, b])
        shape = torch.broadcast_shapes(a.shape, b.shape)
        return self.op(type, [a, b], tuple(shape), dtype)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that `shapes` broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))
