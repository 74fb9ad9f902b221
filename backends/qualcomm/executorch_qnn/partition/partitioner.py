# SPDX-License-Identifier: BSD-3-Clause
"""Cuts a program into delegates and CPU parts, and decides who owns each mutable buffer."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..aliasing import buffer, state_slots
from ..compile.backend import CompileOptions
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
    """Who owns a mutable buffer: `delegate` or `host`, and why.

    Attributes:
        fqn: the buffer's name in this method; `slot`: that of its slot in the program.
    """

    fqn: str
    slot: str
    shape: tuple[int, ...]
    dtype: torch.dtype
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
        in_place, state_update: how state is bound; see `compile.build.build`.

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
        state_update: str = "auto",
    ) -> None:
        super().__init__()
        self.target = target if isinstance(target, Target) else Target(target)
        self.options = CompileOptions(
            self.target.name,
            None if qnn_libraries is None else os.fspath(qnn_libraries),
            in_place,
            state_update,
        )
        self.skip = set(skip)
        self.refused: dict[str, str] = {}
        """Node name to QNN's reason, for nodes that a failed compilation has ruled out."""
        self.epochs: dict[str, float] = {}
        """Node name to its place in a partition that had to be split; 0 for all others."""
        self.data: Mapping[str, torch.Tensor] | None = None
        self.states: Mapping[str, str] | None = None
        """Names of the program's state buffers in this method, and of their slots."""
        self.worker: CompileWorker | None = None
        """An open worker that compiles what is tagged; a new one is started if `None`."""
        self.plan = Plan()

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], None]:
        """The composite ops of this program that are delegated whole, wherever they occur."""
        kept = {op for op, row in table().items() if row.keep}
        nodes = [n for n in ep.graph.nodes if n.op == "call_function" and aten_op(n.target) in kept]
        wanted = {op for n in nodes if (op := aten_op(n.target)) is not None}
        with CompileWorker(self.target, self.options.qnn_libraries) as worker:
            support = Support(ep, worker, self._states(ep), self.data)
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
        states = self._states(ep)
        support = Support(ep, worker, states, self.data)
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
        self._tag_states(ep, states)
        options = dataclasses.replace(self.options, states=states, worker=self.worker)
        spec = DelegationSpec("QnnDelegate", [options.spec()])
        return dict.fromkeys(self.plan.partitions, spec)

    def _states(self, ep: ExportedProgram) -> Mapping[str, str]:
        return state_slots({"": ep})[""] if self.states is None else self.states

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

    def _tag_states(self, ep: ExportedProgram, states: Mapping[str, str]) -> None:
        """Gives a buffer to a delegate when all that touches it lies in that one partition."""
        nodes = {n.name: n for n in ep.graph.nodes}
        signature = ep.graph_signature
        returned = Counter(s.arg.name for s in signature.output_specs)
        updates = {
            s.target: nodes[s.arg.name]
            for s in signature.output_specs
            if s.kind is OutputKind.BUFFER_MUTATION
        }
        for spec in signature.input_specs:
            if spec.kind is not InputKind.BUFFER or spec.target not in states:
                continue
            old, new = nodes[spec.arg.name], updates.get(spec.target)
            tag, reason = _owning_partition(old, new, returned)
            if tag is not None:
                old.meta[_TAG] = tag
            owner = "host" if tag is None else "delegate"
            value = buffer(ep, spec.target)
            slot, shape = states[spec.target], tuple(value.shape)
            self.plan.owners.append(Ownership(spec.target, slot, shape, value.dtype, owner, reason))


def _owning_partition(
    old: torch.fx.Node, new: torch.fx.Node | None, returned: Mapping[str, int]
) -> tuple[str | None, str]:
    """The one partition that a buffer can live in, or `None`, and why.

    Args:
        old: the buffer's placeholder; `new`: its new value, if it is written.
        returned: how often each node is returned.
    """
    touching = [*old.users, *([new] if new is not None else [])]
    tags = {n.meta.get(_TAG): n for n in touching if n.op != "output"}
    if new is not None and new.op == "placeholder":
        return None, f"its new value {new.name} is an input that no delegate computes"
    if None in tags:
        return None, f"{tags[None].name} on the CPU touches it"
    if returned[old.name]:
        return None, f"its old value {old.name} is returned as it stands"
    if len(tags) != 1:
        where = ", ".join(f"{n.name} in {t}" for t, n in tags.items())
        return None, f"several partitions touch it: {where}" if where else "nothing touches it"
    (tag,) = tags
    if new is not None:
        outside = [u for u in new.users if u.op != "output" and u.meta.get(_TAG) != tag]
        if outside or returned[new.name] > 1:
            return None, f"its new value {new.name} is used outside of {tag} as well"
    return tag, f"all that touches it is in {tag}"


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
