# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of rank 5 and above, where QNN's ops stop: what families do with axes, at any rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, op_types, sqnr
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import executorch_qnn as qnn

Function = Callable[..., Any]


def data(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Values that fp16 holds exactly, and sums of many of them too."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    values = torch.randint(-50, 50, shape, generator=g)
    return values / 8 if dtype.is_floating_point else values


@st.composite
def moves(draw: st.DrawFn) -> Case:
    """What moves elements, of any type."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    rank = draw(st.integers(4, 7))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    d = draw(st.integers(0, rank - 1))
    n = shape[d]
    perm = draw(st.permutations(range(rank)))
    start = draw(st.integers(0, n - 1))
    stop = draw(st.integers(start + 1, n))
    step = draw(st.integers(1, 2))
    times = draw(st.lists(st.integers(1, 2), min_size=rank, max_size=rank))
    narrow = tuple(draw(st.sampled_from([k, 1])) for k in shape)
    flipped = draw(st.lists(st.sampled_from(range(rank)), unique=True, max_size=3))
    index = torch.tensor(draw(st.lists(st.integers(-n, n - 1), min_size=1, max_size=3)))
    x = data(dtype, shape)
    y = data(dtype, narrow, 1)
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        (f"permute {perm}", lambda x: x.permute(perm).clone(), (x,)),
        (f"slice {d} {start}:{stop}:{step}",
         lambda x: x[(slice(None),) * d + (slice(start, stop, step),)].clone(), (x,)),
        (f"cat {d}", lambda x, y: torch.cat([x, y.expand(shape)], d), (x, y)),
        (f"stack {d}", lambda x, y: torch.stack([x, y.expand(shape)], d), (x, y)),
        (f"expand {narrow}", lambda y: y.expand(shape).clone(), (y,)),
        (f"repeat {times}", lambda x: x.repeat(times), (x,)),
        (f"flip {flipped}", lambda x: x.flip(flipped), (x,)),
        (f"roll {start} {d}", lambda x: x.roll(start, d), (x,)),
        (f"unbind {d}", lambda x: [t.clone() for t in x.unbind(d)], (x,)),
        (f"rows {d}", lambda x, i: torch.ops.aten.index.Tensor(x, [None] * d + [i]), (x, index)),
        (f"index_select {d}", lambda x, i: x.index_select(d, i), (x, index % n)),
        (f"gather {d}", lambda x, i: x.gather(d, i),
         (x, torch.arange(math.prod(shape)).reshape(shape) * 7 % n)),
        (f"select_scatter {d}", lambda x: x.select_scatter(x.select(d, 0), d, start), (x,)),
    ]  # fmt: skip
    name, fn, inputs = draw(st.sampled_from(table))
    return Case(f"{name} of {dtype} {shape}", fn, inputs, exact=True)


@st.composite
def computations(draw: st.DrawFn) -> Case:
    """Broadcasting, reductions and products."""
    rank = draw(st.integers(5, 6))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=rank, max_size=rank)))
    narrow = [tuple(draw(st.sampled_from([k, 1])) for k in shape) for _ in range(2)]
    narrow[1] = narrow[1][draw(st.integers(0, rank)) :]
    dims = draw(st.lists(st.sampled_from(range(rank)), unique=True, min_size=1, max_size=4))
    keep = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.int64]))
    x, y, z = (data(dtype, s, i) for i, s in enumerate((shape, *narrow)))
    both: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        (f"sum {narrow}", lambda y, z: y + z, (y, z)),
        (f"less {narrow}", lambda y, z: y < z, (y, z)),
        (f"where {narrow}", lambda x, y, z: torch.where(x > 0, y, z), (x, y, z)),
        (f"sum over {dims} {keep}", lambda x: x.sum(dims, keepdim=keep), (x,)),
        (f"amax over {dims} {keep}", lambda x: x.amax(dims, keepdim=keep), (x,)),
        (f"any over {dims[0]} {keep}", lambda x: (x > 4).any(dims[0], keepdim=keep), (x,)),
        (f"argmax over {dims[0]}", lambda x: x.argmax(dims[0]), (x,)),
        (f"cumsum over {dims[0]}", lambda x: x.cumsum(dims[0]), (x,)),
        (f"pad {keep}", lambda x: F.pad(x, (1, 0, 0, 2) if keep else (0, 1), value=3), (x,)),
    ]
    floats: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        (f"mean over {dims} {keep}", lambda x: x.mean(dims, keepdim=keep), (x,)),
        (f"softmax over {dims[0]}", lambda x: x.softmax(dims[0]), (x,)),
        ("matmul", lambda x, y: x @ y.mT, (x, y.expand(*narrow[0][:-1], shape[-1]))),
        ("linear", lambda x: F.linear(x, torch.ones(3, shape[-1]), torch.arange(3.0)), (x,)),
        ("layer_norm", lambda x: F.layer_norm(x, shape[-2:]), (x + 0.25 * y,)),
        ("gelu", F.gelu, (x,)),
        (f"sort over {dims[0]}", lambda x: x.sort(dims[0]).values, (x,)),
    ]
    name, fn, inputs = draw(st.sampled_from(both + (floats if dtype is torch.float32 else [])))
    return Case(f"{name} of {dtype} {shape}", fn, inputs, 50)


@pytest.mark.usefixtures("qnn_libraries")
def test_what_moves_elements_is_exact_at_any_rank() -> None:
    check_samples(moves(), 30)


@pytest.mark.usefixtures("qnn_libraries")
def test_what_is_computed_follows_pytorch_at_any_rank() -> None:
    check_samples(computations(), 30)


def windows(x: Tensor, n: int) -> Tensor:
    """Swin's: (B, H, W, C) to (B * windows, n * n, C)."""
    b, h, w, c = x.shape
    x = x.view(b, h // n, n, w // n, n, c)
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, n * n, c)


def image(x: Tensor, n: int, h: int, w: int) -> Tensor:
    x = x.view(-1, h // n, w // n, n, n, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, h, w, x.shape[-1])


@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes_are_moved_exactly() -> None:
    x = data(torch.float32, (4, 56, 56, 48))
    y = data(torch.float32, (4, 3, 8, 16, 8, 48))
    i = data(torch.int64, (4, 3, 8, 16, 8, 24))
    cases: list[tuple[str, Function, Tensor]] = [
        ("windows", lambda x: windows(x, 7), x),
        ("image", lambda x: image(windows(x, 7) * 2, 7, 56, 56), x),
        (
            "pixel shuffle",
            lambda x: x.view(4, 56, 56, 12, 2, 2).permute(0, 3, 1, 4, 2, 5).clone(),
            x,
        ),
        ("reversed", lambda y: y.permute(5, 4, 3, 2, 1, 0).clone(), y),
        ("slice", lambda y: y[:, 1:, :, 3:9].clone(), y),
        ("integers", lambda i: i.permute(2, 0, 4, 1, 5, 3).clone(), i),
        ("broadcast", lambda y: y * y[:, :1, :, :1, :, :1].sign(), y),
        ("amax", lambda y: y.amax((1, 3, 5)), y),
    ]
    check_all([Case(name, fn, (x,), exact=True) for name, fn, x in cases])


@pytest.mark.usefixtures("qnn_libraries")
def test_six_axes_cost_no_op_where_nothing_moves() -> None:
    x = data(torch.float32, (2, 3, 2, 3, 4, 5))
    ops = op_types(lambda x: F.gelu(x + 1).view(2, 3, 2, 3, 20).softmax(-1).view(x.shape) * 2, x)
    assert "Transpose" not in ops
    assert ops.count("Reshape") <= 3


class Memory(nn.Module):
    """State of six axes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(2, 3, 2, 2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.memory.mul_(0.5).add_(x)
        return self.memory.sum((1, 3))


@pytest.mark.usefixtures("qnn_libraries")
def test_inputs_outputs_and_state_may_have_six_axes(tmp_path: Path) -> None:
    x = data(torch.float32, (2, 3, 2, 2, 3, 4))
    path = tmp_path / "memory.pte"
    qnn.lower(Memory(), (x,), target="SM8650", fallback="error").save(path)
    session = qnn.load(path)
    model = Memory()
    for _ in range(3):
        assert sqnr(session(x), model(x)) > 50
    assert session.state()["memory"].shape == (2, 3, 2, 2, 3, 4)
