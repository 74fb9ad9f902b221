# SPDX-License-Identifier: BSD-3-Clause
"""Buffer updates of a functional program are one parallel assignment; guards keep it one.

In the signature, `(b, c) <- (c, x)` means: both right sides are read before either buffer is
written.  Everything downstream (partitions, delegates, write-backs) sees nodes and not that rule,
so it is written into the graph, and holds for every buffer from `guard_updates` on:

* A buffer's new value is a node that is nothing else: a clone of its own.
* Every node that reads the old value stands before the node that makes the new one, or reads a
  copy that does.  A copy is needed only by readers that depend on the new value themselves.

Executing the nodes in the order of the graph, with each update stored as soon as it is made, then
gives the values of the parallel assignment.
"""

from __future__ import annotations

import heapq
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

_GUARD = "qnn_state_guard"
aten = torch.ops.aten


@dataclass(frozen=True)
class Update:
    """A buffer in a program: the node of its old value, and that of its new one if it has one."""

    fqn: str
    old: torch.fx.Node
    new: torch.fx.Node | None

    def readers(self) -> list[torch.fx.Node]:
        """The nodes that read the old value, apart from the one that makes the new value."""
        return [n for n in self.old.users if n.op != "output" and n is not self.new]


def updates(ep: ExportedProgram, states: Container[str]) -> list[Update]:
    """What becomes of each buffer in `states` that the program has."""
    nodes = {n.name: n for n in ep.graph.nodes}
    signature = ep.graph_signature
    new = {
        s.target: nodes[s.arg.name]
        for s in signature.output_specs
        if s.kind is OutputKind.BUFFER_MUTATION
    }
    return [
        Update(s.target, nodes[s.arg.name], new.get(s.target))
        for s in signature.input_specs
        if s.kind is InputKind.BUFFER and s.target is not None and s.target in states
    ]


def is_guard(node: torch.fx.Node) -> bool:
    return _GUARD in node.meta


def guarded(guard: torch.fx.Node) -> torch.fx.Node:
    """The node whose value a guard is."""
    source = guard.args[-1]
    assert isinstance(source, torch.fx.Node)
    return source


def guard_updates(
    ep: ExportedProgram, states: Container[str], constants: Container[torch.fx.Node]
) -> None:
    """Establishes the rule that the module's documentation states, for the buffers in `states`.

    Every update becomes a guard, and so does every old value that is returned.  Guards cost
    nothing in a delegate; those that stay on the CPU without need go in `drop_idle_guards`.

    Args:
        constants: nodes that depend on no run-time input.  No delegate can put one out, so that
            storing one becomes `where(never, old value, constant)`.
    """
    graph = ep.graph_module.graph
    output = graph.output_node()
    old = {u.fqn: u.old for u in updates(ep, states)}
    for i, spec in enumerate(ep.graph_signature.output_specs):
        if spec.kind is OutputKind.BUFFER_MUTATION:
            _bypass_clones(output, i)
    returned: list[Any] = list(output.args[0])
    for i, (arg, spec) in enumerate(zip(returned, ep.graph_signature.output_specs, strict=True)):
        update = spec.kind is OutputKind.BUFFER_MUTATION
        if not isinstance(arg, torch.fx.Node) or not (update or arg in old.values()):
            continue
        with graph.inserting_before(output):
            if update and arg in constants:
                never = graph.call_function(aten.full.default, ([], False), {"dtype": torch.bool})
                never.meta["val"] = arg.meta["val"].new_empty((), dtype=torch.bool)
                before = old[spec.target or ""]
                returned[i] = graph.call_function(aten.where.self, (never, before, arg))
            else:
                returned[i] = graph.call_function(aten.clone.default, (arg,))
        _mark(returned[i], arg)
    output.args = (tuple(returned),)
    refresh_outputs(ep)
    order: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for u in updates(ep, states):
        if u.new is None:
            continue
        readers = [n for n in u.readers() if n is not guarded(u.new)]  # that one comes before
        late = _after(u.new, order) if readers else set()
        stale = [n for n in readers if n in late]
        if stale:
            read_copy(graph, u.old, stale)
        for reader in u.readers():
            order.setdefault(reader, []).append(u.new)
    sort(graph, order)
    ep.graph_module.recompile()


