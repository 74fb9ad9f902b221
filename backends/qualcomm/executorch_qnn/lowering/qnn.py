# SPDX-License-Identifier: BSD-3-Clause
"""The turn of QNN's partitioners: all methods at once, compiled into one context binary."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

import torch
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch.export import ExportedProgram

from ..aliasing.updates import is_guard, read_copy, refresh_outputs, updates
from ..compile.build import constant_nodes, constant_tensors
from ..compile.compiler import CompileWorker, GraphRefused
from ..errors import LoweringError
from ..partition import Ownership, Plan, QnnPartitioner
from ..partition.encodings import slot_types
from .delegates import dense_boundaries, order_calls
from .inputs import one_input_each, own_inputs
from .stages import Stages

_MAX_SPLITS = 64


class _Tagged(Partitioner):  # type: ignore[misc]
    """Hands ExecuTorch the tags that were decided before."""

    def __init__(self, tags: dict[str, DelegationSpec]) -> None:
        super().__init__()
        self.tags = tags

    def partition(self, ep: ExportedProgram) -> PartitionResult:
        return PartitionResult(tagged_exported_program=ep, partition_tags=self.tags)


class QnnTurn:
    """Delegates programs that have passed `guard_updates` to QNN.

    Args:
        given: method to the caller's partitioner, whose `plan` is set; it may be the same for all.
        slots: method to the slots of its state, of all methods of the program.
        open_node: opens a node of a method where that is possible and nobody else wants it.

    Raises:
        LoweringError: the partitioners do not agree, or name state that there is not.
    """

    def __init__(
        self,
        given: Mapping[str, QnnPartitioner],
        slots: Mapping[str, Mapping[str, str]],
        open_node: Callable[[str, torch.fx.Node], bool],
        stage: Stages,
    ) -> None:
        self.given = given
        self.slots = slots
        self.open_node = open_node
        self.stage = stage
        first = next(iter(given.values()))
        self.target, self.qnn_libraries = first.target, first.options.qnn_libraries
        if any(p.options != first.options for p in given.values()):
            raise LoweringError(
                "the methods have QnnPartitioners with different options: they are compiled into "
                "one context binary; give all of them one partitioner"
            )
        known = {slot for of in slots.values() for slot in of.values()}
        for fqn in first.options.state_dtype.keys() - known:
            raise LoweringError(
                f"state_dtype: there is no mutable buffer {fqn!r}; the model has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        self.partitioners = {name: copy.copy(p) for name, p in given.items()}
        for name, p in self.partitioners.items():
            p.prefix, p.ordered, p.states = name, True, slots[name]
            p.refused, p.epochs, p.staged, p.plan = {}, {}, {}, Plan()

    def run(self, programs: Mapping[str, ExportedProgram]) -> dict[str, ExportedProgram]:
        """The programs with delegates in them."""
        with CompileWorker(self.target, self.qnn_libraries) as worker:
            stored = slot_types(programs, self.slots)
            for name, p in self.partitioners.items():
                p.worker, p.data = worker, programs[name].state_dict
                p.stored = stored
            lowered = self._run(worker, programs)
        for name, p in self.partitioners.items():
            self.given[name].plan = p.plan
        return lowered

    def _run(
        self, worker: CompileWorker, programs: Mapping[str, ExportedProgram]
    ) -> dict[str, ExportedProgram]:
        for _ in range(_MAX_SPLITS):
            with self.stage("partition"):
                tags = {name: self._partition(name, ep, worker) for name, ep in programs.items()}
                for name in _stage_shared(programs, self.partitioners):
                    tags[name] = self._partition(name, programs[name], worker)
                _stage_shared(programs, self.partitioners)
                for name, ep in programs.items():
                    p = self.partitioners[name]
                    _share_constants(ep, p)
                    own_inputs(ep, p.plan, p.states or ())
                    dense_boundaries(ep)
            spec = MethodProgramsPartitionerSpec(
                dict(programs), {name: _Tagged(t) for name, t in tags.items()}
            )
            try:
                with self.stage("compile"):
                    lowered = dict(to_backend(spec))
                for name, ep in lowered.items():
                    order_calls(ep, self.partitioners[name].plan)
                return lowered
            except GraphRefused as e:
                self._split(e)
        raise LoweringError(f"QNN refused the model even when it was cut into {_MAX_SPLITS} pieces")

    def _partition(
        self, name: str, ep: ExportedProgram, worker: CompileWorker
    ) -> dict[str, DelegationSpec]:
        """Tags `ep`; what nobody takes is opened and its pieces are offered."""
        one_input_each(ep)
        whole: set[str] = set()
        while True:
            for node in ep.graph.nodes:
                node.meta.pop("delegation_tag", None)
            tags = self.partitioners[name].tag(ep, worker)
            opened = False
            for node in list(ep.graph.nodes):
                if node.op != "call_function" or "delegation_tag" in node.meta:
                    continue
                if node.name in whole:
                    continue
                try:
                    opened |= self.open_node(name, node)
                except LoweringError:
                    whole.add(node.name)
            if not opened:
                return tags
            ep.graph_module.graph.eliminate_dead_code()
            refresh_outputs(ep)
            ep.graph_module.recompile()

    def _split(self, refused: GraphRefused) -> None:
        """Cuts the partition behind a refused graph in two; a single node goes to the CPU."""
        found = [p for p in self.partitioners.values() if refused.graph in p.plan.partitions]
        if not found:
            raise refused
        (p,) = found
        names = p.plan.partitions[refused.graph]
        if len(names) == 1:
            p.refused[names[0]] = f"QNN's compiler refuses it: {refused.reason}"
            return
        low = max(p.epochs.get(n, 0.0) for n in names)
        above = [e for e in p.epochs.values() if e > low]
        high = min(above, default=low + 1.0)
        for name in names:
            p.epochs[name] = low
        for name in names[len(names) // 2 :]:
            p.epochs[name] = (low + high) / 2


def _stage_shared(
    programs: Mapping[str, ExportedProgram], partitioners: Mapping[str, QnnPartitioner]
) -> list[str]:
    """Gives delegates the state that methods share and that the CPU touches in some of them.

    ExecuTorch gives each method memory of its own, so that state of several methods can only live
    in delegates: there the CPU reads a copy, and what it computes is copied into the slot.

    Returns:
        The methods that must be partitioned again.

    Raises:
        LoweringError: no delegate can hold such a buffer, not even as a copy.
    """
    uses: dict[str, list[tuple[str, Ownership]]] = {}
    for method, p in partitioners.items():
        for o in p.plan.owners:
            uses.setdefault(o.slot, []).append((method, o))
    again = []
    for slot, owners in uses.items():
        for method, o in owners if len(owners) > 1 else ():
            p, ep = partitioners[method], programs[method]
            if o.owner != "host":
                continue
            if o.fqn in p.staged:
                raise LoweringError(
                    f"the mutable buffer {slot!r} ({o.dtype}{list(o.shape)}) is shared by the "
                    f"methods {', '.join(repr(m) for m, _ in owners)}, and methods share state "
                    f"only inside of delegates, but none can hold it in {method!r}: {o.reason}. "
                    "Keep it in a type that QNN holds (float16, float32, int32, int64 or bool), "
                    "or lower the methods without sharing it"
                )
            p.staged[o.fqn] = (
                f"methods share it: copied between its slot and the CPU, as {o.reason}"
            )
            (u,) = updates(ep, {o.fqn})
            on_cpu = [n for n in u.readers() if "delegation_tag" not in n.meta and not is_guard(n)]
            if on_cpu:
                read_copy(ep.graph, u.old, on_cpu)
                ep.graph_module.recompile()
            again.append(method)
    return list(dict.fromkeys(again))


def _share_constants(ep: ExportedProgram, partitioner: QnnPartitioner) -> None:
    """Gives each partition its own copy of the nodes that compute a constant it uses.

    Constants are folded where they are used; a copy costs a node now and no byte later, because
    equal constants become one static tensor.
    """
    assert partitioner.states is not None
    constants = constant_nodes(ep.graph, set(constant_tensors(ep, partitioner.states)))
    graph = ep.graph_module.graph
    for node in reversed(list(constants)):
        if node.op == "placeholder" or "delegation_tag" in node.meta:
            continue
        for tag in {u.meta["delegation_tag"] for u in node.users if "delegation_tag" in u.meta}:
            with graph.inserting_before(node):
                copy = graph.node_copy(node)
            copy.meta = {**node.meta, "delegation_tag": tag}
            for user in list(node.users):
                if user.meta.get("delegation_tag") == tag:
                    user.replace_input_with(node, copy)
        if not node.users:
            graph.erase_node(node)
    ep.graph_module.recompile()
