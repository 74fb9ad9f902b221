# SPDX-License-Identifier: BSD-3-Clause
"""Programs of several methods on their way to delegates, for any ExecuTorch partitioners.

1. One functionalising retrace per method, none if its graph is functional already.
2. Every partitioner says once which nodes it wants whole (`wishes`); all others are decomposed,
   node by node.
3. Buffer updates become one parallel assignment in the graph (`guard_updates`).
4. Partitioners have their turns.  `QnnPartitioner`s see all methods at once, and in ATen dialect
   when they come first; the others see the edge dialect, one method at a time, and what they may
   not own of the state is taken from them.  A node that was kept whole for a partitioner that did
   not take it is opened, and its pieces are offered to those that follow.
5. One pass to the edge dialect, over what is not in delegates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from executorch.exir.backend.partitioner import Partitioner, PartitionResult
from executorch.exir.program._program import lift_constant_tensor_pass
from torch._export.verifier import SpecViolationError
from torch.export import ExportedProgram

from ..aliasing import state_slots
from ..aliasing.updates import drop_idle_guards, guard_updates, refresh_outputs
from ..compile.build import constant_nodes, constant_tensors
from ..errors import LoweringError
from ..ops.registry import aten_op
from ..partition import Plan, QnnPartitioner
from ..partition.listed import refuse
from ..partition.ownership import keep_shared_state
from .decompose import (
    Opener,
    copied,
    functionalise,
    graphs,
    is_composite,
    rename_inputs,
    to_core,
)
from .delegates import called_by_shape
from .edge import to_edge
from .fold import drop_empty_pieces, fold_constants, scalars_as_constants
from .kernels import (
    can_open,
    check_custom_views,
    check_kernels,
    dense_nonzeros,
    has_kernel,
    right_remainders,
)
from .manager import Manager
from .qnn import QnnTurn
from .sizes import explained
from .stages import Stages
from .wishes import Wishes, twin


class _WithoutSharedState(Partitioner):  # type: ignore[misc]
    """Another backend's partitioner, which leaves state alone that one delegate cannot own."""

    def __init__(self, inner: Partitioner, states: Iterable[str], shared: Iterable[str]) -> None:
        super().__init__()
        self.inner = inner
        self.states = set(states)
        self.shared = set(shared)

    def partition(self, ep: ExportedProgram) -> PartitionResult:
        result = self.inner(ep)
        keep_shared_state(result.tagged_exported_program, self.states, self.shared)
        return result


