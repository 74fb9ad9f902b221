# SPDX-License-Identifier: BSD-3-Clause
"""Nodes that the report lists: what stays on the CPU, and why."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from ..errors import UnsupportedOp
from ..ops.registry import aten_op, is_getitem
from ..source import source_of
from .ownership import TAG


@dataclass(frozen=True)
class ListedOp:
    """A node, what there is to say of it, and where in the user's model it comes from."""

    node: str
    op: str
    reason: str
    source: str = ""

    def __str__(self) -> str:
        return f"{self.node} ({self.op}): {self.reason}{'; ' + self.source if self.source else ''}"


def listed(node: torch.fx.Node, reason: str, prefix: str = "") -> ListedOp:
    op = str(aten_op(node.target) or node.target)
    return ListedOp(prefix + node.name, op, reason, source_of(node))


_CHECKS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def is_checked(node: torch.fx.Node) -> bool:
    """Whether a node is only there for a check of sizes, which the final program has not."""
    number = isinstance(node.meta.get("val"), (torch.SymBool, torch.SymInt)) and bool(node.users)
    return node.target in _CHECKS or (number and all(map(is_checked, node.users)))


def in_bodies(graph: torch.fx.Graph, prefix: str = "") -> Iterator[ListedOp]:
    """The nodes in the bodies of a graph's control flow, at any depth."""
    for node in graph.find_nodes(op="get_attr"):
        body = getattr(graph.owning_module, str(node.target), None)
        if not isinstance(body, torch.fx.GraphModule):
            continue
        owner = ", ".join(u.name for u in node.users)
        for inner in body.graph.nodes:
            if inner.op == "call_function" and not (is_getitem(inner) or is_checked(inner)):
                why = f"it is in a body of {owner}, which runs on the CPU"
                yield listed(inner, why, f"{prefix}{node.target}.")
        yield from in_bodies(body.graph, f"{prefix}{node.target}.")


def constants_left(nodes: Collection[torch.fx.Node], copied: bool) -> Iterator[torch.fx.Node]:
    """The calls among constant nodes that no delegate takes along.

    Args:
        copied: whether each delegate gets a copy of what it needs.
    """
    left: set[torch.fx.Node] = set()
    for node in reversed(list(nodes)):
        if node.op != "call_function" or TAG in node.meta:
            continue
        needed = (TAG not in u.meta and (u not in nodes or u in left) for u in node.users)
        if not copied or any(needed):
            left.add(node)
    return (n for n in nodes if n in left and not is_getitem(n))


def refuse(left: Mapping[str, Iterable[ListedOp]]) -> None:
    """Raises UnsupportedOp if any node is left to the CPU, of the methods in `left`."""
    nodes = [(method, op) for method, ops in left.items() for op in ops]
    if nodes:
        lines = "\n".join(f"  {method}: {op}" for method, op in nodes)
        raise UnsupportedOp(
            f"fallback='error', and {len(nodes)} "
            f"{'node' if len(nodes) == 1 else 'nodes'} would run on the CPU:\n{lines}\n"
            "fallback='cpu' lets them",
            [{"method": method, **dataclasses.asdict(op)} for method, op in nodes],
        )
