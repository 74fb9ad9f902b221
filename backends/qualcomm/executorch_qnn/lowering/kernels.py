# SPDX-License-Identifier: BSD-3-Clause
"""Ops that ExecuTorch's runtime has no kernel for: found, opened, or refused at lowering."""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from executorch.exir.operator.convert import _get_overload_schema, to_out_variant
from torch import Tensor
from torch._decomp import decompositions
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torchgen.model import SchemaKind

from ..aliasing.updates import refresh_outputs
from ..errors import LoweringError
from ..ops.registry import aten_op
from ..partition import Plan
from ..source import called_in
from .fold import constant

aten = torch.ops.aten
_FUNCTIONALISED = (
    torch.ops.higher_order.auto_functionalized,
    torch.ops.higher_order.auto_functionalized_v2,
)
_log = logging.getLogger(__name__)


@functools.cache
def _kernels() -> frozenset[str]:
    """Names of the kernels that the installed runtime has; of a device's we know nothing."""
    from executorch.runtime import Runtime

    return frozenset(Runtime.get().operator_registry.operator_names)


@functools.cache
def has_kernel(op: OpOverload) -> bool:
    """Whether the runtime can execute `op`; True where ExecuTorch does not say what it executes."""
    if any(r.alias_info for r in op._schema.returns):
        return True  # a view: ExecuTorch has another name for it, and a kernel
    try:
        schema = to_out_variant(op)[0]._schema
    except Exception:
        return True
    return f"{schema.name}.{schema.overload_name}".rstrip(".") in _kernels()


def can_open(op: OpOverload) -> bool:
    """Whether torch knows what an op that has no kernel consists of."""
    return op in EXTRA or op in torch._decomp.decomposition_table


def check_kernels(method: str, ep: ExportedProgram, plan: Plan, strict: bool) -> None:
    """Refuses a program that no runtime of this version could load.

    A custom op's kernel is the user's business: the report says that one is needed.

    Args:
        ep: the delegated edge program.
        strict: False only warns, for a runtime that may have other kernels than this one.

    Raises:
        LoweringError: an ATen op on the CPU has no kernel; it names node, op and source line.
    """
    custom = set()
    for node in ep.graph.nodes:
        op = aten_op(node.target)
        if node.op != "call_function" or op is None or has_kernel(op):
            continue
        if op.namespace == "aten":
            where = called_in(node)
            problem = (
                f"method {method!r}: node {node.name} ({op}) runs on the CPU, and ExecuTorch's "
                f"runtime has no kernel for it{where}. Write it with other ops, or register it as "
                "a custom op and link a kernel of yours into the runtime"
            )
            if strict:
                raise LoweringError(problem)
            _log.warning(problem)
            continue
        custom.add(str(op))
    plan.cpu_ops[:] = [
        dataclasses.replace(o, reason=f"{o.reason}; link its kernel into the runtime")
        if o.op in custom
        else o
        for o in plan.cpu_ops
    ]


def right_remainders(ep: ExportedProgram) -> bool:
    """Gives integer remainders on the CPU the sign of the divisor, as in PyTorch.

    ExecuTorch's kernel has C's `%`, whose results have the sign of the dividend.

    Returns:
        Whether there were any.
    """
    changed = False
    for node in list(ep.graph.nodes):
        op = aten_op(node.target)
        if op not in (aten.remainder.Scalar, aten.remainder.Tensor, aten.remainder.Scalar_Tensor):
            continue
        value, divisor = node.meta["val"], node.args[1]
        if value.is_floating_point() or not value.dtype.is_signed:
            continue
        changed = True
        users = list(node.users)
        with ep.graph.inserting_before(node.next):
            if isinstance(divisor, torch.fx.Node):
                below = _call(aten.lt.Scalar, node, 0), _call(aten.lt.Scalar, divisor, 0)
                differ = _call(aten.logical_xor.default, *below)
                wrong = _call(aten.logical_and.default, differ, _call(aten.ne.Scalar, node, 0))
            else:
                wrong = _call(aten.lt.Scalar if divisor > 0 else aten.gt.Scalar, node, 0)
            right = _call(aten.where.self, wrong, _call(aten.add.Tensor, node, divisor), node)
        for user in users:
            user.replace_input_with(node, right)
    refresh_outputs(ep)
    ep.graph_module.recompile()
    return changed