class Flow:
    """See the module's documentation.

    Args:
        programs: method to exported program; none is changed.
        partitioners: method to its partitioners in the order of their turns.

    Attributes:
        plans: method to what its `QnnPartitioner` decided; empty plans where there is none.
        retraces: method to the number of times that it was retraced.
    """

    def __init__(
        self,
        programs: Mapping[str, ExportedProgram],
        partitioners: Mapping[str, Sequence[Partitioner]],
        config: EdgeCompileConfig,
        *,
        stage: Stages | None = None,
    ) -> None:
        self.programs = dict(programs)
        self.partitioners = {m: list(partitioners.get(m, ())) for m in programs}
        self.config = config
        # While delegates are being made, a graph may be in two dialects; it is verified at the end.
        self._lenient = EdgeCompileConfig(
            _check_ir_validity=False, _skip_dim_order=config._skip_dim_order
        )
        self.stage = stage or Stages()
        self.plans: dict[str, Plan] = {m: Plan() for m in programs}
        self.retraces: dict[str, int] = {}
        self.slots: dict[str, dict[str, str]] = {}
        self.wishes: dict[str, Wishes] = {}
        self.openers: dict[str, Opener] = {}

    def run(
        self,
        transform_passes: Any = None,
        constant_methods: Mapping[str, Any] | None = None,
        before_partitioning: Callable[[EdgeProgramManager], None] | None = None,
    ) -> Manager:
        """Lowers everything.

        Args:
            transform_passes: as for ExecuTorch's `EdgeProgramManager.transform`.
            before_partitioning: is shown the edge programs that nothing is delegated of yet.

        Raises:
            LoweringError, UnsupportedOp, LibraryNotFound: see `lower`.
        """
        with torch.no_grad():
            return self._run(transform_passes, constant_methods or {}, before_partitioning)

    def _run(
        self,
        transform_passes: Any,
        constant_methods: Mapping[str, Any],
        before_partitioning: Callable[[EdgeProgramManager], None] | None,
    ) -> Manager:
        with self.stage("decompose"):
            self._to_core()
        if transform_passes is not None or before_partitioning is not None:
            self._transform(transform_passes, before_partitioning)
        for turn in range(max(map(len, self.partitioners.values()), default=0)):
            having = {m: ps[turn] for m, ps in self.partitioners.items() if turn < len(ps)}
            ours = {m: p for m, p in having.items() if isinstance(p, QnnPartitioner)}
            if ours:
                self._delegate_to_qnn(ours, turn)
            self._delegate({m: p for m, p in having.items() if m not in ours}, turn)
        strict = any(isinstance(p, QnnPartitioner) for ps in self.partitioners.values() for p in ps)
        with self.stage("edge"), called_by_shape(self.programs.values()):
            for name in self.programs:
                self._finish(name)
            self._check_fallback()
            for name in self.programs:
                check_kernels(name, self.programs[name], self.plans[name], strict)
        self._name_slots()
        return Manager(
            self.programs, dict(constant_methods), self.config, self._preserved(), self.plans
        )

    def _check_fallback(self) -> None:
        """Refuses what was left to the CPU by partitioners that are not to leave anything.

        Last, because QNN's compiler can refuse what its validator accepts, and because constants
        are gone now.
        """
        strict = {
            name
            for name, ps in self.partitioners.items()
            if any(isinstance(p, QnnPartitioner) and p.fallback == "error" for p in ps)
        }
        refuse({name: plan.cpu_ops for name, plan in self.plans.items() if name in strict})

    def _name_slots(self) -> None:
        """Gives buffers of the host that methods share one name in all of them."""
        for name, ep in self.programs.items():
            for spec in (*ep.graph_signature.input_specs, *ep.graph_signature.output_specs):
                slot = self.slots[name].get(spec.target or "")
                if slot is None or slot == spec.target:
                    continue
                for data in (ep.state_dict, ep.constants):
                    if spec.target in data:
                        data[slot] = data[spec.target]
                spec.target = slot

    def _to_core(self) -> None:
        for name, given in self.programs.items():
            ep = copied(given)
            for p in self.partitioners[name]:
                ep = p.transform_for_pre_decomposition(ep)
            ep, self.retraces[name] = functionalise(ep)
            wishes = Wishes(ep, self.partitioners[name], self.config.preserve_ops)
            # Equal nodes of all methods that have equal wishes are traced once.
            opener = next((o for o in self.openers.values() if o.keep == wishes.ops), None)
            self.wishes[name], self.openers[name] = wishes, opener or Opener(wishes.ops)
            to_core(ep, self.openers[name], wishes.whole)
            drop_empty_pieces(ep)
            rename_inputs(ep)
            self.programs[name] = ep
        self.slots = state_slots(self.programs)
        self._guard()

    def _guard(self, methods: Iterable[str] | None = None) -> None:
        for name in self.programs if methods is None else methods:
            ep = self.programs[name]
            constants = constant_nodes(ep.graph, set(constant_tensors(ep, self.slots[name])))
            guard_updates(ep, self.slots[name], constants)

    # -- the edge dialect ----------------------------------------------------------------------

    def _is_edge(self, name: str) -> bool:
        """Whether nothing of a program is in ATen dialect any more."""
        return str(self.programs[name].dialect) == "EDGE" and not any(
            isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten"
            for gm in graphs(self.programs[name].graph_module)
            for n in gm.graph.nodes
            if n.op == "call_function"
        )

    def _finish(self, name: str) -> None:
        """Puts right what is left for the CPU, and brings it to the edge dialect."""
        ep, plan = self.programs[name], self.plans[name]
        if ep.dialect != "EDGE":  # other backends know their patterns best
            folded = fold_constants(ep, self.slots[name])
            plan.cpu_ops = [op for op in plan.cpu_ops if op.node not in folded]
        changed = [right_remainders(ep), dense_nonzeros(ep)]
        if any(changed) or not self._is_edge(name):
            self._to_edge(name)

    def _to_edge(self, name: str) -> None:
        ep = self.programs[name]
        check_custom_views(ep)
        drop_idle_guards(ep)
        scalars_as_constants(ep)
        with explained({name: ep}):
            self.programs[name] = to_edge(ep, self._lenient)

    def _preserved(self) -> list[torch._ops.OpOverload]:
        asked = self.config.preserve_ops
        return [*asked, *(t for op in asked if (t := twin(op)) is not None and t is not op)]

    def _transform(self, passes: Any, show: Callable[[EdgeProgramManager], None] | None) -> None:
        with self.stage("edge"):
            for name in self.programs:
                self._to_edge(name)
        edge = EdgeProgramManager(self.programs, None, self._lenient)
        if show is not None:
            show(edge)
        if passes is not None:
            try:
                edge = edge.transform(passes)
            except SpecViolationError as e:
                # One value cannot be returned as the new value of two buffers.
                raise LoweringError(
                    f"a transform pass made a program that cannot be: {e}. If it removes clones, "
                    "exclude those that are returned"
                ) from e
        self.programs = {
            name: lift_constant_tensor_pass(edge.exported_program(name)) for name in self.programs
        }
        # A pass may have dropped clones that guard an old value.
        self._guard()

    # -- other backends ------------------------------------------------------------------------

    def _delegate(self, partitioners: Mapping[str, Partitioner], turn: int) -> None:
        for name, partitioner in partitioners.items():
            with self.stage("edge"), called_by_shape(self.programs.values()):
                if not self._is_edge(name):
                    self._to_edge(name)
            states = self.slots[name]
            uses = [slot for of in self.slots.values() for slot in of.values()]
            shared = {fqn for fqn, slot in states.items() if uses.count(slot) > 1}
            wrapped = _WithoutSharedState(partitioner, states, shared)
            spec = MethodProgramsPartitionerSpec({name: self.programs[name]}, {name: wrapped})
            with self.stage("partition"):
                self.programs.update(to_backend(spec))
            self._open_left(name, turn)

    def _delegate_to_qnn(self, partitioners: Mapping[str, QnnPartitioner], turn: int) -> None:
        if any(self.plans[name].partitions for name in partitioners):
            raise LoweringError("a method has two QnnPartitioners; one takes all that QNN can do")
        at_edge = [name for name in partitioners if self._is_edge(name)]
        self._guard(at_edge)
        for name in partitioners:
            self.wishes[name].done(turn)

        def open_node(name: str, node: torch.fx.Node) -> bool:
            wishes, op = self.wishes[name], aten_op(node.target)
            if op is None or wishes.wanted(node):
                return False
            if not (is_composite(op) if op in wishes.ops else not has_kernel(op) and can_open(op)):
                return False
            self._open(name, self.programs[name].graph_module, node)
            return True

        qnn = QnnTurn(partitioners, self.slots, open_node, self.stage)
        self.programs.update(qnn.run({name: self.programs[name] for name in partitioners}))
        self.plans.update({name: p.plan for name, p in qnn.partitioners.items()})

    def _open_left(self, name: str, turn: int) -> None:
        """Opens what was kept whole for a partitioner that did not take it."""
        wishes, ep = self.wishes[name], self.programs[name]
        wishes.done(turn)
        for gm in graphs(ep.graph_module):
            used = {n.target for n in gm.graph.nodes if n.op in ("get_attr", "call_module")}
            for child in {n for n, _ in gm.named_children()} - used:
                delattr(gm, child)  # in a body, to_backend leaves what it delegated
            for node in wishes.left(gm):
                op = aten_op(node.target)
                view = None if op is None else twin(op)  # what the edge dialect made a copy of
                if view is not None and is_composite(view):
                    node.target = view
                    self._open(name, gm, node)
            gm.graph.eliminate_dead_code()
            gm.recompile()
        refresh_outputs(ep)

    def _open(self, name: str, gm: torch.fx.GraphModule, node: torch.fx.Node) -> None:
        """Opens a node, and what it consists of where nobody wants that whole."""
        opener, wishes = self.openers[name], self.wishes[name]
        for new in opener.open(gm, node):
            kept = new.target in opener.keep and wishes.whole(new)
            if is_composite(new.target) and not kept:
                self._open(name, gm, new)
