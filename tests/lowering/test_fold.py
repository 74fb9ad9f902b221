# SPDX-License-Identifier: BSD-3-Clause
"""What depends on no input and no state is computed when the model is lowered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import executorch_qnn as qnn


class Constants(nn.Module):
    """Constants alone, beside an input, beside state, and returned as they stand."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("f", torch.tensor([-5.0, 3.0, -100.0]))
        self.register_buffer("n", torch.tensor([-5, 3, -100]))
        self.register_buffer("state", torch.zeros(3))

    def forward(self, x: Tensor) -> Any:
        self.state.add_(x)
        return self.f * 2.0, self.n % 97, (self.n % 97) + x, torch.asinh(x) + torch.asinh(self.f)


class Alone(nn.Module):
    def __init__(self, core: Constants) -> None:
        super().__init__()
        self.core = core

    def forward(self) -> Any:
        return self.core.f, self.core.n % 97, torch.asinh(self.core.state)


def test_constants_are_folded_and_the_rest_is_not(tmp_path: Path, qnn_libraries: str) -> None:
    core, x = Constants().eval(), torch.tensor([0.5, -1.0, 2.0])
    methods = {"forward": (core, (x,)), "alone": (Alone(core).eval(), ())}
    program = qnn.lower(methods, target="SM8650", qnn_libraries=qnn_libraries)
    on_cpu = {name: [op.op for op in m.cpu_ops] for name, m in program.report.methods.items()}
    assert on_cpu == {"forward": ["aten.asinh.default"], "alone": ["aten.asinh.default"]}
    program.save(tmp_path / "m.pte")
    session = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries)
    for _ in range(2):
        for name, inputs in (("forward", (x,)), ("alone", ())):
            with torch.no_grad():
                want = methods[name][0](*inputs)
            got = session.run(name, *inputs)
            torch.testing.assert_close(got, want, rtol=4e-3, atol=8e-3)


def test_large_results_of_small_constants_are_left(tmp_path: Path, qnn_libraries: str) -> None:
    class Large(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return x + 1.0, torch.ones(1, 1).expand(1024, 1024) * 2.0

    program = qnn.lower(
        Large().eval(), (torch.ones(2),), target="SM8650", qnn_libraries=qnn_libraries
    )
    program.save(tmp_path / "m.pte")
    assert (tmp_path / "m.pte").stat().st_size < 1 << 20
    got = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries)(torch.ones(2))
    assert torch.equal(got[1], torch.full((1024, 1024), 2.0))