def dense_nonzeros(ep: ExportedProgram) -> bool:
    """Makes the places that `nonzero` finds on the CPU an ordinary tensor, one row per place.

    The program takes them for columns, as PyTorch lays them out, but ExecuTorch's kernel writes
    rows.  Of a flat tensor there is one column, which is the same either way.

    Returns:
        Whether there were any.

    Raises:
        LoweringError: the tensor's own shape is known at run time only.
    """
    nodes = [n for n in ep.graph.nodes if aten_op(n.target) is aten.nonzero.default]
    for node in nodes:
        (x,) = node.all_input_nodes
        shape = x.meta["val"].shape
        if not shape:
            continue  # there is no column
        if len(shape) > 1 and not all(isinstance(n, int) for n in shape):
            raise LoweringError(
                f"node {node.name}: ExecuTorch gives the places of what is not zero in a tensor of "
                f"a shape that is not fixed in another order than PyTorch{called_in(node)}. "
                "Flatten the tensor first"
            )
        with ep.graph.inserting_before(node):
            flat = x if len(shape) == 1 else _call(aten.view.default, x, [math.prod(shape)])
            found = _call(aten.nonzero.default, flat)
            places = _call(aten.clone.default, found, memory_format=torch.contiguous_format)
        if len(shape) > 1:
            steps = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
            step = constant(ep, f"c_{node.name}_steps", torch.tensor(steps))
            size = constant(ep, f"c_{node.name}_sizes", torch.tensor(shape))
            with ep.graph.inserting_before(node):
                rows = _call(aten.div.Tensor_mode, places, step, rounding_mode="floor")
                places = _call(aten.remainder.Tensor, rows, size)
        node.replace_all_uses_with(places, propagate_meta=False)
        ep.graph.erase_node(node)
    refresh_outputs(ep)
    ep.graph_module.recompile()
    return bool(nodes)


def _call(op: OpOverload, *args: Any, **kwargs: Any) -> torch.fx.Node:
    """A call at the graph's insertion point, with the provenance of its first operand."""
    first: torch.fx.Node = args[0]
    call = first.graph.call_function(op, args, kwargs)
    values = torch.fx.map_arg(args, lambda n: n.meta["val"])
    call.meta = {**first.meta, "val": op(*values, **kwargs)}
    return call


def check_written_by_custom_ops(method: str, ep: ExportedProgram) -> None:
    """Refuses custom ops that write to their arguments in a way the runtime has no call for.

    Raises:
        LoweringError: it names node, op and source line.
    """
    for node in ep.graph.nodes:
        if node.target not in _FUNCTIONALISED:
            continue
        op = node.args[0]
        schema = _get_overload_schema(op)
        if schema is not None and schema.kind() is SchemaKind.inplace:
            continue
        try:
            to_out_variant(op)
        except Exception as e:
            raise LoweringError(
                f"method {method!r}: node {node.name}: the custom op {op} writes to its arguments, "
                f"and has no out variant for ExecuTorch's runtime to call{called_in(node)}. "
                "Return the new value instead (`op(Tensor x) -> Tensor`, with an `op.out`) and "
                "copy it into the buffer in the model"
            ) from e


def check_custom_views(ep: ExportedProgram) -> None:
    """Refuses custom ops that return views, which the edge dialect has no form of.

    Raises:
        LoweringError: it names node, op and source line.
    """
    for node in ep.graph.nodes:
        op = node.target
        if node.op != "call_function" or not isinstance(op, OpOverload) or not op.is_view:
            continue
        name, overload = op._schema.name.split("::")[1], op._schema.overload_name or "default"
        copies = getattr(getattr(torch.ops, op.namespace), f"{name}_copy", None)
        if not hasattr(copies, overload):
            copy = f"{name}_copy"
            raise LoweringError(
                f"node {node.name}: {op} returns a view of its argument, and there is no {copy}"
                f"{called_in(node)}. Register {op.namespace}::{copy}, or return a new tensor"
            )


# The complementary error function of Numerical Recipes in C (Press et al., 2nd edition, section
# 6.2, `erfcc`): a Chebyshev fit in t = 1 / (1 + z / 2), fractional error below 1.2e-7 everywhere.
_ERFCC = (
    -1.26551223,
    1.00002368,
    0.37409196,
    0.09678418,
    -0.18628806,
    0.27886807,
    -1.13520398,
    1.48851587,
    -0.82215223,
    0.17087277,
)


def _erfcx(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x), in core ops; the fit with `_ERFCC` for x >= 0, and its mirror for x < 0."""
    x = x if x.is_floating_point() else x.to(torch.float32)
    z = x.abs()
    t = 1.0 / (1.0 + 0.5 * z)
    fit = torch.full_like(t, _ERFCC[-1])
    for c in _ERFCC[-2::-1]:
        fit = fit * t + c
    y = t * fit.exp()
    return torch.where(x < 0, 2.0 * (x * x).exp() - y, y)


def _lstm(
    x: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Torch's own decomposition, but never to MKL-DNN's op, for which there is no kernel."""
    projected = hidden[0].shape[2] != hidden[1].shape[2]
    weights = decompositions.gather_params(params, biases, projected)
    states = list(zip(*hidden, strict=True))
    out, last = decompositions._rnn_helper(
        x,
        states,
        weights,
        biases,
        layers,
        dropout,
        train,
        bidirectional,
        batch_first,
        decompositions.one_layer_lstm,
    )
    first, second = zip(*last, strict=True)
    return out, torch.stack(first), torch.stack(second)


EXTRA: dict[OpOverload, Callable[..., Any]] = {
    aten.special_erfcx.default: _erfcx,
    aten.lstm.input: _lstm,
}
"""Decompositions that torch does not have, or not in ops that ExecuTorch has kernels for."""
