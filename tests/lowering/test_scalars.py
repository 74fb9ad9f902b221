# SPDX-License-Identifier: BSD-3-Clause
"""Numbers in ops that stay on the CPU have the type that PyTorch computes in."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cpu_ops import without
from torch import Tensor, nn

import executorch_qnn as qnn


class Counts(nn.Module):
    """What is around its shifts is on the CPU, if they are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.tensor(5, dtype=torch.int32))
        self.register_buffer("x", torch.arange(4, dtype=torch.int32))


class Forward(nn.Module):
    def __init__(self, core: Counts) -> None:
        super().__init__()
        self.core = core

    def forward(self, y: Tensor) -> Tensor:
        self.core.n.copy_(torch.bitwise_left_shift(self.core.n, 1) % 97)
        return y + self.core.n


class NoInput(nn.Module):
    def __init__(self, core: Counts) -> None:
        super().__init__()
        self.core = core

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        n, x = self.core.n, self.core.x
        self.core.x.add_(1)
        shifted = torch.bitwise_left_shift(n * 3 + 2, 2)
        real = torch.special.entr((torch.bitwise_left_shift(x, 1) * 0.25 + 1.5).abs())
        return shifted - 7, torch.bitwise_left_shift(x, 3) % 13, real * 1e-20 + 1e20 * 1e-20


def test_numbers_keep_the_type_of_what_they_are_added_to(
    tmp_path: Path, qnn_libraries: str
) -> None:
    core = Counts()
    methods = {
        "forward": (Forward(core).eval(), (torch.ones(4),)),
        "look": (NoInput(core).eval(), ()),
    }
    shifts = torch.ops.aten.bitwise_left_shift
    with without(shifts.Tensor, shifts.Tensor_Scalar):
        program = qnn.lower(methods, target="SM8650", qnn_libraries=qnn_libraries)
    assert program.report.methods["look"].cpu_ops
    program.save(tmp_path / "model.pte")
    session = qnn.load(tmp_path / "model.pte", qnn_libraries=qnn_libraries)
    for i, name in enumerate(("forward", "look", "forward", "forward", "look")):
        inputs = (torch.full((4,), float(i)),) if name == "forward" else ()
        with torch.no_grad():
            want = methods[name][0](*inputs)
        torch.testing.assert_close(session.run(name, *inputs), want, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.uint8])
def test_remainders_on_the_cpu_have_the_sign_of_the_divisor(
    dtype: torch.dtype, tmp_path: Path, qnn_libraries: str
) -> None:
    class Remainders(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
            x = torch.bitwise_left_shift(x, 0)
            return [x % 100, torch.remainder(x, -7 if dtype.is_signed else 7), x % y]

    low = -128 if dtype.is_signed else 0
    x = torch.arange(low, low + 256).to(dtype)
    y = torch.tensor([3, -3, 127, -128] * 64).to(dtype)
    program = qnn.lower(Remainders(), (x, y), target="SM8650", qnn_libraries=qnn_libraries)
    program.save(tmp_path / "model.pte")
    session = qnn.load(tmp_path / "model.pte", qnn_libraries=qnn_libraries)
    for got, want in zip(session(x, y), Remainders()(x, y), strict=True):
        assert torch.equal(got, want)
