# SPDX-License-Identifier: BSD-3-Clause
"""Mutable buffers of a functional graph: those that are added to, and those that only keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .families import ARITHMETIC, JOINS, MOVES, is_float, name_of

Node = torch.fx.Node


_SUMS_OF_PRODUCTS = frozenset(("addbmm", "addmm", "addmv", "addr", "baddbmm"))


@dataclass(frozen=True)
class State:
    """A buffer, the node of its old value, and the `copy_` that writes the new one."""

    name: str
    old: Node
    write: Node

    @property
    def new(self) -> Node:
        new = self.write.args[1]
        assert isinstance(new, Node)
        return new


def states_of(graph: torch.fx.Graph) -> list[State]:
    """The buffers of floats that a functional graph writes."""
    return [
        State(str(old.target), old, node)
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        if (old := node.args[0]).op == "get_attr" and is_float(old)
    ]


def arithmetic(state: State) -> set[Node]:
    """The nodes that make a buffer's new value of its old one by arithmetic, element by element.

    Sums, averages, decays: each call changes the value by a little, which would be lost in steps
    of 8 or 16 bits.  What a product or a function of the whole buffer makes is a new value, and
    what is only moved is the old one: none of the two is here.
    """
    reached: dict[Node, bool] = {state.old: False}  # whether there is arithmetic on the way
    for node in state.old.graph.nodes:
        name = name_of(node)
        if name not in ARITHMETIC | MOVES | JOINS | {"getitem"} or not is_float(node):
            continue
        sources = node.all_input_nodes
        if name in _SUMS_OF_PRODUCTS:
            sources = sources[:1]
        before = [reached[n] for n in sources if n in reached]
        if before:
            changes = name in ARITHMETIC and len(node.all_input_nodes) + len(node.args) > 1
            reached[node] = any(before) or changes
    if not reached.get(state.new):
        return set()
    found, pending = set(), [state.new]
    while pending:
        node = pending.pop()
        if node in reached and node is not state.old and node not in found:
            found.add(node)
            pending += node.all_input_nodes
    return found
