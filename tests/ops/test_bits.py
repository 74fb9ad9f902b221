# SPDX-License-Identifier: BSD-3-Clause
"""Bits of integers on the simulator: as exact as PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, op_types
from hypothesis import strategies as st
from torch import Tensor

Function = Callable[..., Any]

LOGIC = {"and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor}


def integers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-(2**31), 2**31, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def operations(draw: st.DrawFn) -> Case:
    """Logic of tensors and numbers, and shifts."""
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=5)))
    other = tuple(draw(st.sampled_from([n, 1])) for n in shape)[draw(st.integers(0, len(shape))) :]
    x, y = integers(*shape, seed=1), integers(*other, seed=2)
    name = draw(st.sampled_from(sorted(LOGIC)))
    mask = draw(st.sampled_from([0, 1, 2, 7, 255, 0xFFFF, -1, -8, 2**31 - 1, -(2**31), 0x5A5A]))
    places = draw(st.integers(1, 30))
    shifts = torch.arange(y.numel()).reshape(other) % 31
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        (f"{name} {other}", LOGIC[name], (x, y)),
        (f"{name} {mask}", lambda x: LOGIC[name](x, mask), (x,)),
        ("not", torch.bitwise_not, (x,)),
        (f"left by {places}", lambda x: (x % 2 ** (31 - places)) << places, (x,)),
        (f"right by {places}", lambda x: x >> places, (x,)),
        ("left by tensors", lambda x, n: (x % 2) << n, (x, shifts)),
        ("right by tensors", torch.bitwise_right_shift, (x, shifts)),
    ]
    what, fn, inputs = draw(st.sampled_from(table))
    return Case(f"{what} {shape}", fn, inputs)


@pytest.mark.usefixtures("qnn_libraries")
def test_bits_are_exact() -> None:
    check_samples(operations(), 24)


@pytest.mark.usefixtures("qnn_libraries")
def test_the_ends_of_the_range_and_bools() -> None:
    ends = torch.tensor([-(2**31), 2**31 - 1, -1, 0, 1, 2**30, -(2**30)])
    bools = ends > 0
    cases = []
    for name, fn in LOGIC.items():
        cases += [
            Case(name, fn, (ends[:, None], ends)),
            Case(f"{name} of bools", fn, (bools, bools.flip(0))),
            Case(f"{name} of bool and integer", fn, (bools, ends)),
            Case(f"{name} of int32", lambda x, fn=fn: fn(x.int(), x.int().flip(0)), (ends,)),
        ]
    check_all(cases)


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes() -> None:
    x, y = integers(300, 1000), integers(1000, seed=1)
    check_all([Case("and", torch.bitwise_and, (x[:40], y)), Case("shift", lambda x: x >> 5, (x,))])


def test_the_lowest_bits_are_a_remainder() -> None:
    assert op_types(lambda x: x & 1, integers(5)) == ["ElementWiseMod"]
