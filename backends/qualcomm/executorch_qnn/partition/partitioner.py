# SPDX-License-Identifier: BSD-3-Clause
"""Cuts a program into delegates and CPU parts, and decides who owns each mutable buffer."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ..aliasing import buffer, state_slots
from ..aliasing.updates import Update, is_guard, updates
from ..compile.backend import CompileOptions
from ..compile.compiler import CompileWorker
from ..compile.ir import QuantType
from ..ops.registry import aten_op, table
from ..target import Target
from .encodings import slot_types
from .listed import ListedOp, constants_left, in_bodies, is_checked, listed, refuse
from .ownership import (
    TAG,
    Order,
    Ownership,
    cpu_touch,
    not_in_one_partition,
    partitions_of,
    read_before_written,
    who_touches,
)
from .support import Support, is_getitem, known_tensors

_IDLE = "it guards a buffer of the host"
_NO_INPUT = "it depends on no input, and is computed in each call; make it a buffer of the model"


@dataclass
class Plan:
    """What a partitioner decided about one program.

    Attributes:
        cpu_ops: what stays on the CPU; `fp16_ops`: what is computed in fp16 between quantized ops.
        partitions: tag to the names of its nodes, getitems left out, in graph order.
        order: pairs of tags; the first one's delegate must be called before the second one's.
    """

    partitions: dict[str, list[str]] = field(default_factory=dict)
    cpu_ops: list[ListedOp] = field(default_factory=list)
    fp16_ops: list[ListedOp] = field(default_factory=list)
    owners: list[Ownership] = field(default_factory=list)
    order: set[tuple[str, str]] = field(default_factory=set)


class QnnPartitioner(Partitioner):  # type: ignore[misc]
    """ExecuTorch partitioner for QNN's HTP backend.

    Every node is offered to the op table and then validated by QNN itself for `target`.  What is
    refused stays on the CPU; `plan` holds the reasons after a call.

    Args:
        target: the SoC.
        qnn_libraries: folder of the QNN libraries; searched for when `None`.
        skip: names of nodes, or ATen overloads, that must stay on the CPU.
        fallback: `"error"` refuses a program of which anything stays on the CPU.
        in_place, state_update: how state is bound; see `compile.build.build`.
        state_dtype: slot to `torch.float16` or `torch.float32`, where it is not to be decided by
            the rule of `compile.precision`.

    Raises:
        LibraryNotFound: when it is used and there is no QNN library.
        UnsupportedOp: when it is used, with `fallback="error"`; lists all that stays on the CPU.
    """

    def __init__(
        self,
        target: Target | str,
        *,
        qnn_libraries: str | os.PathLike[str] | None = None,
        skip: Iterable[str | OpOverload] = (),
        fallback: str = "cpu",
        in_place: bool = True,
        state_update: str = "auto",
        state_dtype: Mapping[str, torch.dtype] | None = None,
    ) -> None:
        super().__init__()
        if fallback not in ("cpu", "error"):
            raise ValueError(f"fallback is 'cpu' or 'error', not {fallback!r}")
        self.target = target if isinstance(target, Target) else Target(target)
        self.options = CompileOptions(
            self.target.name,
            None if qnn_libraries is None else os.fspath(qnn_libraries),
            in_place,
            state_update,
            dict(state_dtype or {}),
        )
        self.skip = set(skip)
        self.fallback = fallback
        self.refused: dict[str, str] = {}
        """Node name to QNN's reason, for nodes that a failed compilation has ruled out."""
        self.epochs: dict[str, float] = {}
        """Node name to its place in a partition that had to be split; 0 for all others."""
        self.data: Mapping[str, torch.Tensor] | None = None
        self.states: Mapping[str, str] | None = None
        """Names of the program's state buffers in this method, and of their slots."""
        self.ordered = False
        """Buffers may lie in several partitions: the graph has passed `guard_updates`, and the
        delegates are called in the order of `plan`."""
        self.stored: Mapping[str, QuantType] | None = None
        """The slots that are stored quantized; as this program alone has it if `None`."""
        self.staged: dict[str, str] = {}
        """Buffers that delegates own although the CPU touches them, through copies; and why."""
        self.prefix = "qnn"
        """What the names of partitions begin with."""
        self.worker: CompileWorker | None = None
        """An open worker that compiles what is tagged; a new one is started if `None`."""
        self.plan = Plan()

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], None]:
        """The composite ops of this program that are delegated whole, wherever they occur."""
        kept = {op for op, row in table().items() if row.keep}
        nodes = [n for n in ep.graph.nodes if n.op == "call_function" and aten_op(n.target) in kept]
        wanted = {op for n in nodes if (op := aten_op(n.target)) is not None}
        with CompileWorker(self.target, self.options.qnn_libraries) as worker:
            support = Support(ep.graph, known_tensors(ep, self._states(ep), self.data), worker)
            for node, reason in support.verdicts(nodes).items():
                op = aten_op(node.target)
                if reason and op is not None:
                    wanted.discard(op)
        return sorted(wanted, key=str), None

    def partition(self, ep: ExportedProgram) -> PartitionResult:
        """Tags the nodes of `ep`; changes nothing else of it."""
        with CompileWorker(self.target, self.options.qnn_libraries) as worker:
            tags = self.tag(ep, worker)
        if self.fallback == "error":
            refuse({"the program": self.plan.cpu_ops})
        return PartitionResult(tagged_exported_program=ep, partition_tags=tags)

    def tag(self, ep: ExportedProgram, worker: CompileWorker) -> dict[str, DelegationSpec]:
        """Tags every node that is delegated; see `plan` for the rest."""
        states = self._states(ep)
        types = slot_types({"": ep}, {"": states}) if self.stored is None else self.stored
        stored = {
            u.old: types[states[u.fqn]] for u in updates(ep, states) if states[u.fqn] in types
        }
        support = Support(ep.graph, known_tensors(ep, states, self.data), worker, stored)
        compute = [
            n for n in ep.graph.nodes if n.op == "call_function" and n not in support.constants
        ]
        ups = updates(ep, states)
        reasons = self._verdicts(support, compute)
        hosts = self._hosts(support, compute, ups, reasons)
        shared = [u for u in ups if u.fqn not in hosts] if self.ordered else []
        order = read_before_written(shared)
        levels = _levels(compute, {n for n in compute if reasons[n] is None}, order)
        places = self._places(compute, levels, order)
        support.mark()
        self.plan = Plan()
        names: dict[tuple[int, float], str] = {}
        for node in compute:
            if reasons[node] is None:
                if node in support.in_fp16:
                    self.plan.fp16_ops.append(listed(node, support.in_fp16[node]))
                tag = names.setdefault(places[node], f"{self.prefix}_{len(names)}")
                node.meta[TAG] = tag
                if not is_getitem(node):
                    self.plan.partitions.setdefault(tag, []).append(node.name)
            elif not is_getitem(node) and not is_checked(node) and reasons[node] != _IDLE:
                self.plan.cpu_ops.append(listed(node, reasons[node] or ""))
        _drop_without_inputs(ep, self.plan)
        _tag_constants(support.constants)
        self.plan.cpu_ops += [
            listed(node, _NO_INPUT) for node in constants_left(support.constants, self.ordered)
        ]
        self.plan.cpu_ops += in_bodies(ep.graph)
        for u in ups:
            if u.fqn not in hosts and not self.ordered:
                if why := not_in_one_partition(ep, u):
                    hosts[u.fqn] = why
                else:
                    readers, writer = partitions_of(u)
                    u.old.meta[TAG] = writer or readers[0]
            self._own(ep, u, states[u.fqn], hosts.get(u.fqn))
        for u in shared:
            readers, writer = partitions_of(u)
            if writer is not None:
                self.plan.order.update((r, writer) for r in readers if r != writer)
        options = dataclasses.replace(
            self.options, states=states, worker=self.worker, agreed=self.ordered
        )
        spec = DelegationSpec("QnnDelegate", [options.spec()])
        return dict.fromkeys(self.plan.partitions, spec)

    def _places(
        self, nodes: list[torch.fx.Node], levels: Mapping[torch.fx.Node, int], order: Order
    ) -> dict[torch.fx.Node, tuple[int, float]]:
        """Level and epoch of each node, which is its partition; the pair falls along no edge."""
        places: dict[torch.fx.Node, tuple[int, float]] = {}
        before = _inverted(order)
        for node in nodes:
            if is_getitem(node):
                places[node] = places[_anchor(node)]
                continue
            level, epoch = levels[node], self.epochs.get(node.name, 0.0)
            for n in (*node.all_input_nodes, *before.get(node, ())):
                if n in places and places[n][0] == level:
                    epoch = max(epoch, places[n][1])
            places[node] = level, epoch
        return places

    def _own(self, ep: ExportedProgram, u: Update, slot: str, host: str | None) -> None:
        """Reports the owner of a buffer; of one that nothing touches there is nothing to report."""
        if u.new is None and not u.old.users:
            return
        value = buffer(ep, u.fqn)
        reason = host or self.staged.get(u.fqn) or who_touches(u)
        owner = "host" if host else "delegate"
        shape = tuple(value.shape)
        self.plan.owners.append(Ownership(u.fqn, slot, shape, value.dtype, owner, reason))

    def _states(self, ep: ExportedProgram) -> Mapping[str, str]:
        return state_slots({"": ep})[""] if self.states is None else self.states

    def _verdicts(
        self, support: Support, nodes: list[torch.fx.Node]
    ) -> dict[torch.fx.Node, str | None]:
        """For each node `None` if a delegate can have it, else the reason why not."""
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
        self._settle(support, nodes, reasons)
        return reasons

    def _settle(
        self,
        support: Support,
        nodes: list[torch.fx.Node],
        reasons: dict[torch.fx.Node, str | None],
    ) -> None:
        """A value that cannot cross the boundary keeps its neighbours on its own side."""
        changed = True
        while changed:
            changed = False
            for node in nodes:
                if is_getitem(node):
                    reasons[node] = reasons[_anchor(node)]
                if reasons[node] is None and (why := self._stuck(support, node, reasons)):
                    reasons[node] = why
                    changed = True

    def _hosts(
        self,
        support: Support,
        nodes: list[torch.fx.Node],
        ups: list[Update],
        reasons: dict[torch.fx.Node, str | None],
    ) -> dict[str, str]:
        """Buffers that the CPU touches, and how; their guards go to the CPU as well."""
        hosts: dict[str, str] = {}
        while True:
            found = [
                (u, touch)
                for u in ups
                if u.fqn not in hosts
                and (touch := cpu_touch(u, reasons, self.ordered and u.fqn not in self.staged))
            ]
            if not found:
                return hosts
            for u, touch in found:
                op = aten_op(touch.target) or touch.target
                hosts[u.fqn] = f"{touch.name} ({op}) on the CPU touches it: {reasons[touch]}"
                for node in (*u.readers(), u.new):
                    if node is not None and is_guard(node) and reasons.get(node) is None:
                        reasons[node] = _IDLE
            self._settle(support, nodes, reasons)

    def _stuck(
        self, support: Support, node: torch.fx.Node, reasons: dict[torch.fx.Node, str | None]
    ) -> str | None:
        for source in node.all_input_nodes:
            outside = source not in support.constants and reasons.get(source, "") is not None
            if outside and (why := support.crosses_boundary(source)):
                return f"its input {source.name} must come from outside: {why}"
        return None


