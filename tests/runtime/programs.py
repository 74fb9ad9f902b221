# SPDX-License-Identifier: BSD-3-Clause
"""Programs for the null provider: real `.pte` files whose delegates count instead of computing.

The graph of such a delegate adds one to the first byte of each state and copies its input to its
output, adding one to the first byte (see tests/cpp/null).
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
from executorch.exir import (
    EdgeCompileConfig,
    ExecutorchBackendConfig,
    to_edge_transform_and_lower,
)
from executorch.exir._serialize._named_data_store import NamedDataStore
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx.passes.operator_support import OperatorSupportBase

from executorch_qnn.compile.ir import ScaleOffset
from executorch_qnn.compile.payload import IOEntry, Payload, StateEntry
from executorch_qnn.seal import seal

INT32, INT64, FLOAT32 = 3, 4, 6
QNN_INT32 = 0x032
IN_PLACE, DOUBLE_BUFFER = 0, 1
INT32_IO = IOEntry("x", INT32, QNN_INT32, (1, 4), (1, 4))


def counter(fqn: str = "n", binding: int = IN_PLACE, initial: str = "") -> StateEntry:
    """A state of four int32 that the host sees as int64."""
    return state(fqn, INT64, QNN_INT32, (4,), binding, initial)


def state(
    fqn: str,
    scalar_type: int,
    dtype: int,
    shape: tuple[int, ...],
    binding: int = IN_PLACE,
    initial: str = "",
) -> StateEntry:
    """A state that the graph has in the type in which it is stored."""
    return StateEntry(
        fqn=fqn,
        scalar_type=scalar_type,
        dtype=dtype,
        npu_dtype=dtype,
        shape=shape,
        input_name=f"{fqn}_in",
        output_name=f"{fqn}_out",
        binding=binding,
        initial_key=initial,
    )


@dataclass(frozen=True)
class Method:
    """A method whose delegates all have the same states."""

    model: nn.Module
    inputs: tuple[Any, ...]
    states: tuple[StateEntry, ...] = (counter(),)
    io: IOEntry = INT32_IO
    """Its input, and likewise its output."""


@dataclass
class Plan:
    """What the fake backend is to make of each method; `change` tampers with the payload."""

    methods: dict[str, Method]
    data: dict[str, bytes] = field(default_factory=dict)
    change: Callable[[Payload], Payload] = lambda payload: payload
    behaviour: int = 2


def int32(*values: int) -> Tensor:
    """An input of `Step`; zeros by default."""
    return torch.tensor([values or (0, 0, 0, 0)], dtype=torch.int32)


class Step(nn.Module):
    """int32[1, 4] to int32[1, 4]; every add is delegated, and so computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x


