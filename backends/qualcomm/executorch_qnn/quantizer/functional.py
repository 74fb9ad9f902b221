# SPDX-License-Identifier: BSD-3-Clause
"""Exported modules with state as PT2E can annotate them: without in-place ops.

torchao knows a buffer as mutable only if `copy_` or `put_` writes it: the read of any other one is
folded into a constant, of two writes in place the second is lost, and what a view writes is not
seen to be the buffer's.  In functional form each buffer is read as it was and written once, by a
`copy_` at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import LoweringError

aten = torch.ops.aten


def mutated_buffers(module: torch.fx.GraphModule) -> set[str]:
    """Names of the buffers that the module writes, batch norm's statistics left out."""
    roots: dict[torch.fx.Node, torch.fx.Node] = {}
    found = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            roots[node] = node
        elif node.op == "call_function" and (schema := getattr(node.target, "_schema", None)):
            for i, arg in enumerate(schema.arguments):
                given = node.args[i] if i < len(node.args) else node.kwargs.get(arg.name)
                if not isinstance(given, torch.fx.Node) or arg.alias_info is None:
                    continue
                root = roots.get(given)
                if root is None:
                    continue
                if arg.alias_info.is_write:
                    found.add(str(root.target))
                elif schema.returns and schema.returns[0].alias_info is not None:
                    roots[node] = root
    return found


def functional(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """The module itself if it writes no buffer, else its functional form; see above.

    Raises:
        LoweringError: torch cannot express it functionally.
    """
    if not mutated_buffers(module):
        return module
    args, kwargs = _example_inputs(module)
    values = {name: b.detach().clone() for name, b in module.named_buffers()}
    try:
        with torch.no_grad():
            exported = torch.export.export(module, args, kwargs, strict=False)
            made: torch.fx.GraphModule = exported.run_decompositions({}).module()
    except Exception as e:
        raise LoweringError(f"torch cannot make the model functional: {e}") from e
    for name, buffer in made.named_buffers():
        if name in values:
            buffer.copy_(values[name])
    return made


def _example_inputs(module: torch.fx.GraphModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs of the shapes and types that the module was exported with."""
    flat = [
        torch.zeros(v.shape, dtype=v.dtype) if isinstance(v, torch.Tensor) else v
        for v in (n.meta["val"] for n in module.graph.find_nodes(op="placeholder"))
    ]
    spec = getattr(module, "_in_spec", None)
    if spec is None:
        spec = module.graph._codegen.pytree_info.in_spec  # type: ignore[attr-defined]
    args, kwargs = pytree.tree_unflatten(flat, spec)
    return tuple(args), dict(kwargs)
