# SPDX-License-Identifier: BSD-3-Clause
"""The op table: which ATen op becomes which QNN ops.

A row is a function of a few lines, filed by family::

    @lowers(aten.neg.default)
    def neg(b: Builder, x: Value) -> Value:
        return b.op("ElementWiseNeg", [x])

Arguments come in the order of the ATen schema with defaults filled in: tensors as `Value`,
everything else as it stands in the graph.  The function returns one `Value` per output (`None` will
do for one that nobody reads), or raises `Refused` with a reason; the node then stays on the CPU and
the reason stands in the report.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ..compile.ir import DType, QuantType
from .builder import Builder, Refused, Result, Value
from .cpu import why_on_cpu
from .quantized import dequantize, is_dequantize, is_quantize, requantize, type_of

Lowered: TypeAlias = Value | Sequence[Value | None]
Rule: TypeAlias = Callable[..., Lowered]
F = TypeVar("F", bound=Rule)


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        keep: the op is composite and is lowered whole: it must not be decomposed first.
        family: the module that it is filed in.
    """

    rule: Rule
    keep: bool
    family: str


TABLE: dict[OpOverload, Row] = {}


def lowers(*targets: OpOverload, keep: bool = False) -> Callable[[F], F]:
    """Files a function as the lowering of `targets`; with `keep`, they are kept whole."""

    def add(rule: F) -> F:
        for target in targets:
            if target in TABLE:
                raise ValueError(f"{target} has two rows in the op table")
            TABLE[target] = Row(rule, keep, rule.__module__.rpartition(".")[2])
        return rule

    return add


_IN_INTEGERS: dict[OpOverload, Rule] = {}


def computes_integers(*targets: OpOverload) -> Callable[[F], F]:
    """Files a function as the lowering of `targets` in integers, instead of the op table's own."""

    def add(rule: F) -> F:
        _IN_INTEGERS.update(dict.fromkeys(targets, rule))
        return rule

    return add


@functools.cache
def in_integers() -> dict[OpOverload, Rule]:
    """The rules that differ in integers; see `ops.quantized`."""
    from . import integers  # noqa: F401

    return _IN_INTEGERS


@functools.cache
def table() -> dict[OpOverload, Row]:
    """The whole table, every family loaded."""
    from . import (  # noqa: F401
        bits,
        conv,
        elementwise,
        functions,
        index,
        layout,
        matmul,
        norm,
        order,
        padding,
        pool,
        recurrent,
        reduction,
        resize,
        segments,
    )

    return TABLE


def aten_op(target: Any) -> OpOverload | None:
    """The ATen overload behind a node's target, whether the graph is ATen or edge dialect."""
    if isinstance(target, OpOverload):
        return target
    op = getattr(target, "_op", None)  # an edge op wraps an ATen one
    return op if isinstance(op, OpOverload) else None


_FIXED = (
    "QNN graphs are static: export with fixed sizes, one method for each, and use masks where a "
    "size depends on values"
)

# What ExecuTorch's edge dialect has for two ATen ops: the same values in a stated memory format.
_EDGE_TWINS = {
    "dim_order_ops::_to_dim_order_copy": torch.ops.aten._to_copy.default,
    "dim_order_ops::_clone_dim_order": torch.ops.aten.clone.default,
}


def row_of(op: OpOverload) -> Row | None:
    """The row of an op, of the ATen or the edge dialect."""
    return table().get(_EDGE_TWINS.get(op._schema.name, op))


def find_row(node: torch.fx.Node) -> tuple[OpOverload, Row]:
    """A node's op and its row.

    Raises:
        Refused: there is none.
    """
    op = aten_op(node.target)
    row = None if op is None else row_of(op)
    if op is None or row is None:
        raise Refused(why_on_cpu(op or node.target))
    return op, row


