# SPDX-License-Identifier: BSD-3-Clause
"""From `torch.export`'s training IR to functional core ATen, with composite ops left whole.

A program is retraced exactly once.  Retracing a functional program again is not only slow but
unsound: it replays the buffer updates one after another, and gives wrong values when they cross
(`b.copy_(c); c.copy_(x)`).  What has to be opened after that is opened node by node.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..errors import LoweringError

_PROVENANCE = ("nn_module_stack", "stack_trace", "from_node", "torch_fn", "source_fn_stack")


def functionalise(ep: ExportedProgram, keep: Iterable[OpOverload]) -> ExportedProgram:
    """The functional core ATen form of `ep`, in one retrace; ops in `keep` are left whole.

    Raises:
        LoweringError: torch cannot express the program functionally (its own text is given).
    """
    table = torch.export.default_decompositions()
    for op in keep:
        table.pop(op, None)
    try:
        return ep.run_decompositions(table)
    except Exception as e:
        raise LoweringError(f"torch cannot make the program functional: {e}") from e


def open_node(gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.Node]:
    """Replaces a composite node by its decomposition, without touching the rest of the graph.

    Returns:
        The new nodes.

    Raises:
        LoweringError: PyTorch has no decomposition for the op.
    """
    op = node.target
    assert isinstance(op, OpOverload)
    table = torch.export.default_decompositions()
    fn = op.decompose if op._can_decompose() else table.get(op)
    if fn is None:
        raise LoweringError(f"node {node.name}: {op} has no decomposition and no lowering")
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, a in enumerate(flat) if isinstance(a, torch.fx.Node)]

    def call(*tensors: Any) -> Any:
        leaves = list(flat)
        for i, t in zip(places, tensors, strict=True):
            leaves[i] = t
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        return fn(*args, **kwargs)

    values = [flat[i].meta["val"] for i in places]
    mode = detect_fake_mode(
        [n.meta.get("val") for n in node.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    )
    assert mode is not None
    pure = torch.func.functionalize(call, remove="mutations_and_views")
    core = {k: v for k, v in table.items() if k is not op}
    with mode, torch.no_grad(), enable_python_dispatcher():
        traced = make_fx(pure, decomposition_table=core)(*values)
    return _inline(gm, node, traced, [flat[i] for i in places])


def _inline(
    gm: torch.fx.GraphModule,
    node: torch.fx.Node,
    traced: torch.fx.GraphModule,
    arguments: list[torch.fx.Node],
) -> list[torch.fx.Node]:
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    new: list[torch.fx.Node] = []
    inputs = iter(arguments)
    result: Any = None
    with gm.graph.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                result = torch.fx.map_arg(inner.args[0], env.__getitem__)
            elif inner.op == "get_attr":
                env[inner] = _constant(gm, getattr(traced, str(inner.target)))
            else:
                copied = gm.graph.node_copy(inner, env.__getitem__)
                for key in _PROVENANCE:
                    if key in node.meta:
                        copied.meta[key] = node.meta[key]
                env[inner] = copied
                new.append(copied)
    if isinstance(result, torch.fx.Node):
        node.replace_all_uses_with(result, propagate_meta=False)
    else:
        for user in list(node.users):
            user.replace_all_uses_with(result[user.args[1]], propagate_meta=False)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return new


def _constant(gm: torch.fx.GraphModule, tensor: torch.Tensor) -> torch.fx.Node:
    """A constant that a decomposition made, as a `full` node when it is a number."""
    if tensor.numel() != 1:
        raise LoweringError("a decomposition made a constant tensor; report this model")
    node = gm.graph.call_function(
        torch.ops.aten.full.default,
        (list(tensor.shape), tensor.item()),
        {"dtype": tensor.dtype, "device": torch.device("cpu"), "pin_memory": False},
    )
    node.meta["val"] = tensor
    return node


def refresh_outputs(ep: ExportedProgram) -> None:
    """Makes the signature name the nodes that the output node now returns."""
    for arg, spec in zip(
        ep.graph.output_node().args[0], ep.graph_signature.output_specs, strict=True
    ):  # type: ignore[arg-type]
        if isinstance(arg, torch.fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = arg.name