def read_copy(
    graph: torch.fx.Graph, old: torch.fx.Node, readers: Iterable[torch.fx.Node]
) -> torch.fx.Node:
    """Makes `readers` read a copy of a buffer's old value, which stands before everything else."""
    first = next(n for n in graph.nodes if n.op != "placeholder")
    with graph.inserting_before(first):
        copy = graph.call_function(aten.clone.default, (old,))
    _mark(copy, old)
    for reader in readers:
        reader.replace_input_with(old, copy)
    return copy


def drop_idle_guards(ep: ExportedProgram) -> None:
    """Removes guards that no delegate took and that guard nothing.

    A guard is idle when it is not returned, or returns a value that is computed (no placeholder and
    no view of one) and returned only once: on the CPU, buffers are written when everything else is
    done.
    """
    graph = ep.graph_module.graph
    output = graph.output_node()
    for node in list(graph.nodes):
        if not is_guard(node) or not (_is_clone(node) or node.target is aten.where.self):
            continue
        source = guarded(node)
        computed_once = _base(source).op != "placeholder" and output not in source.users
        if output not in node.users or computed_once:
            conditions = [node.args[0]] if node.target is aten.where.self else []
            node.replace_all_uses_with(source, propagate_meta=False)
            for idle in (node, *conditions):
                graph.erase_node(idle)
    refresh_outputs(ep)
    ep.graph_module.recompile()


def sort(graph: torch.fx.Graph, order: Mapping[torch.fx.Node, Iterable[torch.fx.Node]]) -> None:
    """Sorts a graph so that `n` stands before each of `order[n]`, and changes nothing needlessly.

    Raises:
        AssertionError: the order contradicts the graph.
    """
    nodes = list(graph.nodes)
    place = {n: i for i, n in enumerate(nodes)}
    followers = {n: dict.fromkeys([*n.users, *order.get(n, ())]) for n in nodes}
    waits = dict.fromkeys(nodes, 0)
    for n in nodes:
        for f in followers[n]:
            waits[f] += 1
    ready = [place[n] for n in nodes if not waits[n]]
    result = []
    while ready:
        n = nodes[heapq.heappop(ready)]
        result.append(n)
        for f in followers[n]:
            waits[f] -= 1
            if not waits[f]:
                heapq.heappush(ready, place[f])
    assert len(result) == len(nodes), "the order of the updates contradicts the graph"
    if result != nodes:
        for n in result[:-1]:
            graph.output_node().prepend(n)


def refresh_outputs(ep: ExportedProgram) -> None:
    """Makes the signature name the nodes that the output node now returns."""
    returned: Any = ep.graph.output_node().args[0]
    for arg, spec in zip(returned, ep.graph_signature.output_specs, strict=True):
        if isinstance(arg, torch.fx.Node) and hasattr(spec.arg, "name"):
            spec.arg.name = arg.name


def _bypass_clones(output: torch.fx.Node, index: int) -> None:
    """Takes clones out of the way of an update, so that what makes the value is in sight."""
    returned: Any = output.args[0]
    while _is_clone(clone := returned[index]):
        clone.replace_all_uses_with(clone.args[0], propagate_meta=False)
        clone.graph.erase_node(clone)
        returned = output.args[0]


def _base(node: torch.fx.Node) -> torch.fx.Node:
    """What a value is a view of, or was before the edge dialect made a copy of the view.

    ExecuTorch makes a `view_copy` a view again when it plans the memory.
    """
    while node.op == "call_function" and (schema := getattr(node.target, "_schema", None)):
        views = any(r.alias_info and not r.alias_info.is_write for r in schema.returns)
        if not views and schema.name not in ("aten::view_copy", "aten::_unsafe_view"):
            break
        assert isinstance(node.args[0], torch.fx.Node)
        node = node.args[0]
    return node


def _is_clone(node: torch.fx.Node) -> bool:
    """Whether a node is a clone, of the ATen or the edge dialect."""
    name = getattr(getattr(node.target, "_schema", None), "name", None)
    return name in ("aten::clone", "dim_order_ops::_clone_dim_order")


def _mark(guard: torch.fx.Node, source: torch.fx.Node) -> None:
    guard.meta = {k: v for k, v in source.meta.items() if k == "val"}
    guard.meta[_GUARD] = True


def _after(
    start: torch.fx.Node, order: Mapping[torch.fx.Node, Iterable[torch.fx.Node]]
) -> set[torch.fx.Node]:
    """`start` and all that depends on it, by data or by `order`."""
    seen, pending = {start}, [start]
    while pending:
        n = pending.pop()
        for f in (*n.users, *order.get(n, ())):
            if f not in seen:
                seen.add(f)
                pending.append(f)
    return seen