def metadata(node: torch.fx.Node) -> list[Result]:
    """Shapes and types of a node's outputs.

    Raises:
        Refused: an output is not a tensor of static shape.
    """
    val = node.meta.get("val")
    results = []
    for v in val if isinstance(val, (list, tuple)) else [val]:
        if not isinstance(v, torch.Tensor):
            raise Refused(f"{node.name} gives {type(v).__name__}, not a tensor")
        if any(not isinstance(s, int) for s in v.shape):
            shape = ", ".join(map(str, v.shape))
            raise Refused(f"{node.name} is of the dynamic shape [{shape}]; {_FIXED}")
        results.append(Result(tuple(int(s) for s in v.shape), v.dtype))
    return results


def _is_dense(node: torch.fx.Node) -> bool:
    """Whether a value's strides are those of its shape."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_contiguous()


def read_outputs(node: torch.fx.Node) -> set[int]:
    """The outputs that anybody reads: the others may be of any type, or empty."""
    if not isinstance(node.meta.get("val"), (list, tuple)):
        return {0}
    return {int(u.args[1]) for u in node.users if is_getitem(u)}  # type: ignore[arg-type]


class Integers(NamedTuple):
    """That a node is computed in integers, and how its result is to be stored."""

    wanted: QuantType | None


def lower_node(
    b: Builder,
    node: torch.fx.Node,
    env: Callable[[torch.fx.Node], Any],
    integers: Integers | None = None,
) -> list[Value | None]:
    """Emits `node` into `b` and returns its values, one per output; `None` if nobody reads one.

    Args:
        env: gives the `Value` (or list of values) of a node that was emitted before.
        integers: see `ops.quantized`; None computes in fp16.

    Raises:
        Refused: the op is not in the table, or not in this form.
    """
    b.wanted, b.computed, b.source = None, set(), node.name
    if is_quantize(node) or is_dequantize(node):
        return [_quantized_node(b, node, env)]
    op, row = find_row(node)
    b.results = metadata(node)
    b.sole = any(len(n.users) == 1 for n in node.all_input_nodes[:1])
    b.used = read_outputs(node)
    b.dense = all(_is_dense(n) for n in node.all_input_nodes)
    for i in b.used:
        b.results[i].dtype  # noqa: B018 - refuses types that HTP does not have
    rule = row.rule
    if integers is not None:
        rule, b.wanted = in_integers().get(op, rule), integers.wanted
    else:
        reals, env = (
            env,
            lambda n: pytree.tree_map_only(Value, functools.partial(dequantize, b), reals(n)),
        )
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env)
    values = rule(b, *_bind(op, args, kwargs))
    b.wanted = None
    out: list[Value | None] = [values] if isinstance(values, Value) else list(values)
    for i, (v, r) in enumerate(zip(out, b.results, strict=True)):
        if i in b.used and (v is None or v.shape != r.shape or v.dtype is not r.dtype):
            raise AssertionError(
                f"the lowering of {op} gives {v and f'{v.dtype.name}{list(v.shape)}'}, "
                f"the graph says {r.dtype.name}{list(r.shape)}"
            )
    return out


def _quantized_node(b: Builder, node: torch.fx.Node, env: Callable[[torch.fx.Node], Any]) -> Value:
    """A node of PT2E that changes how reals are stored, or reads them as they are."""
    kind, x = type_of(node), env(node.args[0])  # type: ignore[arg-type]
    if kind is None:
        b.refuse(
            "HTP has no such quantized type: 8 or 16 bits, all of them used, are what it takes"
        )
    if is_quantize(node):
        return requantize(b, b.cast(x, DType.FLOAT16), kind)
    if x.quant != kind:
        b.refuse("it reads integers in another encoding than they were written in")
    return x  # type: ignore[no-any-return]


def _bind(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """All arguments in schema order, defaults filled in."""
    bound: list[Any] = []
    for i, arg in enumerate(op._schema.arguments):
        if i < len(args):
            bound.append(args[i])
        elif arg.name in kwargs:
            bound.append(kwargs[arg.name])
        else:
            bound.append(arg.default_value)
    return bound


def is_getitem(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem
