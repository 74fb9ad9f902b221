# SPDX-License-Identifier: BSD-3-Clause
"""Placeholders of parameters, constants and buffers: one each, or one for each partition."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, TensorArgument

from ..aliasing.slots import identity, tensors
from ..aliasing.updates import updates
from ..partition import Plan
from ..partition.ownership import TAG

_DATA = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def own_inputs(ep: ExportedProgram, plan: Plan, states: Container[str]) -> None:
    """Gives each partition a placeholder of its own for all data that it uses.

    A tagged placeholder belongs to one delegate.  ExecuTorch would copy it, and the tensor behind
    it, for every node that uses it; here the placeholders of one buffer have one name and one
    tensor.  The partition that makes a buffer's new value gets one too, whether it reads the old
    value or not: that is how ExecuTorch knows that the delegate stores it.  A buffer of the host
    keeps its one placeholder, which every delegate takes as an input, and one of `states` that this
    method does not touch is none of its business.
    """
    owners = {o.fqn: o.owner for o in plan.owners}
    writers = {u.old: u.new for u in updates(ep, owners)}
    nodes = {n.name: n for n in ep.graph.nodes if n.op == "placeholder"}
    specs: list[InputSpec] = []
    for spec in ep.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if spec.kind is InputKind.BUFFER and spec.target in states and spec.target not in owners:
            ep.graph.erase_node(node)
            continue
        if spec.kind in _DATA and owners.get(spec.target or "") != "host":
            node.meta.pop(TAG, None)
            new = writers.get(node)
            users = [*node.users, *([] if new is None else [new])]
            tags = sorted({u.meta.get(TAG) or "" for u in users})
            specs += [_copied(ep.graph, node, spec, tag) for tag in tags[1:]]
            if tags and tags[0]:
                node.meta[TAG] = tags[0]
        specs.append(spec)
    ep.graph_signature.input_specs[:] = specs
    ep.graph_module.recompile()


def _copied(graph: torch.fx.Graph, node: torch.fx.Node, spec: InputSpec, tag: str) -> InputSpec:
    """A further placeholder of `node`'s data, for the users with `tag`."""
    with graph.inserting_before(node):
        twin = graph.placeholder(node.name)
    twin.target = twin.name
    twin.meta = {**node.meta, TAG: tag}
    for user in list(node.users):
        if user.meta.get(TAG) == tag:
            user.replace_input_with(node, twin)
    return InputSpec(spec.kind, TensorArgument(twin.name), spec.target, spec.persistent)


def one_input_each(ep: ExportedProgram) -> None:
    """Takes `own_inputs` back, and gives one placeholder to a tensor that has several names.

    torch.export uses only one name of such a tensor, which one is chance, and cannot make a program
    functional that has them all.  Here the first name stays, that of a buffer before that of a
    parameter.
    """
    nodes = {n.name: n for n in ep.graph.nodes if n.op == "placeholder"}
    first: dict[object, torch.fx.Node] = {}
    named = {nodes[s.arg.name]: identity(t) for s, t in tensors(ep) if s.kind in _DATA}
    for kind in (InputKind.BUFFER, InputKind.PARAMETER, InputKind.CONSTANT_TENSOR):
        for spec in ep.graph_signature.input_specs:
            if spec.kind is kind and (node := nodes[spec.arg.name]) in named:
                first.setdefault(named[node], node)
    specs = []
    for spec in ep.graph_signature.input_specs:
        node = nodes[spec.arg.name]
        if node in named:
            kept = first[named[node]]
            if kept is not node:
                node.replace_all_uses_with(kept, propagate_meta=False)
                ep.graph.erase_node(node)
                continue
        specs.append(spec)
    ep.graph_signature.input_specs[:] = specs
    ep.graph_module.recompile()
