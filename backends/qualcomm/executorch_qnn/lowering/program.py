# SPDX-License-Identifier: BSD-3-Clause
"""A lowered program: saves itself as a `.pte`, and reports what became of the model."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from executorch.exir import EdgeProgramManager, ExecutorchProgramManager
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from ..aliasing import buffer
from ..compile.backend import DelegateInfo
from ..errors import LoweringError
from ..files import replaced
from ..partition import Ownership, Plan, QnnPartitioner
from ..report import DelegateReport, MethodReport, OpReport, Report, StateReport
from ..seal import seal
from .decompose import plain_spec

if TYPE_CHECKING:
    from ..quantizer import QuantRecipe
    from ..quantizer.encodings import Encodings

META_KEY = "executorch_qnn.meta"


@dataclass(frozen=True)
class Origin:
    """What a program was lowered from, and how: what `compare` starts from.

    Attributes:
        exported: method to its exported program before quantization.
        quantize: as `lower` takes it.
    """

    exported: Mapping[str, ExportedProgram]
    partitioner: QnnPartitioner
    quantize: QuantRecipe | str | None = None


class Program:
    """What `lower` returns.

    Attributes:
        edge: ExecuTorch's manager of the delegated program.
        fake_quantized: `{method: module}` for a quantized program, else `None`.
        found_encodings: what `encodings()` writes, likewise.
        origin: what it was lowered from.
        variants: method to those that are the same for inputs of other sizes.
        slots: method to its mutable buffers, and the slots that they are.
        starts: slot to the value that it starts from, where that is not zero.
    """

    def __init__(
        self,
        edge: EdgeProgramManager,
        exported: Mapping[str, ExportedProgram],
        plans: Mapping[str, Plan],
        origin: Origin,
        cpu_s: Mapping[str, float],
        retraces: Mapping[str, int],
        variants: Mapping[str, list[str]],
    ) -> None:
        self.edge = edge
        self.origin = origin
        self.target = origin.partitioner.target
        self.fake_quantized: Mapping[str, torch.nn.Module] | None = None
        self.found_encodings: Encodings | None = None
        self._exported = exported
        self._plans = plans
        self._cpu_s = dict(cpu_s)
        self._retraces = dict(retraces)
        self.variants = variants
        self.slots = {name: {o.fqn: o.slot for o in plan.owners} for name, plan in plans.items()}
        # Copies: the model may be run after this, and owns these tensors.
        self.starts = {
            slot: value.detach().clone()
            for name, slots in self.slots.items()
            for fqn, slot in slots.items()
            if (value := buffer(exported[name], fqn)).any()
        }
        edge._named_data_store.add_named_data(META_KEY, self._meta())
        self.executorch: ExecutorchProgramManager = edge.to_executorch()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the `.pte`, sealed; an existing file is replaced only by a complete one."""
        with replaced(Path(path)) as f:
            self.executorch.write_to_file(f)
            seal(f)

    def encodings(self) -> dict[str, Any]:
        """Scales and offsets of all that is quantized, as AIMET's JSON has them, version 1.0.0.

        Values have the names of their nodes in `fake_quantized`, parameters and buffers their own.

        Raises:
            LoweringError: the program was not quantized by `lower`.
        """
        recipe = self.origin.quantize
        if self.found_encodings is None or recipe is None:
            raise LoweringError("the program has no encodings: it was not lowered with quantize=")
        return self.found_encodings.to_json(recipe)

    def save_encodings(self, path: str | os.PathLike[str]) -> None:
        """Writes `encodings()` to a file that `lower(encodings=...)` and AIMET's tools read."""
        text = json.dumps(self.encodings())
        with replaced(Path(path)) as f:
            # A line for each tensor, to be read by people, too.
            f.write(text.replace('{"name"', '\n{"name"').encode())

    @cached_property
    def delegates(self) -> dict[str, list[DelegateInfo]]:
        """What each method's delegates are, in the order of their calls."""
        found: dict[str, list[DelegateInfo]] = {}
        for name in self.edge.methods:
            modules = get_lowered_backend_modules(self.edge.exported_program(name).graph_module)
            found[name] = [
                m.meta["_delegate_info_meta"] for m in modules if m.backend_id == "QnnDelegate"
            ]
        return found

    @cached_property
    def report(self) -> Report:
        """What was delegated, what runs on the CPU and why, where each mutable buffer lives."""
        methods = {name: self._method(name, infos) for name, infos in self.delegates.items()}
        compile_s = max((i.compile_cpu_s for m in self.delegates.values() for i in m), default=0.0)
        return Report(self.target.name, methods, self._cpu_s, compile_s)

    def _method(self, name: str, infos: list[DelegateInfo]) -> MethodReport:
        plan = self._plans[name]
        delegates = [
            DelegateReport(
                graph=i.graph,
                nodes=i.nodes,
                qnn_ops=sum(i.stats.ops.values()),
                transposes=i.stats.ops.get("Transpose", 0),
                inputs=len(i.inputs),
                outputs=len(i.outputs),
                states=len(i.states),
                finalize_s=i.stats.finalize_s,
                ddr_read_bytes=i.stats.ddr_read,
                ddr_write_bytes=i.stats.ddr_write,
                static_bytes=i.static_bytes,
                context_bytes=i.context_bytes,
            )
            for i in infos
        ]
        cpu_ops = [OpReport(op.node, op.op, op.reason, op.source) for op in plan.cpu_ops]
        fp16_ops = [OpReport(op.node, op.op, op.reason, op.source) for op in plan.fp16_ops]
        state = [self._state(o, infos) for o in plan.owners]
        return MethodReport(delegates, cpu_ops, fp16_ops, state, self._retraces[name])

    def _state(self, owner: Ownership, infos: list[DelegateInfo]) -> StateReport:
        dtype = str(owner.dtype).removeprefix("torch.")
        found = [s for i in infos for s in i.states if s.fqn == owner.slot]
        if found:
            s = next((s for s in found if s.output), found[0])  # the one that writes it, if any
            return StateReport(
                fqn=s.fqn,
                shape=s.shape,
                dtype=dtype,
                stored=s.dtype.name.lower(),
                nbytes=math.prod(s.shape) * s.dtype.itemsize,
                owner="delegate",
                binding=s.binding.name.lower(),
                reason=f"{owner.reason}; {s.why}",
            )
        return StateReport(
            fqn=owner.fqn,
            shape=owner.shape,
            dtype=dtype,
            stored=dtype,
            nbytes=math.prod(owner.shape) * owner.dtype.itemsize,
            owner=owner.owner,
            binding="",
            reason=owner.reason,
        )

    def _meta(self) -> bytes:
        methods = {
            name: {
                "in_spec": pytree.treespec_dumps(ep.call_spec.in_spec),
                "out_spec": pytree.treespec_dumps(plain_spec(ep.call_spec.out_spec)),
                "variants": self.variants.get(name, []),
            }
            for name, ep in self._exported.items()
        }
        recipe = self.origin.quantize
        about = {
            "version": 1,
            "target": self.target.name,
            "quantize": recipe if recipe is None or isinstance(recipe, str) else "recipe",
            "methods": methods,
        }
        return json.dumps(about).encode()