def _anchor(node: torch.fx.Node) -> torch.fx.Node:
    """The node that a chain of getitems belongs to."""
    while is_getitem(node):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _inverted(order: Order) -> dict[torch.fx.Node, list[torch.fx.Node]]:
    before: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for node, later in order.items():
        for n in later:
            before.setdefault(n, []).append(node)
    return before


def _levels(
    nodes: list[torch.fx.Node],
    supported: set[torch.fx.Node],
    order: Order,
) -> dict[torch.fx.Node, int]:
    """Numbers such that delegated nodes of one number form a partition without cycles.

    Along every edge, of the data or of `order`, the number does not fall, and it rises where the
    edge crosses between NPU (even numbers) and CPU (odd ones).  Nodes first get the lowest number
    that allows, then move up to their users', so that nobody is cut off from the partition that
    needs him.
    """
    level: dict[torch.fx.Node, int] = {}
    before = _inverted(order)
    for node in nodes:
        earlier = (*node.all_input_nodes, *before.get(node, ()))
        low = max((level[i] for i in earlier if i in level), default=0)
        odd = node not in supported
        level[node] = low if low % 2 == odd else low + 1
    for node in reversed(nodes):
        users = [u for u in (*node.users, *order.get(node, ())) if u in level]
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
        nodes = [n for n in ep.graph.nodes if n.meta.get(TAG) == tag]
        if not any(i.meta.get(TAG) != tag for n in nodes for i in n.all_input_nodes):
            for n in nodes:
                del n.meta[TAG]
                plan.cpu_ops.append(listed(n, _NO_INPUT))
            del plan.partitions[tag]


def _tag_constants(constants: Iterable[torch.fx.Node]) -> None:
    """Tags constant nodes that one partition alone uses, so that they are folded into it."""
    for node in reversed(list(constants)):
        tags = {u.meta.get(TAG) for u in node.users}
        if node.op == "placeholder":
            # ExecuTorch gives every further partition a copy of a constant placeholder, but cannot
            # give one to the program's outputs.
            tags.discard(None)
            if tags and all(u.op != "output" for u in node.users):
                node.meta[TAG] = min(t for t in tags if t is not None)
        elif len(tags) == 1 and None not in tags:
            node.meta[TAG] = tags.pop()
