# SPDX-License-Identifier: BSD-3-Clause
"""The pieces in ExecuTorch's own flow: its entry point, its runtime, our partitioner."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn

import executorch_qnn as qnn


class Mixed(nn.Module):
    """State, kept composite ops, a convolution, a CPU op."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)
        self.c = nn.Conv2d(1, 2, 3)
        self.register_buffer("h", torch.full((1, 6), 0.5))

    def forward(self, x: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        self.h.mul_(0.5).add_(self.l(x))
        y = nn.functional.gelu(self.c(image)).mean((2, 3))
        return torch.softmax(self.h, -1) + 1.0, torch.cosh(y) * 0.5


INPUTS = (torch.linspace(-1, 1, 6).reshape(1, 6), torch.linspace(-2, 2, 64).reshape(1, 1, 8, 8))
RUN = """
import sys, torch
import executorch_qnn
executorch_qnn.register(qnn_libraries=sys.argv[2])
from executorch.runtime import Runtime
programs = [Runtime.get().load_program(sys.argv[1]) for _ in "ab"]
inputs = torch.load(sys.argv[1] + ".in")
results = []
for program in programs:
    method = program.load_method("forward")
    results.append([[t.clone() for t in method.execute(inputs)] for _ in range(3)])
torch.save(results, sys.argv[1] + ".out")
"""


@pytest.mark.parametrize("entry", [to_edge_transform_and_lower, qnn.to_edge_transform_and_lower])
def test_the_stock_runtime_runs_what_the_stock_flow_lowers(
    entry: Callable[..., Any], tmp_path: Path, qnn_libraries: str
) -> None:
    model = Mixed().eval()
    partitioner = qnn.QnnPartitioner("SM8650", qnn_libraries=qnn_libraries)
    edge = entry(torch.export.export(model, INPUTS), partitioner=[partitioner])
    path = tmp_path / "stock.pte"
    path.write_bytes(edge.to_executorch().buffer)
    assert [o.op for o in partitioner.plan.cpu_ops] == ["aten.cosh.default"]
    assert [(o.fqn, o.owner) for o in partitioner.plan.owners] == [("h", "delegate")]

    torch.save(INPUTS, f"{path}.in")
    subprocess.run([sys.executable, "-c", RUN, str(path), qnn_libraries], check=True)
    for instance in torch.load(f"{path}.out"):  # two loads do not share their state
        eager = copy.deepcopy(model)
        for call in instance:
            with torch.no_grad():
                for got, want in zip(call, eager(*INPUTS), strict=True):
                    torch.testing.assert_close(got, want, rtol=4e-3, atol=4e-3)


class Peek(nn.Module):
    """Reads the state of another module, which it sees under its own name or another one."""

    def __init__(self, core: nn.Module, renamed: bool) -> None:
        super().__init__()
        if renamed:
            self.core = core
        else:
            self.register_buffer("h", core.get_buffer("h"))
        self.renamed = renamed

    def forward(self, x: Tensor) -> Tensor:
        return x * 2.0 + (self.core.h if self.renamed else self.h)


class OnCpu(Peek):
    """Writes that state with an op that QNN does not have."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.core.h if self.renamed else self.h
        h.copy_(torch.cosh(h) * 0.1)
        return x * 2.0


@pytest.mark.parametrize(("other", "renamed"), [(Peek, False), (Peek, True), (OnCpu, False)])
def test_state_that_methods_see_in_two_places_is_refused(
    other: type[Peek], renamed: bool, qnn_libraries: str
) -> None:
    core = Mixed().eval()
    methods = {
        "forward": torch.export.export(core, INPUTS),
        "other": torch.export.export(other(core, renamed).eval(), (torch.zeros(1, 6),)),
    }
    partitioners = {
        name: [qnn.QnnPartitioner("SM8650", qnn_libraries=qnn_libraries)] for name in methods
    }
    with pytest.raises(qnn.LoweringError, match=r"executorch_qnn\.lower with all methods"):
        to_edge_transform_and_lower(methods, partitioner=partitioners)


def test_state_that_several_delegates_write_is_shared_in_the_stock_flow(
    tmp_path: Path, qnn_libraries: str
) -> None:
    core = Mixed().eval()
    image = torch.linspace(-1, 1, 64).reshape(1, 1, 8, 8)
    methods = {
        "one": torch.export.export(core, INPUTS),
        "two": torch.export.export(core, (torch.ones(1, 6), image)),
    }
    partitioner = qnn.QnnPartitioner("SM8650", qnn_libraries=qnn_libraries)
    edge = to_edge_transform_and_lower(methods, partitioner=[partitioner])
    path = tmp_path / "stock.pte"
    path.write_bytes(edge.to_executorch().buffer)
    session, eager = qnn.load(path, qnn_libraries=qnn_libraries), copy.deepcopy(core)
    for name in ("one", "two", "two", "one"):
        with torch.no_grad():
            want = eager(*INPUTS)
        for got, w in zip(session.run(name, *INPUTS), want, strict=True):
            torch.testing.assert_close(got, w, rtol=4e-3, atol=4e-3)
