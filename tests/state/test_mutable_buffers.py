# SPDX-License-Identifier: BSD-3-Clause
"""Every way of using a mutable buffer gives eager's values, call after call, load after load."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import executorch_qnn as qnn

from .models import CASES, Case


def dirty_heap() -> None:
    """Leaves garbage in freed memory, as an application that runs for long does."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    libc.free.argtypes = [ctypes.c_void_p]
    blocks = [libc.malloc(size) for size in (*range(16, 2048, 16), 1 << 14, 1 << 18) for _ in "ab"]
    sizes = [size for size in (*range(16, 2048, 16), 1 << 14, 1 << 18) for _ in "ab"]
    for block, size in zip(blocks, sizes, strict=True):
        ctypes.memset(block, 0x41, size)
        libc.free(block)


def assert_close(got: Any, want: Any, where: str) -> None:
    """fp16's precision for floats, equality for everything else."""
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want), where
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), where
        if w.is_floating_point():
            assert torch.allclose(g, w, rtol=4e-3, atol=8e-3), f"{where}: {g} instead of {w}"
        else:
            assert torch.equal(g, w), f"{where}: {g} instead of {w}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_state_follows_eager(case: Case, tmp_path: Path, qnn_libraries: str) -> None:
    path = tmp_path / "model.pte"
    program = qnn.lower(
        case.make().eval(), case.step(0), target="SM8650", qnn_libraries=qnn_libraries
    )
    program.save(path)
    method = program.report.methods["forward"]
    if case.binding is not None:
        assert method.state[0].binding == case.binding, method.state[0].reason
    for load in range(2):
        if load:
            dirty_heap()
        session, eager = qnn.load(path, qnn_libraries=qnn_libraries), case.make().eval()
        for i in range(case.steps):
            inputs = case.step(i)
            with torch.no_grad():
                want = pytree.tree_map(torch.clone, eager(*inputs))
            assert_close(session(*inputs), want, f"load {load}, call {i}")
        for name, value in eager.named_buffers():
            if name in session.state():
                assert_close(session.read_state(name), value, f"buffer {name} after load {load}")
