# SPDX-License-Identifier: BSD-3-Clause
"""This project's lowerings as flows of `executorch.backends.test.suite`."""

from __future__ import annotations

from typing import Any

import torch
from executorch.backends.test.harness import Tester
from executorch.backends.test.harness.stages import StageType, ToEdgeTransformAndLower
from executorch.backends.test.suite.flow import TestFlow
from torch.export import ExportedProgram

import executorch_qnn as qnn
import executorch_qnn.runtime  # the suite loads programs with ExecuTorch's runtime

TARGET = "SM8650"


class _Lower(ToEdgeTransformAndLower):  # type: ignore[misc]
    """The suite's lowering stage, with our entry point."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(partitioners=[qnn.QnnPartitioner(TARGET)], **kwargs)

    def run(
        self, artifact: ExportedProgram, inputs: Any = None, generate_etrecord: bool = False
    ) -> None:
        self.edge_dialect_program = qnn.to_edge_transform_and_lower(
            artifact,
            partitioner=[qnn.QnnPartitioner(TARGET)],
            generate_etrecord=generate_etrecord,
        )


def _tester(module: torch.nn.Module, inputs: Any, **kwargs: Any) -> Tester:
    stages = Tester.default_stage_classes() | {StageType.TO_EDGE_TRANSFORM_AND_LOWER: _Lower}
    return Tester(module, inputs, stage_classes=stages, **kwargs)


FLOWS = {"executorch_qnn": TestFlow("executorch_qnn", "executorch_qnn", _tester)}
