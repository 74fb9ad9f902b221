# SPDX-License-Identifier: BSD-3-Clause
"""ExecuTorch's ahead-of-time face of the backend: partitions in, payloads and named data out."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from executorch.exir._serialize._cord import FileBackedData
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.compile_spec_schema import CompileSpec
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.tensor import scalar_type_enum
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from ..aliasing.slots import identity, tensors
from ..errors import LoweringError
from ..target import Target
from .build import IO, Built, State, build, wide_slots
from .compiler import CompileWorker
from .ir import NUMPY, DType
from .messages import GraphStats
from .payload import Binding, IOEntry, Payload, StateEntry

_DATA_ALIGNMENT = 64

# A call that no output depends on may still store state, so that no pass may drop it.
torch.fx.node.has_side_effect(executorch_call_delegate)


@dataclass(frozen=True)
class CompileOptions:
    """What a partition is compiled for and how.

    Attributes:
        target: name of the SoC; the only part that is stored in the program.
        qnn_libraries: folder of the QNN libraries on this machine.
        in_place, state_update, states: see `compile.build.build`.
        state_dtype: slot to `torch.float16` or `torch.float32`, where the rule of
            `compile.precision` is not to decide.
        worker: an open one for this target; a new one is started when `None`.
        agreed: `states` holds what any method of the program writes, and delegates own what methods
            share; otherwise it holds what this method writes.
    """

    target: str
    qnn_libraries: str | None = None
    in_place: bool = True
    state_update: str = "auto"
    state_dtype: Mapping[str, torch.dtype] = field(default_factory=dict)
    states: Mapping[str, str] | None = None
    worker: CompileWorker | None = None
    agreed: bool = False

    def spec(self) -> CompileSpec:
        """As ExecuTorch carries it: local settings travel on the object, not in the file."""
        spec = CompileSpec("target", self.target.encode())
        spec.options = self
        return spec

    @staticmethod
    def of(specs: list[CompileSpec]) -> CompileOptions:
        for spec in specs:
            if spec.key == "target":
                options = getattr(spec, "options", None)
                return options or CompileOptions(bytes(spec.value).decode())
        raise ValueError("the partition has no compile spec 'target'; use QnnPartitioner")


@dataclass(frozen=True)
class DelegateInfo:
    """What the report says of one delegate."""

    method: str
    graph: str
    nodes: int
    stats: GraphStats
    inputs: tuple[IO, ...]
    outputs: tuple[IO, ...]
    states: tuple[State, ...]
    context_key: str
    context_bytes: int
    static_bytes: int
    compile_cpu_s: float

    @property
    def in_place_pairs(self) -> frozenset[tuple[int, int]]:
        """Which inputs and outputs may be one memory; see `aliasing.alias_sets.in_place_pairs`.

        The delegate converts such outputs when the graph is done; the others QNN writes itself,
        while it may still read inputs.
        """
        converted = [
            j
            for j, io in enumerate(self.outputs)
            if io.encoding or torch.empty(0, dtype=io.torch_dtype).numpy().dtype != NUMPY[io.dtype]
        ]
        return frozenset(itertools.product(range(len(self.inputs)), converted))


class QnnDelegate(BackendDetails):  # type: ignore[misc]
    """Compiles all partitions of all methods of a program into one context binary."""

    @classmethod
    def copy_exported_program_for_preprocess(
        cls, edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> ExportedProgram:
        """The program itself: nothing here writes to it, and a copy would double the weights."""
        return edge_program

    @staticmethod
    def preprocess(
        edge_program: ExportedProgram, compile_specs: list[CompileSpec]
    ) -> PreprocessResult:
        """Compiles one partition.  See `preprocess_multimethod`."""
        results = QnnDelegate.preprocess_multimethod(
            {"forward": [edge_program]}, {"forward": [compile_specs]}
        )
        return results["forward"][0]

    @classmethod
    def preprocess_multimethod(
        cls,
        edge_programs: dict[str, list[ExportedProgram]],
        compile_specs: dict[str, list[list[CompileSpec]]],
    ) -> dict[str, list[PreprocessResult]]:
        """Compiles every partition of every method into one context binary.

        Raises:
            LoweringError: a node or a graph is refused by QNN, or methods that were partitioned
                without knowing of each other share state that they see in different places.
            LibraryNotFound: there is no QNN library.
        """
        options = next(CompileOptions.of(s) for specs in compile_specs.values() for s in specs)
        if not options.agreed:
            _refuse_split_state(edge_programs, compile_specs)
        wide: set[str] = set()
        for method, eps in edge_programs.items():
            for ep, specs in zip(eps, compile_specs[method], strict=True):
                wide |= wide_slots(ep, CompileOptions.of(specs).states, options.state_dtype)
        built = {
            method: [
                build(
                    ep,
                    _graph_name(method, i, ep),
                    states=CompileOptions.of(specs).states,
                    in_place=options.in_place,
                    state_update=options.state_update,
                    wide=wide,
                )
                for i, (ep, specs) in enumerate(zip(eps, compile_specs[method], strict=True))
            ]
            for method, eps in edge_programs.items()
        }
        target = Target(options.target)
        graphs = [b.graph for bs in built.values() for b in bs]
        static_bytes = {g.name: _static_bytes(g.tensors) for g in graphs}
        fd, path = tempfile.mkstemp(prefix="executorch-qnn-", suffix=".bin")
        os.close(fd)
        try:
            with contextlib.ExitStack() as stack:
                worker = options.worker or stack.enter_context(
                    CompileWorker(target, options.qnn_libraries)
                )
                compiled = worker.compile(graphs, path)
                opened = worker.opened
            context = FileBackedData(path, cleanup=True, sha256=compiled.sha256)
        except BaseException:
            Path(path).unlink()
            raise
        key = f"qnn_context_{compiled.sha256.hex()[:32]}"
        results: dict[str, list[PreprocessResult]] = {}
        for method, partitions in built.items():
            results[method] = []
            for b, ep in zip(partitions, edge_programs[method], strict=True):
                store = NamedDataStore()
                store.add_named_data(key, context, alignment=_DATA_ALIGNMENT)
                payload = Payload(
                    method=method,
                    graph=b.graph.name,
                    context_key=key,
                    context_sha256=compiled.sha256,
                    context_size=compiled.size,
                    build_id=opened.build_id,
                    core_api=(opened.core_api[0], opened.core_api[1]),
                    soc_model=target.soc_model,
                    htp_arch=target.htp_arch,
                    target=target.name,
                    inputs=tuple(_io_entry(io) for io in b.inputs),
                    outputs=tuple(_io_entry(io) for io in b.outputs),
                    states=tuple(_state_entry(s, store) for s in b.states),
                )
                info = DelegateInfo(
                    method,
                    b.graph.name,
                    sum(n.op == "call_function" for n in ep.graph_module.graph.nodes),
                    compiled.graphs[b.graph.name],
                    b.inputs,
                    b.outputs,
                    b.states,
                    key,
                    compiled.size,
                    static_bytes[b.graph.name],
                    compiled.cpu_s,
                )
                results[method].append(
                    PreprocessResult(
                        processed_bytes=payload.pack(),
                        debug_handle_map={},
                        data_store_output=store.get_named_data_store_output(),
                        _delegate_info_meta=info,
                    )
                )
        return results


def _refuse_split_state(
    edge_programs: Mapping[str, list[ExportedProgram]],
    compile_specs: Mapping[str, list[list[CompileSpec]]],
) -> None:
    """Finds buffers that methods share and that are not in one place in all of them.

    In ExecuTorch's own flow each method is partitioned alone: a buffer that another method writes
    looks like a constant there, or stays in that method's own memory on the CPU.

    Raises:
        LoweringError: it names the buffer and the methods.
    """
    written: dict[str, set[str]] = {}
    delegated: dict[str, dict[str, object]] = {}
    for method, eps in edge_programs.items():
        states = [CompileOptions.of(specs).states or {} for specs in compile_specs[method]]
        written[method] = {fqn for s in states for fqn in s}
        delegated[method] = {
            spec.target or "": identity(t)
            for ep in eps
            for spec, t in tensors(ep)
            if spec.kind is InputKind.BUFFER
        }
    for a, b in itertools.permutations(edge_programs, 2):
        for fqn in written[a]:
            place = delegated[a].get(fqn)
            for name, other in delegated[b].items():
                same = name == fqn or (place is not None and other == place)
                shared = name == fqn and place is not None and name in written[b]
                if same and not shared:
                    raise LoweringError(
                        f"the methods {a!r} and {b!r} share a mutable buffer, {fqn!r} in one and "
                        f"{name!r} in the other, but were partitioned alone: what {a!r} writes "
                        f"{'on the CPU' if place is None else 'in a delegate'} would not be seen "
                        f"in {b!r}. Use executorch_qnn.lower with all methods in one call"
                    )


def _graph_name(method: str, index: int, ep: ExportedProgram) -> str:
    """The name of a method's partition: its tag, where `lower` made it."""
    tags = (n.meta.get("delegation_tag", "") for n in ep.graph.nodes if n.op == "call_function")
    tag = str(next(tags, ""))
    return tag if tag.startswith(f"{method}_") else f"{method}_{index}"


def _static_bytes(tensors: list[Any]) -> int:
    return sum(t.nbytes for t in tensors if t.data is not None)


def scalar_type(dtype: torch.dtype) -> int:
    """ExecuTorch's number of a torch dtype."""
    return int(scalar_type_enum(dtype))


def _io_entry(io: IO) -> IOEntry:
    return IOEntry(
        io.name,
        scalar_type(io.torch_dtype),
        int(io.dtype),
        io.shape,
        io.qnn_shape,
        io.encoding,
    )


def _state_entry(state: State, store: NamedDataStore) -> StateEntry:
    key = ""
    if state.initial is not None:
        data = state.initial.tobytes()
        key = f"qnn_state_{hashlib.sha256(data).hexdigest()[:32]}"
        store.add_named_data(key, data, alignment=_DATA_ALIGNMENT)
    return StateEntry(
        state.fqn,
        scalar_type(state.torch_dtype),
        int(state.dtype),
        int(state.npu_dtype),
        state.shape,
        state.input,
        state.output,
        int(state.binding),
        key,
        state.encoding,
        state.rows,
        state.scale,
    )


__all__ = ["Binding", "Built", "CompileOptions", "DType", "DelegateInfo", "QnnDelegate"]
