# SPDX-License-Identifier: BSD-3-Clause
"""Cuts a program into delegates and CPU parts, and decides who owns each mutable buffer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..compile.backend import CompileOptions
from ..compile.build import mutated_buffers
from ..compile.compiler import CompileWorker
from ..ops.registry import aten_op, table
from ..target import Target
from .support import Support, is_getitem

_TAG = "delegation_tag"


@dataclass(frozen=True)
class CpuOp:
    """A node that stays on the CPU, and why."""

    node: str
    op: str
    reason: str


@dataclass(frozen=True)
class Ownership:
    """Who owns a mutable buffer: `delegate` or `host`, and why."""

    fqn: str
    owner: str
    reason: str


@dataclass
class Plan:
    """What a partitioner decided about one program.

    Attributes:
        partitions: tag to the names of its nodes, in graph order.
    """

    partitions: dict[str, list[str]] = field(default_factory=dict)
    cpu_ops: list[CpuOp] = field(default_factory=list)
    owners: list[Ownership] = field(default_factory=list)


class QnnPartitioner(Partitioner):  # type: ignore[misc]
    """ExecuTorch partitioner for QNN's HTP backend.

    Every node is offered to the op table and then validated by QNN itself for `target`.  What is
    refused stays on the CPU; `plan` holds the reasons after a call.

    Args:
        target: the SoC.
        qnn_libraries: folder of the QNN libraries; searched for when `None`.
        skip: names of nodes, or ATen overloads, that must stay on the CPU.
        in_place: bind state in place where that is sound; see `compile.build.build`.

    Raises:
        LibraryNotFound: when it is used and there is no QNN library.
    """

    def __init__(
        self,
        target: Target | str,
        *,
        qnn_libraries: str | os.PathLike[str] | None = None,
        skip: Iterable[str | OpOverload] = (),
        in_place: bool = True,
    ) -> None:
        super().__init__()
        self.target = target if isinstance(target, Target) else Target(target)
        self.options = CompileOptions(
            self.target.name,
            None if qnn_libraries is None else os.fspath(qnn_libraries),
            in_place,
        )
        self.skip = set(skip)
        self.refused: dict[str, str] = {}
        """Node name to QNN's reason, for nodes that a failed compilation has ruled out."""
        self.epochs: dict[str, float] = {}
        """Node name to its place in a partition that had to be split; 0 for all others."""
        self.data: Mapping[str, torch.Tensor] | None = None
        self.mutated: set[str] = set()
        """Buffers that other methods of the program write: never constants here."""
        self.plan = Plan()

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], None]:
        """The composite ops of this program that are delegated whole, wherever they occur."""
        kept = {op for op, row in table().items() if row.keep}
        nodes = [n for n in ep.graph.nodes if n.op == "call_function" and aten_op(n.target) in kept]
        wanted = {op for n in nodes if (op := aten_op(n.target)) is not None}
        with CompileWorker(self.target, self.options.qnn_libraries) as worker:
            support = Support(ep, worker, self.mutated | mutated_buffers(ep), self.data)
            for node, reason in support.verdicts(nodes).items():
                op = aten_op(node.target)
                if reason and op is not None:
                    wanted.discard(op)
        return sorted(wanted, key=str), None

    def partition(self, ep: ExportedProgram) -> PartitionResult:
        """Tags the nodes of `ep`; changes nothing else of it."""
        with CompileWorker(self.target, self.options.qnn_libraries) as worker:
            tags = self.tag(ep, worker)
        return PartitionResult(tagged_exported_program=ep, partition_tags=tags)

    def tag(self, ep: ExportedProgram, worker: CompileWorker) -> dict[str, DelegationSpec]:
        """Tags every node that is delegated; see `plan` for the rest."""
        mutated = self.mutated | mutated_buffers(ep)
        support = Support(ep, worker, mutated, self.data)
        graph = ep.graph_module.graph
        compute = [n for n in graph.nodes if n.op == "call_function" and n not in support.constants]
        reasons = self._reasons(support, compute)
        levels = _levels(compute, {n for n in compute if reasons[n] is None})
        self.plan = Plan()
        names: dict[tuple[int, float], str] = {}
        for node in compute:
            if reasons[node] is not None:
                if not is_getitem(node):
                    op = str(aten_op(node.target) or node.target)
                    self.plan.cpu_ops.append(CpuOp(node.name, op, reasons[node] or ""))
                continue
            key = (levels[node], self.epochs.get(_anchor(node).name, 0.0))
            tag = names.setdefault(key, f"qnn_{len(names)}")
            node.meta[_TAG] = tag
            self.plan.partitions.setdefault(tag, []).append(node.name)
        _drop_without_inputs(ep, self.plan)
        _tag_constants(support.constants)
        self._tag_states(ep)
        spec = DelegationSpec("QnnDelegate", [self.options.spec()])
        return dict.fromkeys(self.plan.partitions, spec)

    def _reasons(
        self, support: Support, nodes: list[torch.fx.Node]
    ) -> dict[torch.fx.Node, str | None]:
        reasons: dict[torch.fx.Node, str | None] = {}
        ask = []
        for node in nodes:
            if is_getitem(node):
                continue
            if node.name in self.skip or aten_op(node.target) in self.skip:
                reasons[node] = "the caller asked to skip it"
            elif node.name in self.refused:
                reasons[node] = self.refused[node.name]
            else:
                ask.append(node)
        reasons.update(support.verdicts(ask))
        # A value that cannot cross the boundary keeps its neighbours on its own side.
        changed = True
        while changed:
            changed = False
            for node in nodes:
                if is_getitem(node):
                    reasons[node] = reasons[_anchor(node)]
                if reasons[node] is None and (why := self._stuck(support, node, reasons)):
                    reasons[node] = why
                    changed = True
        return reasons

    def _stuck(
        self, support: Support, node: torch.fx.Node, reasons: dict[torch.fx.Node, str | None]
    ) -> str | None:
        for source in node.all_input_nodes:
            outside = source not in support.constants and reasons.get(source, "") is not None
            if outside and (why := support.crosses_boundary(source)):
                return f"its input {source.name} must come from outside: {why}"
        return None

    def _tag_states(self, ep: ExportedProgram) -> None:
        """Gives a buffer to a delegate when all that touches it lies in that one partition."""
        placeholders = {
            s.target: s.arg.name
            for s in ep.graph_signature.input_specs
            if s.kind is InputKind.BUFFER
        }
        nodes = {n.name: n for n in ep.graph.nodes}
        uses: dict[str, int] = {}
        for spec in ep.graph_signature.output_specs:
            uses[spec.arg.name] = uses.get(spec.arg.name, 0) + 1
        for spec in ep.graph_signature.output_specs:
            if spec.kind is not OutputKind.BUFFER_MUTATION or spec.target is None:
                continue
            old, new = nodes[placeholders[spec.target]], nodes[spec.arg.name]
            owner, reason = "host", _why_host_owned(old, new, uses[new.name])
            if reason is None:
                owner, reason = "delegate", f"all that touches it is in {new.meta[_TAG]}"
                old.meta[_TAG] = new.meta[_TAG]
            self.plan.owners.append(Ownership(spec.target, owner, reason))


