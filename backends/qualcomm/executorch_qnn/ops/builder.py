# SPDX-License-Identifier: BSD-3-Clause
"""Emits QNN ops.  What the op table's functions see: values in, values out.

Every op is pure, so equal ops on equal inputs are emitted once (hash-consing): an index that all
layers of a decoder need is computed once per step, without anybody arranging for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import torch

from ..compile.ir import (
    NUMPY,
    Array,
    DType,
    Encoding,
    Graph,
    Kind,
    LazyData,
    Node,
    Param,
    QuantType,
    Scalar,
    ScaleOffset,
    Tensor,
)

Shape: TypeAlias = tuple[int, ...]
Number: TypeAlias = int | float | bool

_VIEWS = ("permute", "reshape", "slice")  # functions of constants that mostly copy nothing
_MOVES = (*_VIEWS, "expand", "tile")  # those that only move elements
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


class StorageKey(NamedTuple):
    """Identifies a tensor by the memory that it is a view of: tied weights have equal keys."""

    storage: object
    offset: int
    shape: Shape
    stride: Shape
    dtype: torch.dtype

    @staticmethod
    def of(t: torch.Tensor) -> StorageKey:
        try:
            storage = t.untyped_storage().data_ptr() or id(t)
        except RuntimeError:  # a fake tensor has no memory
            storage = id(t)
        return StorageKey(
            storage, int(t.storage_offset()), tuple(t.shape), tuple(t.stride()), t.dtype
        )


@dataclass(frozen=True)
class Steps:
    """The grid on which the values of a quantized constant lie: `(q - zero_point) * scale`.

    Attributes:
        dtype: what holds `q`; of `bits` bits.
        integers: gives `q`.
        scale: gives the scales, of the constant's own shape, be it by strides of zero.
    """

    dtype: DType
    bits: int
    integers: Callable[[], torch.Tensor]
    scale: Callable[[], torch.Tensor]
    zero_point: int = 0

    def moved(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Steps:
        """The grid of what `fn`, which only moves elements, makes of the constant."""
        integers, scale = self.integers, self.scale
        return replace(self, integers=lambda: fn(integers()), scale=lambda: fn(scale()))


@dataclass(frozen=True, eq=False)
class Const:
    """A value that is known when the model is lowered; made when it is needed, not before."""

    make: Callable[[], torch.Tensor]
    key: object
    """Equal keys mean equal values: one static tensor for all of them."""
    steps: Steps | None = None


@dataclass(frozen=True, eq=False)
class Patch:
    """A buffer with some rows overwritten, and nothing computed yet.

    What a product with it needs can be had from the buffer and the rows (see `ops.matmul`); whoever
    wants the whole tensor calls `write`, and gets a copy of the buffer.

    Attributes:
        index: INT32 `[T]`, the places along axis `dim` of `base`; of equal ones the last counts.
        rows: of the shape of `base`, but `T` along `dim`.
    """

    base: Value
    dim: int
    index: Value
    rows: Value
    write: Callable[[], Value]

    def moved(self, dim: int, fn: Callable[[Value], Value]) -> Value:
        """What `fn`, which only moves elements, makes of it; axis `self.dim` becomes `dim`."""
        base = fn(self.base)
        patch = Patch(base, dim, self.index, fn(self.rows), lambda: fn(self.write()))
        return Value(base.shape, base.dtype, patch=patch)


@dataclass(eq=False)
class Value:
    """What an FX node stands for: a tensor of the graph, or what can become one.

    It is a tensor, a constant that is not yet in the graph, or a patched buffer that may never be.

    Attributes:
        shape: the torch shape; `()` is a 0-d value.
        dtype: the type that the graph computes in; FLOAT16 also for real numbers that are stored
            quantized, as `quant` says.
        narrow: what this is a broadcast of, for ops that broadcast by themselves.
    """

    shape: Shape
    dtype: DType
    tensor: Tensor | None = None
    const: Const | None = None
    narrow: Value | None = None
    patch: Patch | None = None

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_const(self) -> bool:
        return self.const is not None

    @property
    def quant(self) -> QuantType | None:
        """How real numbers are stored, if they are quantized."""
        if self.patch is not None:
            return self.patch.base.quant
        t = self.tensor
        if t is None or self.is_const or not isinstance(t.encoding, ScaleOffset):
            return None
        return QuantType(t.dtype, t.encoding)


Arg: TypeAlias = Value | Number | None


@dataclass(frozen=True)
class Result:
    """Shape and types of what the ATen node must give, from its metadata."""

    shape: Shape
    torch_dtype: torch.dtype

    @property
    def dtype(self) -> DType:
        return internal(self.torch_dtype)


def _moves(shape: Shape, p: Shape) -> bool:
    """Whether elements change their order when the axes do: axes of length one do not count."""
    moved = [i for i in p if shape[i] != 1]
    return moved != sorted(moved)


def _factors(a: Shape, b: Shape) -> list[tuple[int, int, int]] | None:
    """Lengths that make up the axes of both shapes of a tensor, with their axes in `a` and `b`.

    `None` if there are none: no axes of (4, 6) and (3, 8) begin at one element but the first.
    """
    left = [[n, i] for i, n in enumerate(a) if n != 1]
    right = [[n, i] for i, n in enumerate(b) if n != 1]
    found = []
    while left and right:
        n = min(left[0][0], right[0][0])
        found.append((n, left[0][1], right[0][1]))
        for axes in (left, right):
            length, rest = axes[0][0] // n, axes[0][0] % n
            if rest:
                return None
            axes[0][0] = length
            if length == 1:
                axes.pop(0)
    return found


def _outermost(a: Shape, b: Shape, dim: int) -> tuple[int, int] | None:
    """The axis of `a` of which axis `dim` of `b` is the outer part, and how long the inner one is.

    `None` if it is not, or if the shapes are equal.
    """
    factors = None if a == b else _factors(a, b)
    own = [k for k, f in enumerate(factors or ()) if f[2] == dim]
    if not factors or not own or len({factors[k][1] for k in own}) > 1:
        return None
    d = factors[own[0]][1]
    first = own[0] == 0 or factors[own[0] - 1][1] != d
    return (d, a[d] // b[dim]) if first else None


def _together(
    factors: Sequence[tuple[int, int, int]], order: Sequence[int], by: int, of: int
) -> list[int] | None:
    """The axes of one shape in the order that they have when those of the other are in `order`.

    Args:
        by, of: places in a factor of the axis that is ordered, and of the one that is asked for.

    Returns:
        `None` if they are torn apart.
    """
    places = [k for i in order for k, f in enumerate(factors) if f[by] == i]
    axes: list[int] = []
    for before, k in zip((-1, *places), places, strict=False):
        if not axes or axes[-1] != factors[k][of]:
            axes.append(factors[k][of])
        elif k != before + 1:
            return None
    return axes if len(axes) == len(set(axes)) else None


# Their parameters are an axis, or have a row for each.
_BY_AXIS = frozenset(("Concat", "Pad", "StridedSlice"))


def _is_pointwise(node: Node) -> bool:
    """Whether an output's place depends on the inputs' same place alone, broadcasting aside."""
    return node.type.startswith("ElementWise") or node.type in _POINTWISE


_POINTWISE = frozenset(
    ("Cast", "Convert", "Dequantize", "Elu", "Gelu", "HardSwish", "Quantize", "Relu", "ReluMinMax",
     "Sigmoid", "Tanh")
)  # fmt: skip


def u32(value: int) -> Scalar:
    return Scalar(DType.UINT32, int(value))


def i32(value: int) -> Scalar:
    return Scalar(DType.INT32, int(value))


def f32(value: float) -> Scalar:
    return Scalar(DType.FLOAT32, float(value))


def b8(value: bool) -> Scalar:
    return Scalar(DType.BOOL8, bool(value))


def qnn_shape(shape: Shape, most: int = MAX_RANK) -> Shape:
    """The shape in which QNN stores a value: it has no 0-d tensors, and at most `most` axes."""
    if len(shape) > most:
        return (math.prod(shape[:-3]), *shape[-3:])
    return shape or (1,)


def to_array(tensor: torch.Tensor, dtype: DType) -> Array:
    """The values of `tensor` as QNN stores them.

    Finite floats beyond fp16's range are clamped, not turned into infinities: a mask of -1e9 must
    stay a finite number, or a row that is masked whole gives NaN instead of a uniform softmax.
    """
    t = tensor.detach()
    if dtype is DType.FLOAT16:
        t = t.float() if t.dtype in (torch.float64, torch.bfloat16) else t
        if t.dtype is torch.float32 and t.numel():
            low, high = torch.aminmax(t)  # NaN if there is one; no copy of a large weight
            if not (low >= -FP16_MAX and high <= FP16_MAX):
                t = torch.where(torch.isfinite(t), t.clamp(-FP16_MAX, FP16_MAX), t)
        t = t.half()
    elif (
        dtype is DType.INT32
        and t.dtype is torch.int64
        and t.numel()
        and (int(t.max()) > 2**31 - 1 or int(t.min()) < -(2**31))
    ):
        raise Refused("a constant does not fit into int32, HTP's widest integer")
    return np.ascontiguousarray(t.contiguous().numpy().astype(NUMPY[dtype], copy=False)).reshape(
        qnn_shape(tuple(t.shape))
    )


class Builder:
    """Builds one `Graph`.

    `result` holds what the node that is being lowered must give; functions of the op table read
    their output's shape from there instead of computing it again.  `used` are the outputs that
    anybody reads, of a node that has several.
    """

    def __init__(self, name: str) -> None:
        self.graph = Graph(name)
        self.results: list[Result] = []
        self.used: set[int] = set()
        self.sole = False
        """Whether the node is the only one that reads its first operand."""
        self.dense = True
        """Whether all operands of the node have the strides of their shapes."""
        self.source = ""
        self._cons: dict[object, list[Value]] = {}
        self._statics: dict[object, Tensor] = {}
        self._views: dict[int, Value] = {}
        self._producers: dict[int, Node] = {}
        self._values: dict[int, Value] = {}
        self._names: dict[str, int] = {}
        self.wanted: QuantType | None = None
        """How the node's result is to be stored; see `ops.quantized`."""
        self.computed: set[int] = set()
        """Ids of the tensors that the node has computed, and not only moved, in integers."""
        self.worth_patching: dict[int, Callable[[int], bool]] = {}
        """Input tensor's id to: whether overwriting so many elements of it is better a `Patch`."""

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

    def input(self, name: str, shape: Shape, dtype: DType, quant: QuantType | None = None) -> Value:
        stored, encoding = quant or (dtype, None)
        t = Tensor(self.unique(name), stored, qnn_shape(shape), Kind.INPUT, encoding)
        return self._values.setdefault(id(self.add_tensor(t)), Value(shape, dtype, t))

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
        if value.tensor is None and value.patch is not None:
            value.tensor = self.tensor(value.patch.write())
        if value.tensor is None:
            assert value.const is not None
            make, dtype, shape = value.const.make, value.dtype, value.shape
            key = (value.const.key, dtype, shape)
            value.tensor = self.static(key, dtype, shape, None, lambda: to_array(make(), dtype))
            self._values[id(value.tensor)] = value
        return value.tensor

    def static(
        self,
        key: object,
        dtype: DType,
        shape: Shape,
        encoding: Encoding | None,
        make: Callable[[], Array],
    ) -> Tensor:
        """A static tensor of elements that `make` gives when they are written; one for each key."""
        if key not in self._statics:
            data = LazyData(lambda: make().reshape(qnn_shape(shape)))
            t = Tensor(self.unique("const"), dtype, qnn_shape(shape), Kind.STATIC, encoding, data)
            self._statics[key] = self.add_tensor(t)
        return self._statics[key]

    def derived(self, value: Value, what: str, fn: Callable[[torch.Tensor], torch.Tensor],
                shape: Shape, dtype: DType | None = None) -> Value:  # fmt: skip
        """A constant computed from a constant, still not made; `what` names the function."""
        assert value.const is not None
        make, base = value.const.make, value.const.key
        key: object = (base, what, shape)
        if isinstance(base, StorageKey) and dtype is None and what.startswith(_VIEWS):
            view = StorageKey.of(fn(make()))
            key = view if view.storage == base.storage else key
        steps = value.const.steps if what.startswith(_MOVES) else None
        steps = None if steps is None else steps.moved(fn)
        return Value(shape, dtype or value.dtype, const=Const(lambda: fn(make()), key, steps))

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
        if type != "Reshape":
            inputs = [self._exact(v) for v in inputs]
        if self.wanted is not None or any(v.quant for v in inputs):
            from .quantized import emit  # which builds on this module

            return emit(self, type, inputs, outputs, params or {})
        ins = [self.tensor(v) for v in inputs]
        return self.emit(type, ins, [(s, d, None) for s, d in outputs], params or {})

    def emit(
        self,
        type: str,
        ins: Sequence[Tensor],
        outputs: Sequence[tuple[Shape, DType, QuantType | None]],
        params: Mapping[str, Param],
    ) -> list[Value]:
        """`ops`, of tensors; with an encoding for each output that has one."""
        for shape in (*(t.shape for t in ins), *(s for s, _, _ in outputs)):
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
        outs = []
        for i, (shape, dtype, quant) in enumerate(outputs):
            stored, encoding = quant or (dtype, None)
            t = Tensor(f"{name}_out{i}", stored, qnn_shape(shape), encoding=encoding)
            outs.append(self.add_tensor(t))
        node = Node(name, type, list(ins), outs, dict(params), self.source)
        self.graph.nodes.append(node)
        values = [Value(s, d, t) for (s, d, _), t in zip(outputs, outs, strict=True)]
        for v, t in zip(values, outs, strict=True):
            self._producers[id(t)], self._values[id(t)] = node, v
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
            if x.dtype is DType.FLOAT16:  # up to QAIRT 2.49, -0.0 differs from 0.0
                x = self.elementwise("ElementWiseAbs", [x])
            return self.binary("ElementWiseNotEqual", x, self.value(0, x.dtype), dtype)
        return self.elementwise("Cast", [x], dtype)

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
        if x.patch is not None and (d := same_axis(x.shape, s, x.patch.dim)) is not None:

            def fn(v: Value) -> Value:
                return self.reshape(v, (*s[:d], v.numel // (x.numel // s[d]), *s[d + 1 :]))

            return x.patch.moved(d, fn)
        self.tensor(x)
        base = self.base(x)
        assert base.tensor is not None
        if qnn_shape(s) == base.tensor.shape:
            return Value(s, x.dtype, base.tensor)
        if len(s) > 4:  # only seen so: few of QNN's ops take five axes, and not all of them well
            return Value(s, x.dtype, base.tensor)
        y = self.op("Reshape", [base], s)
        self._views.setdefault(id(y.tensor), base)
        return Value(s, x.dtype, y.tensor)

    def _exact(self, x: Value) -> Value:
        """`x` in a tensor that has its axes, for an op that asks for five."""
        if x.rank > MAX_RANK:
            self.refuse(f"rank {x.rank} is above {MAX_RANK}, the highest of QNN's ops")
        if x.rank < MAX_RANK or x.is_const or self.tensor(x).shape == x.shape:
            return x
        y = self.op("Reshape", [x], x.shape)
        self._views.setdefault(id(y.tensor), self.base(x))
        return y

    def patches(self, x: Value, elements: int) -> bool:
        """Whether `x` with `elements` of it overwritten in rows should be a `Patch`."""
        worth = self.worth_patching.get(id(self.moved_from(x)))
        return worth is not None and worth(elements)

    def moved_from(self, x: Value) -> Tensor | None:
        """The tensor whose elements `x` has, in whatever shape and order; `None` if none yet."""
        tensor = x.tensor
        while tensor is not None and (node := self.producer(tensor)) is not None:
            if node.type not in ("Reshape", "Transpose"):
                break
            tensor = node.inputs[0]
        return tensor

    def producer(self, tensor: Tensor) -> Node | None:
        """The op that computes `tensor`; `None` for inputs and constants."""
        return self._producers.get(id(tensor))

    def value_of(self, tensor: Tensor) -> Value:
        """What an op's operand stands for: another op's result, an input, a constant."""
        dtype = DType.FLOAT16 if tensor.dtype.is_fixed else tensor.dtype
        return self._values.get(id(tensor)) or Value(tensor.shape, dtype, tensor)

    def base(self, x: Value) -> Value:
        """The value that `x` is only another shape of; `x` itself if there is none."""
        return self._views.get(id(x.tensor), x)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """`x` with its axes permuted; a permutation that meets its inverse costs nothing."""
        p = tuple(perm)
        if (patch := x.patch) is not None:
            return patch.moved(p.index(patch.dim), lambda v: self.transpose(v, p))
        if (y := self._pulled(x, p, {})) is not None:
            return y
        return self._transposed(x, p)

    def _transposed(self, x: Value, p: Shape) -> Value:
        """One Transpose of what `x` is a permutation of."""
        shape = tuple(x.shape[i] for i in p)
        if not _moves(x.shape, p):
            return self.reshape(x, shape)
        source, before = self._permutation(x)
        if source is not x:
            return self._transposed(source, tuple(before[i] for i in p))
        if (y := self._transposed_finer(x, p)) is not None:
            return self.reshape(y, shape)
        return self._permuted(x, p)

    def _permuted(self, x: Value, p: Shape) -> Value:
        """One Transpose of `x` as it is, or as many as there must be of at most five axes."""
        shape = tuple(x.shape[i] for i in p)
        if x.rank <= 4:
            return self._swapped(x, p)
        most = 4 if x.dtype is DType.INT32 else MAX_RANK  # axes that QNN's Transpose takes
        long = [i for i in p if x.shape[i] != 1]
        place = {i: k for k, i in enumerate(sorted(long))}
        runs: list[list[int]] = []  # axes that stay neighbours are one
        for i in long:
            if runs and place[i] == place[runs[-1][-1]] + 1:
                runs[-1].append(i)
            else:
                runs.append([i])
        order = sorted(runs)
        n = tuple(math.prod(x.shape[i] for i in run) for run in order)
        q = tuple(order.index(run) for run in runs)
        if len(n) > most:  # one of them comes to its place; those before it are there
            to = next(i for i, k in enumerate(q) if i != k)
            at = q[to]
            lengths = (math.prod(n[:to]), math.prod(n[to:at]), n[at], math.prod(n[at + 1 :]))
            x = self._swapped(self.reshape(x, lengths), (0, 2, 1, 3))
            n = (math.prod(n[:to]) * n[at], *n[to:at], *n[at + 1 :])
            q = (0, *(k - to + (k < at) for k in q[to + 1 :]))
        y = self.reshape(x, n)
        y = self._swapped(y, q) if len(n) <= most else self._permuted(y, q)
        return self.reshape(y, shape)

    def _swapped(self, x: Value, p: Shape) -> Value:
        """A Transpose that QNN has."""
        shape = tuple(x.shape[i] for i in p)
        return self.op("Transpose", [x], shape, params={"perm": self.param(p)})

    def _transposed_finer(self, x: Value, p: Shape) -> Value | None:
        """`_transposed` by the axes of what `x` is another shape of, if that is a permutation."""
        base = self._whole(x)
        source, perm = self.unpermuted(base)
        factors = None if source is base else _factors(base.shape, x.shape)
        if factors is None:
            return None
        y = self.reshape(self._swapped(source, perm), [n for n, _, _ in factors])
        return self._transposed(y, tuple(k for j in p for k, f in enumerate(factors) if f[2] == j))

    def unpermuted(self, x: Value) -> tuple[Value, Shape]:
        """A value and a permutation of it that are `x`, such that the value needs no Transpose.

        For ops that do as well in another order of axes, and give back less than they take.
        """
        same = tuple(range(x.rank))
        perm = self._layout(x, set())
        y = None if perm is None else self._pulled(x, tuple(perm.index(i) for i in same), {})
        return (x, same) if y is None or perm is None else (y, perm)

    def _layout(self, x: Value, seen: set[int]) -> Shape | None:
        """The permutation that a Transpose upstream of pointwise ops has done, if there is one."""
        node = self._producers.get(id(x.tensor))
        if node is None or id(node) in seen or node.outputs[0].shape != x.shape:
            return None
        seen.add(id(node))
        if node.type == "Transpose":
            return self._permutation(x)[1]
        if not _is_pointwise(node) and node.type not in _BY_AXIS:
            return None
        sources = [v for t in node.inputs if (v := self._values.get(id(t))) and v.rank == x.rank]
        return next((p for v in sources if (p := self._layout(v, seen)) is not None), None)

    def _permutation(self, x: Value) -> tuple[Value, Shape]:
        """The value and the permutation that `x` is made of, be it in another shape."""
        base = self._whole(x)
        node = self._producers.get(id(base.tensor))
        if node is None or node.type != "Transpose":
            return x, tuple(range(x.rank))
        data = node.params["perm"]
        assert isinstance(data, Tensor)
        assert isinstance(data.data, np.ndarray)
        source, perm = self._values[id(node.inputs[0])], tuple(int(i) for i in data.data)
        if x.shape == base.shape:
            return source, perm
        factors = _factors(base.shape, x.shape)
        ways = [perm.index(i) for i in range(source.rank)]
        order = None if factors is None else _together(factors, ways, 1, 2)
        if order is None:
            return x, tuple(range(x.rank))
        order = [i for i, n in enumerate(x.shape) if n == 1] + order
        source = self.reshape(source, [x.shape[i] for i in order])
        return source, tuple(order.index(i) for i in range(x.rank))

    def _is_transposed(self, x: Value) -> bool:
        node = self._producers.get(id(self._whole(x).tensor))
        return node is not None and node.type == "Transpose"

    def _whole(self, x: Value) -> Value:
        """What `x` is seen from: a tensor in its own shape."""
        base = self.base(x)
        return self._values.get(id(base.tensor), base)

    def transposed_free(self, x: Value, p: Shape) -> Value | None:
        """`transpose(x, p)` if that needs no op but a change of shape."""
        shape = tuple(x.shape[i] for i in p)
        if x.is_const:
            return self.derived(x, f"permute {p}", lambda t: t.permute(p), shape)
        if not _moves(x.shape, p):
            return self.reshape(x, shape)
        source, before = self._permutation(x)
        return None if source is x else self.transposed_free(source, tuple(before[i] for i in p))

    def _pulled(self, x: Value, p: Shape, seen: dict[object, Value | None]) -> Value | None:
        """`transpose(x, p)` where `p` cancels upstream of pointwise ops, for one operand at least.

        Two convolutions with an activation or a residual sum between them compute in their own
        layout that way.  The pointwise ops are emitted once more; if nobody needs their first form
        any longer, it is dropped in the end.
        """
        key = (id(x.tensor), x.shape, p)
        if key in seen:
            return seen[key]
        seen[key] = None  # not yet
        shape, moves = tuple(x.shape[i] for i in p), _moves(x.shape, p)
        # Where no element moves, a Reshape would do; but nothing is cheaper.
        if moves or x.is_const or qnn_shape(shape) == self.tensor(self.base(x)).shape:
            seen[key] = self.transposed_free(x, p)
        if seen[key] is not None:
            return seen[key]
        if self._whole(x).shape != x.shape:
            seen[key] = self._pulled_view(x, p, shape, seen)
            return seen[key]
        node = self._producers.get(id(x.tensor))
        if node is None or len(node.outputs) > 1:
            return None
        if (params := self._permuted_params(node, p)) is None:
            return None
        ins: list[Value] = []
        cancelled, left = False, 0
        for t in node.inputs:
            v = self.value_of(t) if math.prod(t.shape) == 1 else self._values.get(id(t))
            if v is None or (v.numel > 1 and (v.shape != t.shape or v.rank != len(p))):
                return None
            if v.numel > 1:  # a single number broadcasts in any layout
                y = self.transposed_free(v, p) if v.is_const else self._pulled(v, p, seen)
                counts = not moves or _moves(v.shape, p)
                if y is None and self._is_transposed(v) and v.numel <= 2 * x.numel:
                    # What one op did another does now, for all that read it if all goes well.
                    y, cancelled = self._transposed(v, p), True
                elif y is None:
                    y, left = self._transposed(v, p), left + v.numel * counts
                elif not v.is_const:
                    cancelled = cancelled or counts
                v = y
            ins.append(v)
        if left > x.numel or (left and not cancelled):
            return None
        out = self.value_of(node.outputs[0])
        tensors = [
            self.tensor(v) for v in (self._unlike_padding(ins) if node.type == "Concat" else ins)
        ]
        (y,) = self.emit(node.type, tensors, [(shape, out.dtype, out.quant)], params)
        if id(x.tensor) in self.computed:
            self.computed.add(id(y.tensor))
        seen[key] = y
        return y

    def _permuted_params(self, node: Node, p: Shape) -> dict[str, Param] | None:
        """The parameters of an op that does axis by axis what it does, for axes permuted by `p`."""
        params = dict(node.params)
        for name, param in params.items():
            if node.type not in _BY_AXIS:
                break
            if name == "axis":
                assert isinstance(param, Scalar)
                params[name] = u32(p.index(int(param.value)))
            elif isinstance(param, Tensor):  # a row for each axis
                assert isinstance(param.data, np.ndarray)
                params[name] = self.param(param.data[list(p)], param.dtype)
        return params if _is_pointwise(node) or node.type in _BY_AXIS else None

    def _pulled_view(
        self, x: Value, p: Shape, shape: Shape, seen: dict[object, Value | None]
    ) -> Value | None:
        """`_pulled` where `x` is another shape of its base, whose axes stay whole."""
        base = self._whole(x)
        factors = _factors(base.shape, x.shape)
        order = None if factors is None else _together(factors, p, 2, 1)
        if order is None:
            return None
        ones = [i for i, n in enumerate(base.shape) if n == 1]
        y = self._pulled(base, (*ones, *order), seen)
        return None if y is None else self.reshape(y, shape)

    def numerically(self, x: Value, fn: Callable[[Value], Value]) -> Value:
        """`fn(x)` for a `fn` that only moves elements, where QNN's op does not move bools."""
        if x.dtype is not DType.BOOL8 or x.is_const:
            return fn(x)
        return self.cast(fn(self.cast(x, DType.FLOAT16)), DType.BOOL8)

    def slice(self, x: Value, dim: int, start: int, stop: int, step: int = 1) -> Value:
        """`x[..., start:stop:step, ...]` along `dim`, bounds already within the shape."""
        n = x.shape[dim]
        if (start, stop, step) == (0, n, 1):
            return x
        length = max(0, -(-(stop - start) // step))
        shape = (*x.shape[:dim], length, *x.shape[dim + 1 :])
        if x.patch is not None and x.patch.dim != dim:
            return x.patch.moved(x.patch.dim, lambda v: self.slice(v, dim, start, stop, step))
        if x.is_const:
            index = (slice(None),) * dim + (slice(start, stop, step),)
            return self.derived(x, f"slice {dim} {start} {stop} {step}", lambda t: t[index], shape)
        source, perm = self._permutation(x)
        if source is not x:  # the change of layout may cancel with the next one
            return self.transpose(self.slice(source, perm[dim], start, stop, step), perm)
        base = self._whole(x)
        place = _outermost(base.shape, x.shape, dim) if base.rank <= 4 else None
        if place is not None and (step == 1 or place[1] == 1):
            # Without a Reshape before it; with steps, HTP is wrong behind some.
            d, inner = place
            return self.reshape(self.slice(base, d, start * inner, stop * inner, step), shape)
        if x.rank > 4:
            y, d = self.fewer_axes(x, dim)
            return self.reshape(self.slice(y, d, start, stop, step), shape)
        if x.dtype is DType.INT32 and step != 1:  # QAIRT 2.51 does not compile it as a slice
            return self.gather(x, dim, self.const(torch.arange(start, stop, step)))
        ranges = [[0, s, 1] for s in x.shape]
        ranges[dim] = [start, stop, step]
        return self.strided(x, shape, ranges)

    def around(self, x: Value, dim: int) -> Value:
        """`x` with one axis before axis `dim` and one behind it."""
        before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
        return self.reshape(x, (before, x.shape[dim], after))

    def fewer_axes(self, x: Value, dim: int) -> tuple[Value, int]:
        """`x` with at most four axes, one of them axis `dim`, and which one."""
        rest = (*x.shape[:dim], 1, *x.shape[dim + 1 :])
        axes = merged_axes(x.shape, rest, most=4)
        at = next(i for i, group in enumerate(axes) if dim in group)
        if len(axes[at]) > 1:  # of length one, like its neighbour
            return self.around(x, dim), 1
        return self.reshape(x, [math.prod(x.shape[i] for i in group) for group in axes]), at

    def strided(self, x: Value, shape: Shape, ranges: Sequence[Sequence[int]]) -> Value:
        """QNN's StridedSlice: `ranges` are start, stop and step of each axis; -1 stops below 0."""
        params = {"ranges": self.param(ranges, DType.INT32)}
        return self.numerically(x, lambda v: self.op("StridedSlice", [v], shape, params=params))

    def gather(self, x: Value, dim: int, index: Value) -> Value:
        """The places `index` (INT32, of any shape, none negative) of `x` along `dim`."""
        shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
        if index.rank != 1 and (dim or not index.rank or len(shape) >= MAX_RANK):
            # QNN gathers wrongly, or not at all, at some ranks of the two.
            flat = self.gather(x, dim, self.reshape(index, (index.numel,)))
            return self.reshape(flat, shape)
        before, after = math.prod(x.shape[:dim]), math.prod(x.shape[dim + 1 :])
        if x.dtype is DType.INT32 and after in (2, 4, 8) and index.numel >= 32:
            # All QAIRT versions fetch wrong rows of 8, 16 and 32 bytes, by 32 indices or more.
            wide = self.tile(self.around(x, dim), (1, 1, 16 // after))
            y = self.gather(wide, 1, self.reshape(index, (index.numel,)))
            return self.reshape(self.slice(y, 2, 0, after), shape)
        if x.rank > 4 or (before > 1 and dim == x.rank - 2 and not index.is_const):
            # All QAIRT versions fetch rows by an index that is an input of the graph without regard
            # to the axes before them, if only one axis follows.
            x = self.reshape(x, (before, x.shape[dim], after, 1))
            return self.reshape(self.gather(x, 1, index), shape)
        params = {"axis": i32(dim)}
        return self.numerically(x, lambda v: self.op("Gather", [v, index], shape, params=params))

    def take(self, x: Value, dim: int, places: Sequence[int]) -> Value:
        """The places `places` of `x` along `dim`: a slice where they are evenly spaced."""
        steps = {after - before for before, after in itertools.pairwise(places)} or {1}
        if len(steps) == 1 and (step := steps.pop()) > 0:
            return self.slice(x, dim, places[0], places[-1] + 1, step)
        if x.is_const:
            shape = (*x.shape[:dim], len(places), *x.shape[dim + 1 :])
            at = torch.tensor(places)
            return self.derived(x, f"take {dim} {places}", lambda t: t.index_select(dim, at), shape)
        return self.gather(x, dim, self.const(torch.tensor(places)))

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
        if xs[0].dtype is DType.BOOL8 and any(x.is_const for x in xs):
            # All QAIRT versions pad with False for a constant that is True throughout.
            y = self.concat([self.cast(x, DType.FLOAT16) for x in xs], dim)
            return self.cast(y, DType.BOOL8)
        if len(shape) > 4:
            return self.reshape(self.concat([self.around(x, dim) for x in xs], 1), shape)
        xs = self._unlike_padding(xs)
        return self.op("Concat", xs, shape, params={"axis": u32(dim)})

    def _unlike_padding(self, xs: Sequence[Value]) -> Sequence[Value]:
        """Operands of a Concat, constants in disguise if they are beside a slice.

        HTP takes a constant of one value for padding, and padding of a slice for a larger slice:
        the result holds what stands beside the slice instead of the constant.
        """
        producers = [self.producer(x.tensor) for x in xs if x.tensor is not None]
        sliced = any(n is not None and n.type in ("StridedSlice", "Gather") for n in producers)
        if not sliced or not any(x.is_const for x in xs):
            return xs
        some = next(x for x in xs if not x.is_const)
        one = self.strided(some, (1,) * some.rank, [[0, 1, 1]] * some.rank)
        never = self.binary("ElementWiseLess", one, one, DType.BOOL8)

        def computed(x: Value) -> Value:
            x = replace(x, narrow=None)  # QAIRT 2.47 selects zeros instead of a single integer
            other = self.derived(x, "plus one", lambda t: t + 1, x.shape)
            return self.elementwise("ElementWiseSelect", [never, other, x], x.dtype)

        return [computed(x) if x.is_const else x for x in xs]

    def align(self, xs: Sequence[Value]) -> list[Value]:
        """Gives all values one rank, by leading axes of length one, so that they broadcast."""
        rank = max(x.rank for x in xs)
        return [self.reshape(x, (1,) * (rank - x.rank) + x.shape) for x in xs]

    def expand(self, x: Value, shape: Sequence[int]) -> Value:
        """`x` broadcast to `shape`."""
        s = tuple(shape)
        if s == x.shape:
            return x
        if x.patch is not None and x.shape[(d := x.patch.dim)] == s[(e := d + len(s) - x.rank)]:
            return x.patch.moved(e, lambda v: self.expand(v, (*s[:e], v.shape[d], *s[e + 1 :])))
        if x.is_const:
            y = self.derived(x, "expand", lambda t: t.expand(s), s)
        else:
            aligned = self.reshape(x, (1,) * (len(s) - x.rank) + x.shape)
            times = [1 if a == n else n for a, n in zip(aligned.shape, s, strict=True)]
            y = self.tile(aligned, times)
        return Value(s, y.dtype, y.tensor, y.const, narrow=x.narrow or x)

    def tile(self, x: Value, times: Sequence[int]) -> Value:
        """`x` repeated `times` along each axis."""
        shape = tuple(n * k for n, k in zip(x.shape, times, strict=True))
        if shape == x.shape:
            return x
        if x.is_const:
            return self.derived(x, f"tile {times}", lambda t: t.repeat(tuple(times)), shape)
        spread = all(k == 1 or n == 1 for n, k in zip(x.shape, times, strict=True))
        # QNN tiles up to rank 4 (floats of rank 5, too, but dies on some in QAIRT 2.47): axes that
        # are repeated as one are one, and others are repeated one after another.
        merged: list[list[int]] = []
        for n, k in zip(x.shape, times, strict=True):
            if merged and (k == 1 or merged[-1][0] == 1):
                merged[-1] = [merged[-1][0] * n, merged[-1][1] * k]
            else:
                merged.append([n, k])
        if x.rank <= 4:
            y = self.op("Tile", [x], shape, params={"multiples": self.param(list(times))})
        else:
            y = self.reshape(x, [n for n, _ in merged])
            if len(merged) > 4:
                d = len(merged) - 1 if merged[-1][1] > 1 else len(merged) - 2
                y = self.tile(self.around(y, d), (1, merged[d][1], 1))
                merged[d] = [merged[d][0] * merged[d][1], 1]
                y = self.reshape(y, [n for n, _ in merged])
            y = self.reshape(self.tile(y, [k for _, k in merged]), shape)
        return Value(shape, x.dtype, y.tensor, narrow=x) if spread else y

    def binary(self, type: str, a: Value, b: Value, dtype: DType | None = None) -> Value:
        """An elementwise op of two values of one type, with broadcasting."""
        return self.elementwise(type, [a, b], dtype)

    def elementwise(
        self,
        type: str,
        values: Sequence[Value],
        dtype: DType | None = None,
        params: Mapping[str, Param] | None = None,
    ) -> Value:
        """An op of values that are broadcast to one shape; the type defaults to the first's."""
        shape = broadcast(*(v.shape for v in values))
        # What is only repeated is computed once.  It also keeps Tile away from these ops: QNN's
        # compiler drops a Tile of a last axis of one before a product, and reads past the end.
        xs = [v.narrow or v for v in values]
        small = broadcast(*(x.shape for x in xs))
        if small != shape:
            return self.expand(self.elementwise(type, xs, dtype, params), shape)
        xs = self.align(xs)
        if len(shape) <= 4:  # what all elementwise ops of QNN take
            return self.op(type, xs, shape, dtype, params)
        axes = merged_axes(shape, *(x.shape for x in xs), most=4)
        if len(axes) > 4:
            xs = [x if x.numel == 1 else self.expand(x, shape) for x in xs]
            axes = merged_axes(shape, *(x.shape for x in xs), most=4)

        def flat(s: Shape) -> Shape:
            return tuple(math.prod(s[i] for i in group) for group in axes)

        y = self.op(type, [self.reshape(x, flat(x.shape)) for x in xs], flat(shape), dtype, params)
        return self.reshape(y, shape)


def same_axis(shape: Shape, other: Shape, dim: int) -> int | None:
    """The axis of `other`, a reshape of `shape`, that is axis `dim` of `shape`; `None` if none."""
    before, length = math.prod(shape[:dim]), shape[dim]
    for d, n in enumerate(other):
        if math.prod(other[:d]) == before and n == length:
            return d
    return None


def broadcast(*shapes: Shape) -> Shape:
    """The shape that `shapes` broadcast to."""
    return tuple(torch.broadcast_shapes(*shapes))


def merged_axes(*shapes: Shape, most: int = 0) -> list[list[int]]:
    """Axes of equally long shapes in groups that may become one axis each, of all the shapes.

    Neighbours form a group when each shape is long in both of them or one in both.  Where there are
    fewer groups than `most`, the last axes are left alone.
    """
    groups: list[list[int]] = []
    kinds: list[set[int]] = []
    for i, lengths in enumerate(zip(*shapes, strict=True)):
        ones = {k for k, n in enumerate(lengths) if n == 1}
        if len(ones) == len(shapes) and groups:
            groups[-1].append(i)
        elif groups and (kinds[-1] == ones or len(kinds[-1]) == len(shapes)):
            groups[-1].append(i)
            kinds[-1] = ones
        else:
            groups.append([i])
            kinds.append(ones)
    while len(groups) < most and any(len(group) > 1 for group in groups):
        i = max(i for i, group in enumerate(groups) if len(group) > 1)
        groups[i : i + 1] = [groups[i][:-1], groups[i][-1:]]
    return groups
