# SPDX-License-Identifier: BSD-3-Clause
"""`lower`: export, one functionalising retrace, partition, compile, edge, in this order."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.backend_api import MethodProgramsPartitionerSpec, to_backend
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.program._program import _generate_edge_program
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ..aliasing import state_slots
from ..aliasing.updates import (
    drop_idle_guards,
    guard_updates,
    is_guard,
    read_copy,
    refresh_outputs,
    updates,
)
from ..compile.build import constant_nodes, constant_tensors
from ..compile.compiler import CompileWorker, GraphRefused
from ..errors import LoweringError, UnsupportedOp
from ..ops.registry import aten_op, table
from ..partition import Ownership, QnnPartitioner
from ..target import Target
from .assigned import assignments_written_back
from .decompose import (
    decompositions,
    functionalise,
    open_node,
    rename_inputs,
)
from .delegates import called_by_shape, dense_boundaries, order_calls
from .fold import drop_empty_pieces, fold_constants, scalars_as_constants
from .inputs import one_input_each, own_inputs
from .kernels import can_open, check_kernels, has_kernel, right_remainders
from .program import Program

Module: TypeAlias = torch.nn.Module
Inputs: TypeAlias = Sequence[Any]

_MAX_SPLITS = 64


def lower(
    model: Module | Mapping[str, tuple[Module, Inputs]],
    example_inputs: Inputs | None = None,
    *,
    target: Target | str,
    quantize: str | None = None,
    calibration: Any = None,
    dynamic_shapes: Any = None,
    fallback: str = "cpu",
    state_update: str = "auto",
    state_dtype: Mapping[str, torch.dtype] | None = None,
    constant_methods: Mapping[str, Any] | None = None,
    qnn_libraries: str | os.PathLike[str] | None = None,
    in_place: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """Lowers a model, or several methods over one state, to a program for QNN.

    Args:
        model: a module in eval mode, or `{method: (module, example_inputs)}`.
        example_inputs: of `model`, when that is a module.
        target: the SoC to compile for.
        dynamic_shapes: as for `torch.export`; dimensions that stay dynamic are refused.
        fallback: `"cpu"` runs what QNN refuses on the CPU and reports it; `"error"` raises.
        state_update: how caches are updated that are written in rows at positions given at run
            time: `"scatter"` writes the whole buffer, in place where that is sound; `"delta"` puts
            out the new rows only, and the runtime places them; `"auto"` does what writes less.
        state_dtype: buffer to `torch.float16` or `torch.float32`, the type that it is held in.
            Floats that the model adds up over many calls are held in fp32, all others in fp16 as
            HTP computes; see `compile.precision` for the rule, and the report for what it did.
        constant_methods: methods of the program that return a constant.
        qnn_libraries: folder of the QNN libraries; searched for when `None`.
        in_place: bind state in place where that is sound; `False` gives each buffer two regions.
        progress: called with the name of each stage as it starts.

    Raises:
        UnsupportedOp: with `fallback="error"`, an op would run on the CPU.
        LibraryNotFound: there is no QNN library.
        LoweringError: the model cannot be exported or compiled.
    """
    if fallback not in ("cpu", "error"):
        raise ValueError(f"fallback is 'cpu' or 'error', not {fallback!r}")
    if quantize is not None or calibration is not None:
        raise LoweringError(
            f"quantize={quantize!r} is not supported yet: this version lowers to fp16"
        )
    if state_update not in ("auto", "delta", "scatter"):
        raise ValueError(f"state_update is 'auto', 'delta' or 'scatter', not {state_update!r}")
    state_dtype = dict(state_dtype or {})
    for fqn, dtype in state_dtype.items():
        if dtype not in (torch.float16, torch.float32):
            raise ValueError(f"state_dtype: {fqn} can be held in float16 or float32, not {dtype}")
    methods = _methods(model, example_inputs)
    stage = _Stages(progress)
    target = target if isinstance(target, Target) else Target(target)
    lowering = _Lowering(
        target, qnn_libraries, in_place, state_update, state_dtype, fallback, stage
    )
    with stage("export"):
        exported = {
            name: _export(module, inputs, dynamic_shapes, name)
            for name, (module, inputs) in methods.items()
        }
    for name, ep in exported.items():
        _refuse_dynamic(name, ep, dynamic_shapes)
    return lowering.run(exported, constant_methods or {})


def to_edge_transform_and_lower(
    programs: ExportedProgram | dict[str, ExportedProgram],
    transform_passes: Any = None,
    partitioner: list[Partitioner] | dict[str, list[Partitioner]] | None = None,
    constant_methods: dict[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
    generate_etrecord: bool = False,
) -> EdgeProgramManager:
    """ExecuTorch's entry point of the same name and signature."""
    from executorch.exir import to_edge_transform_and_lower as stock

    return stock(
        programs,
        transform_passes=transform_passes,
        partitioner=partitioner,
        constant_methods=constant_methods,
        compile_config=compile_config,
        generate_etrecord=generate_etrecord,
    )