class OnBothSides(nn.Module):
    """A delegate between two ops on the CPU."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = torch.bitwise_xor(x, 1)
        y = x + x
        return {"twice": y * 2, "y": y}


class _Adds(OperatorSupportBase):
    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and ".add." in str(node.target)


class NullPartitioner(Partitioner):
    def __init__(self) -> None:
        super().__init__()
        self.delegation = DelegationSpec(NullDelegat.__name__, [])

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        tags = {}
        for partition in generate_partitions_from_list_of_nodes(
            exported_program.graph_module, op_support=_Adds()
        ):
            for node in partition.nodes:
                node.meta["delegation_tag"] = tag = f"tag{partition.id}"
                tags[tag] = self.delegation
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)


def _text(value: str) -> bytes:
    return struct.pack("<I", len(value)) + value.encode()


Row: TypeAlias = tuple[str, int, tuple[int, ...], ScaleOffset | None]


def _tensors(rows: Sequence[Row], first_id: int) -> bytes:
    packed = struct.pack("<I", len(rows))
    for i, (name, dtype, shape, encoding) in enumerate(rows):
        packed += _text(name) + struct.pack("<III", first_id + i, dtype, len(shape))
        packed += struct.pack(f"<{len(shape)}I", *shape)
        packed += struct.pack("<I", 0) if encoding is None else struct.pack("<Ifi", 1, *encoding)
    return packed


def _graph(payload: Payload, behaviour: int) -> bytes:
    states = payload.states
    inputs = [(s.input_name, s.dtype, s.shape, s.encoding) for s in states if s.input_name]
    outputs = [(s.output_name, s.dtype, s.shape, s.encoding) for s in states if s.output_name]
    inputs += [(i.name, i.dtype, i.qnn_shape, i.encoding) for i in payload.inputs]
    outputs += [(o.name, o.dtype, o.qnn_shape, o.encoding) for o in payload.outputs]
    return (
        _text(payload.graph)
        + struct.pack("<I", behaviour)
        + _tensors(inputs, 100)
        + _tensors(outputs, 500)
    )


class NullDelegat(BackendDetails):
    """Its name is as long as the real one's, which takes its place in the finished file.

    ExecuTorch finds backends by name among the subclasses: two of one name in one process would be
    a trap for every other test.
    """

    plan: ClassVar[Plan]

    @staticmethod
    def preprocess(edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        raise NotImplementedError

    @classmethod
    def preprocess_multimethod(
        cls, edge_programs: dict[str, list[ExportedProgram]], compile_specs: Any
    ) -> dict[str, list[PreprocessResult]]:
        payloads = {
            method: [_payload(cls.plan, method, i) for i in range(len(eps))]
            for method, eps in edge_programs.items()
        }
        every = [p for ps in payloads.values() for p in ps]
        context = b"NULLQNN1" + struct.pack("<II", 57, len(every))
        context += b"".join(_graph(p, cls.plan.behaviour) for p in every)
        digest = hashlib.sha256(context).digest()
        results: dict[str, list[PreprocessResult]] = {}
        for method, ps in payloads.items():
            results[method] = []
            for p in ps:
                store = NamedDataStore()
                store.add_named_data("context", context, alignment=64)
                for key, value in cls.plan.data.items():
                    store.add_named_data(key, value, alignment=64)
                p = replace(p, context_sha256=digest, context_size=len(context))
                results[method].append(
                    PreprocessResult(
                        processed_bytes=cls.plan.change(p).pack(),
                        data_store_output=store.get_named_data_store_output(),
                    )
                )
        return results


def _payload(plan: Plan, method: str, index: int) -> Payload:
    io = plan.methods[method].io
    return Payload(
        method=method,
        graph=f"{method}_{index}",
        context_key="context",
        context_sha256=bytes(32),
        context_size=0,
        build_id="v2.null",
        core_api=(2, 40),
        soc_model=57,
        htp_arch=75,
        target="SM8650",
        inputs=(io,),
        outputs=(replace(io, name="y"),),
        states=plan.methods[method].states,
    )


def make_program(path: Path, plan: Plan, sealed: bool = True) -> Path:
    """Writes the `.pte` of a plan."""
    NullDelegat.plan = plan
    programs = {name: torch.export.export(m.model, m.inputs) for name, m in plan.methods.items()}
    edge = to_edge_transform_and_lower(
        programs,
        partitioner={name: [NullPartitioner()] for name in programs},
        # ExecuTorch knows no addition of uint16; nobody is going to add.
        compile_config=EdgeCompileConfig(_check_ir_validity=False),
    )
    program = edge.to_executorch(ExecutorchBackendConfig(emit_mutable_buffer_names=True)).buffer
    with path.open("w+b") as file:
        file.write(program.replace(b"NullDelegat", b"QnnDelegate"))
        if sealed:
            seal(file)
    return path


def main(folder: Path) -> None:
    """Writes what the C++ tests run: programs with states of three kinds, one of them fails."""
    states = (counter("d", DOUBLE_BUFFER), counter("k", initial="k"), counter("n"))
    method = Method(Step(), (int32(),), states)
    data = {"k": struct.pack("<4i", 9, -1, 3, 0)}
    make_program(folder / "api.pte", Plan({"prefill": method, "decode": method}, data))
    make_program(folder / "other.pte", Plan({"forward": method}, data))
    make_program(folder / "failing.pte", Plan({"forward": method}, data, behaviour=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