def _why_host_owned(old: torch.fx.Node, new: torch.fx.Node, uses: int) -> str | None:
    tag = new.meta.get(_TAG)
    if tag is None or new.op == "placeholder":
        return f"its new value {new.name} is not computed by a delegate"
    for user in old.users:
        if user.meta.get(_TAG) != tag:
            where = user.meta.get(_TAG, "the CPU")
            return f"{user.name} on {where} reads it, {new.name} in {tag} writes it"
    if uses > 1 or any(u.op != "output" for u in new.users):
        outside = [u for u in new.users if u.op != "output" and u.meta.get(_TAG) != tag]
        if uses > 1 or outside:
            return f"its new value {new.name} is used outside of {tag} as well"
    return None


def _anchor(node: torch.fx.Node) -> torch.fx.Node:
    """The node that a chain of getitems belongs to."""
    while is_getitem(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _levels(nodes: list[torch.fx.Node], supported: set[torch.fx.Node]) -> dict[torch.fx.Node, int]:
    """Numbers such that delegated nodes of one number form a partition without cycles.

    Along every edge the number does not fall, and it rises where the edge crosses between NPU (even
    numbers) and CPU (odd ones).  Nodes first get the lowest number that allows, then move up to
    their users', so that nobody is cut off from the partition that needs him.
    """
    level: dict[torch.fx.Node, int] = {}
    for node in nodes:
        low = max((level[i] for i in node.all_input_nodes if i in level), default=0)
        odd = node not in supported
        level[node] = low if low % 2 == odd else low + 1
    for node in reversed(nodes):
        users = [u for u in node.users if u in level]
        if not users or (node not in supported and not is_getitem(node)):
            continue
        odd = node not in supported
        high = min(level[u] for u in users)
        high = high if high % 2 == odd else high - 1
        level[node] = max(level[node], high)
    for node in nodes:  # a getitem is where its producer is
        if is_getitem(node):
            level[node] = level[_anchor(node)]
    return level


def _drop_without_inputs(ep: ExportedProgram, plan: Plan) -> None:
    """Takes back partitions that no run-time input reaches: QNN cannot execute such graphs."""
    for tag in list(plan.partitions):
        nodes = [n for n in ep.graph.nodes if n.meta.get(_TAG) == tag]
        if not any(i.meta.get(_TAG) != tag for n in nodes for i in n.all_input_nodes):
            for n in nodes:
                del n.meta[_TAG]
                plan.cpu_ops.append(CpuOp(n.name, str(n.target), "it depends on no input"))
            del plan.partitions[tag]


def _tag_constants(constants: Iterable[torch.fx.Node]) -> None:
    """Tags constant nodes that one partition alone uses, so that they are folded into it."""
    for node in reversed(list(constants)):
        tags = {u.meta.get(_TAG) for u in node.users}
        if node.op == "placeholder":
            # ExecuTorch gives every further partition a copy of a constant placeholder.
            tags.discard(None)
            if tags:
                node.meta[_TAG] = min(t for t in tags if t is not None)
        elif len(tags) == 1 and None not in tags:
            node.meta[_TAG] = tags.pop()
