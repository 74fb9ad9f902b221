# SPDX-License-Identifier: BSD-3-Clause
"""What is known when a model is lowered: constants, and tensors without elements."""

from __future__ import annotations

from collections.abc import Container

import torch
from executorch.backends.transforms.utils import create_constant_placeholder
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..aliasing.updates import refresh_outputs
from ..compile.build import Environment, constant_nodes, constant_tensors
from ..ops.builder import Builder
from ..ops.registry import aten_op

_LIMIT = 1 << 20


def fold_constants(ep: ExportedProgram, states: Container[str]) -> set[str]:
    """Replaces nodes outside of delegates that compute constants by their values.

    ExecuTorch would compute them again in each call.

    Args:
        states: names of the buffers that any method of the program writes.

    Returns:
        The names of the nodes that are gone.
    """
    graph = ep.graph
    tensors = constant_tensors(ep, states)
    if any(isinstance(t, FakeTensor) for t in tensors.values()):
        return set()
    constants = constant_nodes(graph, set(tensors))
    before = {n.name for n in graph.nodes}
    environment = Environment(Builder("constants"), tensors)
    for node in list(constants):
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        used = any(u not in constants for u in node.users)
        value = node.meta["val"]
        if not used or value.numel() * value.element_size() > _LIMIT:
            continue
        made = environment.evaluate(node).contiguous().clone()
        folded = constant(ep, f"c_{node.name}", made)
        tensors[folded.name] = made  # for constants that are computed from it
        node.replace_all_uses_with(folded, propagate_meta=False)
    for node in reversed(list(constants)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    refresh_outputs(ep)
    ep.graph_module.recompile()
    return before - {n.name for n in graph.nodes}


def scalars_as_constants(ep: ExportedProgram) -> None:
    """Makes numbers that stand for tensors constants, of the type that PyTorch computes in.

    ExecuTorch does so too, but gives each number a type of its own (a 0-d int32 tensor plus two is
    int64 then), and mixes up their order in a method without inputs.
    """
    for node in list(ep.graph.nodes):
        op = aten_op(node.target)
        if op is None or node.op != "call_function":
            continue
        tensor = next((a for a in node.args if isinstance(a, torch.fx.Node)), None)
        for i, (arg, declared) in enumerate(zip(node.args, op._schema.arguments, strict=False)):
            number = isinstance(arg, (bool, int, float))
            if not number or tensor is None or str(declared.type) != "Tensor":
                continue
            dtype = torch.result_type(tensor.meta["val"], arg)
            kind = str(dtype).removeprefix("torch.")
            text = repr(arg).replace("-", "minus").replace("+", "").replace(".", "_")
            name = f"c_number_{text}_{kind}"
            node.update_arg(i, constant(ep, name, torch.tensor(arg, dtype=dtype)))
    ep.graph_module.recompile()


def lift_constants(ep: ExportedProgram) -> None:
    """Makes tensors that are attributes of the graph module constants of the program."""
    for node in ep.graph.find_nodes(op="get_attr"):
        value = getattr(ep.graph_module, str(node.target))
        if isinstance(value, torch.Tensor):
            lifted = constant(ep, f"c_{node.name}", value)
            node.replace_all_uses_with(lifted, propagate_meta=False)
            ep.graph.erase_node(node)
            delattr(ep.graph_module, str(node.target))


def constant(ep: ExportedProgram, name: str, value: torch.Tensor) -> torch.fx.Node:
    """The program's constant of that name, made with `value` if there is none."""
    with ep.graph.inserting_before(next(iter(ep.graph.nodes))):
        node: torch.fx.Node = create_constant_placeholder(
            ep, ep.graph, name, InputKind.CONSTANT_TENSOR, value
        )
    return node


def drop_empty_pieces(ep: ExportedProgram) -> None:
    """Takes tensors without elements out of every `cat`.

    A window that a chunk replaces whole is `cat([window[chunk:], chunk])`, and no tensor without
    elements can enter a delegate.
    """
    for node in ep.graph.nodes:
        if node.target is not torch.ops.aten.cat.default:
            continue
        pieces = [piece for piece in node.args[0] if piece.meta["val"].numel()]
        if pieces and len(pieces) < len(node.args[0]):
            node.args = (pieces, *node.args[1:])
    ep.graph.eliminate_dead_code()
    ep.graph_module.recompile()


__all__ = [
    "constant",
    "drop_empty_pieces",
    "fold_constants",
    "lift_constants",
    "scalars_as_constants",
]
