# SPDX-License-Identifier: BSD-3-Clause
"""Several methods over one state."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn


class Core(nn.Module):
    """A cache with a projection; writes rows at positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("mem", torch.zeros(1, 8, 8))
        self.p = nn.Linear(8, 8)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        return torch.ops.aten.index_put_(self.mem, [None, at], self.p(x)).sum(1)


class Reset(nn.Module):
    """Clears the buffer of another module, which it sees by another name."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, z: Tensor) -> Tensor:
        self.core.mem.mul_(z)
        return z + 1.0


class Peek(nn.Module):
    """Only reads."""

    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core.mem.sum(1)


def test_prefill_decode_reset_and_a_reader_share_one_slot(
    tmp_path: Path, qnn_libraries: str
) -> None:
    core, eager = Core().eval(), Core().eval()
    rows, row = (torch.ones(1, 4, 8), torch.arange(4)), (torch.ones(1, 1, 8), torch.tensor([4]))
    methods = {
        "prefill": (core, rows),
        "decode": (core, row),
        "reset": (Reset(core), (torch.zeros(1),)),
        "peek": (Peek(core), (torch.zeros(1, 8),)),
    }
    program = qnn.lower(methods, target="SM8650", qnn_libraries=qnn_libraries)
    program.save(tmp_path / "m.pte")
    session = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries)
    assert list(session.state()) == ["mem"]
    references = {"prefill": eager, "decode": eager, "reset": Reset(eager), "peek": Peek(eager)}
    calls = ["prefill", "peek", "decode", "peek", "reset", "peek", "decode", "decode", "peek"]
    for i, name in enumerate(calls):
        inputs = tuple(
            torch.randn(t.shape, generator=torch.Generator().manual_seed(i))
            if t.is_floating_point() and t.numel() > 1
            else t
            for t in methods[name][1]
        )
        with torch.no_grad():
            want = references[name](*inputs)
        got = session.run(name, *inputs)
        torch.testing.assert_close(got, want, rtol=4e-3, atol=8e-3, msg=f"call {i}, {name}")


def test_two_modules_with_one_buffer_name_are_one_slot(tmp_path: Path, qnn_libraries: str) -> None:
    a, b = Core().eval(), Core().eval()
    program = qnn.lower(
        {
            "prefill": (a, (torch.ones(1, 4, 8), torch.arange(4))),
            "decode": (b, (torch.ones(1, 1, 8), torch.tensor([4]))),
        },
        target="SM8650",
        qnn_libraries=qnn_libraries,
    )
    program.save(tmp_path / "m.pte")
    session = qnn.load(tmp_path / "m.pte", qnn_libraries=qnn_libraries)
    session.run("prefill", torch.ones(1, 4, 8), torch.arange(4))
    with torch.no_grad():
        a(torch.ones(1, 4, 8), torch.arange(4))
        want = a(torch.ones(1, 1, 8), torch.tensor([4]))
    got = session.run("decode", torch.ones(1, 1, 8), torch.tensor([4]))
    torch.testing.assert_close(got, want, rtol=4e-3, atol=8e-3)


def test_one_name_with_two_shapes_is_refused() -> None:
    class Acc(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.register_buffer("a", torch.zeros(n))

        def forward(self, x: Tensor) -> Tensor:
            self.a.add_(x)
            return self.a * 1.0

    with pytest.raises(qnn.LoweringError, match="one state slot"):
        qnn.lower(
            {"f": (Acc(3), (torch.ones(3),)), "g": (Acc(4), (torch.ones(4),))}, target="SM8650"
        )
