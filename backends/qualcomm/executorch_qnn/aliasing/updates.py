# SPDX-License-Identifier: BSD-3-Clause
"""Buffer updates of a functional program are one parallel assignment; guards keep it one.

In the signature, `(b, c) <- (c, x)` means: both right sides are read before either buffer is
written.  Everything downstream (partitions, delegates, write-backs) sees nodes and not that rule,
so every returned value gets a node of its own: a clone that is the update, or guards an old value.
"""

from __future__ import annotations

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..lowering.decompose import refresh_outputs

_GUARD = "qnn_state_guard"
aten = torch.ops.aten


def guard_updates(ep: ExportedProgram) -> None:
    """Gives each buffer update a clone of its own, and each returned old value as well.

    After this no node is the new value of a buffer and anything else besides, no buffer's new
    value is a placeholder, and no mutated buffer is returned as it stands.  The clones cost
    nothing in a delegate; those that stay on the CPU without need go in `drop_idle_guards`.
    """
    graph = ep.graph_module.graph
    output = graph.output_node()
    mutated = {
        s.target for s in ep.graph_signature.output_specs if s.kind is OutputKind.BUFFER_MUTATION
    }
    old_values = {
        s.arg.name
        for s in ep.graph_signature.input_specs
        if s.kind is InputKind.BUFFER and s.target in mutated
    }
    args = []
    for arg, spec in zip(output.args[0], ep.graph_signature.output_specs, strict=True):
        update = spec.kind is OutputKind.BUFFER_MUTATION
        if isinstance(arg, torch.fx.Node) and (update or arg.name in old_values):
            with graph.inserting_before(output):
                clone = graph.call_function(aten.clone.default, (arg,))
            clone.meta = {k: v for k, v in arg.meta.items() if k == "val"}
            clone.meta[_GUARD] = True
            arg = clone
        args.append(arg)
    output.args = (tuple(args),)
    refresh_outputs(ep)
    ep.graph_module.recompile()


def drop_idle_guards(ep: ExportedProgram) -> None:
    """Removes guards that no delegate took and that guard nothing.

    A guard is idle when its value is computed (not a placeholder) and is returned only once.
    """
    graph = ep.graph_module.graph
    output = graph.output_node()
    for node in list(graph.nodes):
        if not node.meta.get(_GUARD) or node.target is not aten.clone.default:
            continue
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        if source.op != "placeholder" and output not in source.users:
            node.replace_all_uses_with(source, propagate_meta=False)
            graph.erase_node(node)
    refresh_outputs(ep)
    ep.graph_module.recompile()
