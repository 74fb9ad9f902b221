# SPDX-License-Identifier: BSD-3-Clause
"""Values inside of a model as further outputs of it.

The nodes of a quantized module have the names that they have in its module of floats, so that one
name means one value in both, and in what is lowered of them.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ..ops.quantized import is_dequantize, is_quantize, type_of
from ..quantizer.annotate import module_paths
from ..quantizer.families import CLIPS, JOINS, MOVES, is_float, name_of

Node = torch.fx.Node
_COPIES = torch.ops.aten.copy_.default


@dataclass(frozen=True)
class Tap:
    """A value that is looked at.

    Attributes:
        node: its name in the module of floats.
        seen: the name of the node that is put out by the quantized module: the value as it is
            stored, not the one of which it is rounded.
        layer: path of the module, and `op`: name of the op; joined by ` + ` for all that is
            computed as one with it, and stored clipped, so that there are no other values to see.
    """

    node: str
    seen: str
    layer: str
    op: str


def taps_of(
    floats: GraphModule, quantized: GraphModule | None, states: Mapping[str, str], each: str
) -> list[Tap]:
    """What can be looked at in a method.

    Values that are only moved are left out, as they have the errors of what they were, and
    constants, which have none of their own.

    Args:
        quantized: the same with `quantize` and `dequantize` nodes, if it is quantized.
        states: the buffers that are state.
        each: `modules` for the last value of each module, at each of its calls; `nodes` for all.
    """
    found = {n.name: n for n in (quantized or floats).graph.nodes}
    varies: set[Node] = set()
    last: dict[object, Node] = {}
    clip_of: dict[Node, Node] = {}
    for node in floats.graph.nodes:
        if node.op == "placeholder" or (node.op == "get_attr" and str(node.target) in states):
            varies.add(node)
        if node.op != "call_function" or varies.isdisjoint(node.all_input_nodes):
            continue
        varies.add(node)
        if node.name in found and _computes(node):
            last[_call(node)[0] if each == "modules" else node] = node
            if (clip := _clip(node, found)) is not None:
                clip_of[node] = clip
    parts: dict[Node, dict[Node, None]] = {}  # a value, and all that is computed as one with it
    for node in last.values():
        chain = [node]
        while (clip := clip_of.get(chain[-1])) is not None:
            chain.append(clip)
        parts.setdefault(chain[-1], {}).update(dict.fromkeys(chain))
    return [_tap(n, found, list(parts[n])) for n in floats.graph.nodes if n in parts]


def _tap(node: Node, found: Mapping[str, Node], parts: Sequence[Node]) -> Tap:
    layers = dict.fromkeys(path for part in parts if (path := _call(part)[1]))
    return Tap(
        node.name,
        _stored(found[node.name]).name,
        " + ".join(layers),
        " + ".join(name_of(part) for part in parts),
    )


def _computes(node: Node) -> bool:
    """Whether a node makes numbers of floats, in one tensor."""
    if node.target is _COPIES or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    made = node.args[0] if name_of(node) == "getitem" else node
    return is_float(node) and isinstance(made, Node) and name_of(made) not in MOVES | JOINS


def _call(node: Node) -> tuple[object, str]:
    """The call of a module that a node belongs to, and its path; `@n` marks all but the first."""
    key = next(reversed(node.meta.get("nn_module_stack") or {"": None}))
    path = next(reversed(module_paths(node)), "")
    again = str(key).rpartition("@")[2] if "@" in str(key) else ""
    return key, f"{path}@{again}" if path and again else path


def _quantize(node: Node) -> Node | None:
    return next((u for u in node.users if is_quantize(u)), None)


def _stored(node: Node) -> Node:
    """A node's value as it is stored: behind `quantize` and `dequantize`, if it is quantized."""
    q = _quantize(node)
    return node if q is None else next((u for u in q.users if is_dequantize(u)), node)


def _clip(node: Node, found: Mapping[str, Node]) -> Node | None:
    """The clip that is all that reads a node, and whose encoding the node has."""
    if len(node.users) != 1 or name_of(clip := next(iter(node.users))) not in CLIPS:
        return None
    own, its = (_quantize(found[n.name]) if n.name in found else None for n in (node, clip))
    return clip if own is not None and its is not None and type_of(own) == type_of(its) else None


def tapped(module: GraphModule, names: Sequence[str]) -> tuple[GraphModule, list[int]]:
    """The module with the values of nodes as further outputs, which are all in one flat list.

    Parameters and buffers are those of `module`, which does not change.

    Returns:
        The new module, and the place of each of the values among its outputs.
    """
    graph = copy.deepcopy(module.graph)
    nodes = {n.name: n for n in graph.nodes}
    output = graph.output_node()
    values = list(output.args[0])  # type: ignore[arg-type]
    places = []
    for name in names:
        if nodes[name] not in values:
            values.append(nodes[name])
        places.append(values.index(nodes[name]))
    output.args = (values,)
    codegen = graph._codegen
    assert isinstance(codegen, torch.fx.graph._PyTreeCodeGen)
    spec = pytree.tree_structure([0] * len(values))
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=spec)
    return GraphModule(module, graph), places


def sources(
    floats: Mapping[str, GraphModule],
    taps: Mapping[str, Sequence[Tap]],
    slots: Mapping[str, Mapping[str, str]],
) -> dict[tuple[str, str], set[tuple[str, str]]]:
    """Tap, as method and node, to the taps that it is next computed from, through state too."""
    ends = {m: {t.node for t in of} for m, of in taps.items()}
    writes: dict[str, list[tuple[str, Node]]] = {}
    for method, module in floats.items():
        for node in module.graph.find_nodes(op="call_function", target=_COPIES):
            slot = slots[method].get(str(node.args[0].target))
            if slot is not None:
                writes.setdefault(slot, []).append((method, node.args[1]))
    found = {}
    for method, of in taps.items():
        nodes = {n.name: n for n in floats[method].graph.nodes}
        for tap in of:
            pending = [(method, n) for n in nodes[tap.node].all_input_nodes]
            seen: set[tuple[str, Node]] = set()
            before: set[tuple[str, str]] = set()
            while pending:
                at = pending.pop()
                if at in seen:
                    continue
                seen.add(at)
                name, node = at
                if node.name in ends.get(name, ()):
                    before.add((name, node.name))
                elif node.op == "get_attr":
                    pending += writes.get(slots[name].get(str(node.target), ""), [])
                else:
                    pending += [(name, n) for n in node.all_input_nodes]
            found[method, tap.node] = before - {(method, tap.node)}
    return found
