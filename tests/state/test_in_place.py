# SPDX-License-Identifier: BSD-3-Clause
"""At real sizes, one address for a state's input and output changes no bit of any result.

Small tensors are staged whole by the simulator and would hide a hazard: slots here are 0.5 to 2 MB.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn

from .models import Case, Model, _noise

F = nn.functional


def attention(s: Model, x: Tensor, at: Tensor) -> Tensor:
    """One head group: keys and values at positions, softmax over the whole cache."""
    s.k.index_copy_(2, at, x)
    s.v.index_copy_(2, at, x * 0.5)
    scores = x[:, :, -1:] @ s.k.transpose(2, 3) * 0.125
    return torch.softmax(scores, -1) @ s.v


def rows(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k.index_copy_(0, at, x)
    return F.linear(x, s.k)


def blend(s: Model, x: Tensor) -> Tensor:
    s.k.mul_(0.875).add_(x)
    return s.k.mean(0)


def chosen(s: Model, x: Tensor) -> Tensor:
    s.k.copy_(torch.where(x > 0.5, x, s.k))
    return torch.tanh(s.k).sum(1)


def shifted(s: Model, x: Tensor) -> Tensor:
    s.k.copy_(torch.cat([s.k[16:], x], 0))
    return s.k @ x.t()


def cache(heads: int, rows: int, width: int) -> Tensor:
    return torch.zeros(1, heads, rows, width)


def positions(i: int, n: int, rows: int) -> Tensor:
    return torch.arange(i * n, i * n + n) % rows


CASES = [
    Case("decode, 0.5 MB caches",
         lambda: Model(attention, k=cache(8, 512, 64), v=cache(8, 512, 64)),
         lambda i: (_noise(i, 1, 8, 1, 64), positions(i, 1, 512)), "in_place"),
    Case("prefill of 32, 1 MB caches",
         lambda: Model(attention, k=cache(4, 2048, 64), v=cache(4, 2048, 64)),
         lambda i: (_noise(i, 1, 4, 32, 64), positions(i, 32, 2048)), "in_place"),
    Case("rows of 2 MB", lambda: Model(rows, k=torch.zeros(2048, 512)),
         lambda i: (_noise(i, 4, 512), positions(i, 4, 2048)), "in_place"),
    Case("pointwise, 64 KB", lambda: Model(blend, k=torch.zeros(128, 256)),
         lambda i: (_noise(i, 128, 256),), "in_place"),
    Case("pointwise, 2 MB", lambda: Model(blend, k=torch.zeros(1024, 1024)),
         lambda i: (_noise(i, 1024, 1024),), "double_buffer"),
    Case("select, 0.5 MB", lambda: Model(chosen, k=torch.zeros(512, 512)),
         lambda i: (_noise(i, 512, 512),)),
    Case("shift, 1 MB", lambda: Model(shifted, k=torch.zeros(1024, 512)),
         lambda i: (_noise(i, 16, 512),), "double_buffer"),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_address_equals_two(case: Case, tmp_path: Path, qnn_libraries: str) -> None:
    sessions = []
    for in_place in (True, False):
        program = qnn.lower(
            case.make().eval(),
            case.step(0),
            target="SM8650",
            qnn_libraries=qnn_libraries,
            in_place=in_place,
            state_update="scatter",
        )
        bindings = [s.binding for s in program.report.methods["forward"].state]
        if in_place and case.binding:
            assert bindings == [case.binding] * len(bindings)
        if not in_place:
            assert "in_place" not in bindings
        path = tmp_path / f"{in_place}.pte"
        program.save(path)
        sessions.append(qnn.load(path, qnn_libraries=qnn_libraries))
    one, two = sessions
    for state in one.state().values():
        if state.binding == "in_place":
            assert state.input_address == state.output_address == state.address
    eager = case.make().eval()
    for i in range(case.steps):
        inputs = case.step(i)
        with torch.no_grad():
            want = pytree.tree_leaves(eager(*inputs))
        got, other = pytree.tree_leaves(one(*inputs)), pytree.tree_leaves(two(*inputs))
        assert all(torch.equal(a, b) for a, b in zip(got, other, strict=True))
        for g, w in zip(got, want, strict=True):
            noise = (g - w).norm() / w.norm().clamp_min(1e-6)
            assert noise < 1e-2, f"call {i}: relative error {noise}"
        for name in one.state():
            assert torch.equal(one.read_state(name), two.read_state(name)), f"{name}, call {i}"