def _methods(
    model: Module | Mapping[str, tuple[Module, Inputs]], example_inputs: Inputs | None
) -> dict[str, tuple[Module, tuple[Any, ...]]]:
    if isinstance(model, Mapping):
        if not model:
            raise ValueError("there is no method to lower")
        return {name: (module, tuple(inputs)) for name, (module, inputs) in model.items()}
    if example_inputs is None:
        raise ValueError("example_inputs are needed to export a module")
    return {"forward": (model, tuple(example_inputs))}


def _export(
    module: Module, inputs: tuple[Any, ...], dynamic_shapes: Any, name: str
) -> ExportedProgram:
    try:
        with torch.no_grad(), assignments_written_back(module):
            return torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as e:
        raise LoweringError(f"torch.export cannot export method {name!r}: {e}") from e


def _refuse_dynamic(method: str, ep: ExportedProgram, dynamic_shapes: Any) -> None:
    """Raises LoweringError if an input has a dynamic dimension; it names the dimensions."""
    dims = [getattr(d, "__name__", None) for d in pytree.tree_leaves(dynamic_shapes)]
    named = f" ({', '.join(dict.fromkeys(d for d in dims if d))})" if any(dims) else ""
    for node in ep.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        dynamic = [f"{i} ({s})" for i, s in enumerate(value.shape) if not isinstance(s, int)]
        if dynamic:
            raise LoweringError(
                f"input {node.name} of method {method!r} has dynamic dimensions{named}: "
                f"{', '.join(dynamic)}. QNN graphs are static: lower without dynamic_shapes, once "
                "per size, for example as methods of one program"
            )


class _Stages:
    """Names and times the stages of a lowering."""

    def __init__(self, progress: Callable[[str], None] | None) -> None:
        self.progress = progress
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name)
        start = time.process_time()
        try:
            yield
        finally:
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - start


class _Tagged(Partitioner):  # type: ignore[misc]
    """Hands ExecuTorch the tags that were decided before."""

    def __init__(self, tags: dict[str, DelegationSpec]) -> None:
        super().__init__()
        self.tags = tags

    def partition(self, ep: ExportedProgram) -> PartitionResult:
        return PartitionResult(tagged_exported_program=ep, partition_tags=self.tags)


