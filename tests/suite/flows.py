# SPDX-License-Identifier: BSD-3-Clause
"""This project's lowerings as flows of `executorch.backends.test.suite`."""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import Quantize, StageType, ToEdgeTransformAndLower
from executorch.backends.test.suite.flow import TestFlow
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch.export import ExportedProgram

import executorch_qnn as qnn
import executorch_qnn.runtime  # the suite loads programs with ExecuTorch's runtime
from executorch_qnn.quantizer.recipe import RECIPES

TARGET = "SM8650"

lowered: list[dict[str, Any]] = []
"""What there is to say of each lowering with a flow of ours, for the report."""


class _Lower(ToEdgeTransformAndLower):  # type: ignore[misc]
    """The suite's lowering stage, with our entry point."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(partitioners=[qnn.QnnPartitioner(TARGET)], **kwargs)

    def run(
        self, artifact: ExportedProgram, inputs: Any = None, generate_etrecord: bool = False
    ) -> None:
        partitioner = qnn.QnnPartitioner(TARGET)
        start = sum(os.times()[:4])
        self.edge_dialect_program = qnn.to_edge_transform_and_lower(
            artifact, partitioner=[partitioner], generate_etrecord=generate_etrecord
        )
        cpu_s = sum(os.times()[:4]) - start
        graph = self.edge_dialect_program.exported_program().graph_module
        delegates = [m.meta["_delegate_info_meta"] for m in get_lowered_backend_modules(graph)]
        qnn_ops = sum((Counter(d.stats.ops) for d in delegates), Counter[str]())
        lowered.append(
            {
                "delegates": len(delegates),
                "nodes": sum(d.nodes for d in delegates),
                "qnn_ops": dict(qnn_ops),
                "cpu_ops": [str(op) for op in partitioner.plan.cpu_ops],
                "cpu_s": cpu_s,
            }
        )


def _tester(module: torch.nn.Module, inputs: Any, **kwargs: Any) -> Tester:
    stages = Tester.default_stage_classes() | {StageType.TO_EDGE_TRANSFORM_AND_LOWER: _Lower}
    return Tester(module, inputs, stage_classes=stages, **kwargs)


def _quantized(recipe: str) -> TestFlow:
    """In torchao's flow, calibrated by the suite."""

    def stage() -> Quantize:
        return Quantize(quantizer=qnn.QnnQuantizer(recipe, target=TARGET))

    name = f"executorch_qnn_{recipe}"
    return TestFlow(name, "executorch_qnn", _tester, quantize=True, quantize_stage_factory=stage)


FLOWS = {"executorch_qnn": TestFlow("executorch_qnn", "executorch_qnn", _tester)}
FLOWS |= {flow.name: flow for flow in map(_quantized, RECIPES)}