class _Lowering:
    def __init__(
        self,
        target: Target,
        qnn_libraries: str | os.PathLike[str] | None,
        in_place: bool,
        state_update: str,
        state_dtype: Mapping[str, torch.dtype],
        fallback: str,
        stage: _Stages,
    ) -> None:
        self.target = target
        self.qnn_libraries = qnn_libraries
        self.in_place = in_place
        self.state_update = state_update
        self.state_dtype = state_dtype
        self.fallback = fallback
        self.stage = stage
        self.kept = {op for op, row in table().items() if row.keep}

    def run(
        self, exported: dict[str, ExportedProgram], constant_methods: Mapping[str, Any]
    ) -> Program:
        with self.stage("decompose"):
            programs = {}
            for name, ep in exported.items():
                programs[name] = functionalise(ep, self.kept)
                drop_empty_pieces(programs[name])
                rename_inputs(programs[name])
            slots = state_slots(programs)
            for name, ep in programs.items():
                constants = constant_nodes(ep.graph, set(constant_tensors(ep, slots[name])))
                guard_updates(ep, slots[name], constants)
        partitioners = {
            name: QnnPartitioner(
                self.target,
                qnn_libraries=self.qnn_libraries,
                in_place=self.in_place,
                state_update=self.state_update,
                state_dtype=self.state_dtype,
            )
            for name in programs
        }
        known = {slot for of in slots.values() for slot in of.values()}
        for fqn in self.state_dtype.keys() - known:
            raise LoweringError(
                f"state_dtype: there is no mutable buffer {fqn!r}; the model has "
                f"{', '.join(sorted(known)) or 'none'}"
            )
        for name, p in partitioners.items():
            p.prefix, p.ordered, p.states = name, True, slots[name]
            p.data = programs[name].state_dict
        lowered = self._delegate(programs, partitioners)
        with self.stage("edge"), called_by_shape(lowered.values()):
            config = EdgeCompileConfig(_check_ir_validity=False)
            edge = {}
            for name, ep in lowered.items():
                drop_idle_guards(ep)
                folded = fold_constants(ep, slots[name])
                plan = partitioners[name].plan
                plan.cpu_ops = [op for op in plan.cpu_ops if op.node not in folded]
                right_remainders(ep)
                scalars_as_constants(ep)
                edge[name] = _generate_edge_program(config, ep)
                check_kernels(name, edge[name], plan)
            manager = EdgeProgramManager(edge, dict(constant_methods), config)
        plans = {name: p.plan for name, p in partitioners.items()}
        return Program(manager, exported, plans, self.target, self.stage.cpu_s)

    def _delegate(
        self, programs: dict[str, ExportedProgram], partitioners: dict[str, QnnPartitioner]
    ) -> dict[str, ExportedProgram]:
        with CompileWorker(self.target, self.qnn_libraries) as worker:
            for p in partitioners.values():
                p.worker = worker
            try:
                return self._delegate_with(worker, programs, partitioners)
            finally:
                for p in partitioners.values():
                    p.worker = None

    def _delegate_with(
        self,
        worker: CompileWorker,
        programs: dict[str, ExportedProgram],
        partitioners: dict[str, QnnPartitioner],
    ) -> dict[str, ExportedProgram]:
        for _ in range(_MAX_SPLITS):
            with self.stage("partition"):
                tags = {
                    name: self._partition(ep, partitioners[name], worker)
                    for name, ep in programs.items()
                }
                for name in _stage_shared(programs, partitioners):
                    tags[name] = self._partition(programs[name], partitioners[name], worker)
                _stage_shared(programs, partitioners)
                for name, ep in programs.items():
                    _share_constants(ep, partitioners[name])
                    own_inputs(ep, partitioners[name].plan, partitioners[name].states or ())
                    dense_boundaries(ep)
            self._check_fallback(partitioners)
            spec = MethodProgramsPartitionerSpec(
                programs, {name: _Tagged(t) for name, t in tags.items()}
            )
            try:
                with self.stage("compile"):
                    lowered = dict(to_backend(spec))
                for name, ep in lowered.items():
                    order_calls(ep, partitioners[name].plan)
                return lowered
            except GraphRefused as e:
                self._split(e, partitioners)
        raise LoweringError(f"QNN refused the model even when it was cut into {_MAX_SPLITS} pieces")

    def _partition(
        self, ep: ExportedProgram, partitioner: QnnPartitioner, worker: CompileWorker
    ) -> dict[str, DelegationSpec]:
        """Tags `ep`.

        Ops that nobody takes are opened and their pieces offered, if the ops were kept whole before
        or the CPU has no kernel for them.
        """
        one_input_each(ep)
        whole: set[str] = set()
        while True:
            for node in ep.graph.nodes:
                node.meta.pop("delegation_tag", None)
            tags = partitioner.tag(ep, worker)
            left = [
                n
                for n in ep.graph.nodes
                if n.op == "call_function"
                and "delegation_tag" not in n.meta
                and n.name not in whole
                and self._is_to_open(n)
            ]
            if not left:
                break
            for node in left:
                try:
                    open_node(ep.graph_module, node, self.kept)
                except LoweringError:
                    whole.add(node.name)
            ep.graph_module.graph.eliminate_dead_code()
            refresh_outputs(ep)
            ep.graph_module.recompile()
        return tags

    def _is_to_open(self, node: torch.fx.Node) -> bool:
        op = aten_op(node.target)
        if op is None:
            return False
        if op in self.kept:
            return op._can_decompose() or op in decompositions()
        return not has_kernel(op) and can_open(op)

    def _check_fallback(self, partitioners: dict[str, QnnPartitioner]) -> None:
        if self.fallback != "error":
            return
        left = [
            f"  {name}: {op.node} ({op.op}): {op.reason}"
            for name, p in partitioners.items()
            for op in p.plan.cpu_ops
        ]
        if left:
            raise UnsupportedOp(
                "these ops would run on the CPU, and fallback='error' forbids it "
                "(use fallback='cpu' to allow it):\n" + "\n".join(left)
            )

    def _split(self, refused: GraphRefused, partitioners: dict[str, QnnPartitioner]) -> None:
        """Cuts the partition behind a refused graph in two; a single node goes to the CPU."""
        found = [p for p in partitioners.values() if refused.graph in p.plan.partitions]
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
