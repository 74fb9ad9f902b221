# SPDX-License-Identifier: BSD-3-Clause
"""Data movement on the simulator: every element must come out as PyTorch gives it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check, check_all, check_samples, op_types, refusal
from hypothesis import strategies as st
from torch.nn import functional as F

Function = Callable[..., Any]


def data(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Values that fp16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    values = torch.randint(-500, 500, shape, generator=g)
    return values / 8 if dtype.is_floating_point else values.to(dtype)


MOVES: list[tuple[str, Function]] = [
    ("view", lambda x: x.view(6, -1)),
    ("flatten", lambda x: x.flatten(1)),
    ("squeeze", lambda x: x[:, :1].squeeze(1)),
    ("squeeze dims", lambda x: x[:1, :, :1].squeeze((0, 2))),
    ("unsqueeze", lambda x: x.unsqueeze(-1)),
    ("permute", lambda x: x.permute(3, 1, 0, 2)),
    ("transpose", lambda x: x.transpose(1, -1)),
    ("t", lambda x: x[0, 0].t()),
    ("movedim", lambda x: x.movedim(1, 3)),
    ("expand", lambda x: x[:, :1].expand(2, 5, 4, 6)),
    ("expand to rank 5", lambda x: x[:, :1].expand(3, 2, 5, 4, 6)),
    ("repeat", lambda x: x.repeat(2, 1, 3, 1)),
    ("repeat to rank 5", lambda x: x.repeat(2, 1, 1, 3, 1)),
    ("tile", lambda x: x.tile(2)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1)),
    ("repeat_interleave last", lambda x: x.repeat_interleave(2, -1)),
    ("repeat_interleave flat", lambda x: x.repeat_interleave(2)),
    ("cat", lambda x: torch.cat([x, x[:, :1], x], 1)),
    ("cat last", lambda x: torch.cat([x, x], -1)),
    ("stack", lambda x: torch.stack([x[0], x[1]], 1)),
    ("stack last", lambda x: torch.stack([x, x], -1)),
    ("split", lambda x: x.split(4, 3)),
    ("split, one used", lambda x: x.split(2, 3)[1]),
    ("split with sizes", lambda x: x.split([1, 3], 2)),
    ("chunk", lambda x: x.chunk(4, 3)),
    ("unbind", lambda x: x.unbind(1)),
    ("slice", lambda x: x[:, 1:, :-1, 1:5:2]),
    ("slice far out of bounds", lambda x: x[:, -99:2, 1:99]),
    ("strided slice of rank 1", lambda x: x[0, 0, 0, 1::2]),
    ("strided slice of rank 2", lambda x: x[0, 0, ::2, 1::2]),
    ("strided slice of rank 3", lambda x: x[0][::2, ::3, 1::2]),
    ("strided slice of rank 4", lambda x: x[::2, ::2, ::3, 1::2]),
    ("strided slice of rank 5", lambda x: x[None][..., ::2, ::3]),
    ("select", lambda x: x[:, -1]),
    ("narrow", lambda x: x.narrow(2, 1, 2)),
    ("flip", lambda x: x.flip(1, 3)),
    ("flip rank 1", lambda x: x[0, 0, 0].flip(0)),
    ("flip rank 5", lambda x: x[None].flip(1, 2, 4)),
    ("roll", lambda x: x.roll((1, -2), (1, 3))),
    ("roll flat", lambda x: x.roll(5)),
    ("rot90", lambda x: torch.rot90(x, 1, (2, 3))),
    ("pad", lambda x: F.pad(x, (1, 2, 0, 3), value=1)),
    ("pad inwards", lambda x: F.pad(x, (-1, 2, 1, -1))),
    ("pad every axis", lambda x: F.pad(x, (1, 0, 0, 1, 1, 1, 1, 0), value=1)),
    ("pad rank 5", lambda x: F.pad(x[None], (1, 0, 0, 1), value=1)),
    ("pad rank 1", lambda x: F.pad(x[0, 0, 0], (2, 1))),
    ("diagonal", lambda x: torch.diagonal(x, 0, 2, 3)),
    ("diagonal above", lambda x: torch.diagonal(x, 2, 1, 3)),
    ("diagonal below", lambda x: torch.diagonal(x, -1, -1, 0)),
    ("unfold", lambda x: x.unfold(3, 3, 2)),
    ("unfold in front", lambda x: x.unfold(1, 2, 1)),
    ("zeros_like", lambda x: torch.cat([torch.zeros_like(x), x])),
    ("ones_like", lambda x: torch.cat([x.new_ones(1, 3, 4, 6), x])),
    ("full_like", lambda x: torch.stack([torch.full_like(x[0], 1), x[1]])),
]

FLOAT_MOVES: list[tuple[str, Function]] = [
    ("pad with -inf", lambda x: F.pad(x, (1, 2), value=float("-inf"))),
    ("reflect", lambda x: F.pad(x, (1, 2, 2, 1), mode="reflect")),
    ("reflect 1d", lambda x: F.pad(x[0], (2, 1), mode="reflect")),
    ("replicate", lambda x: F.pad(x, (1, 2, 2, 1), mode="replicate")),
    ("circular", lambda x: F.pad(x, (1, 2, 2, 1), mode="circular")),
    ("pixel_shuffle", lambda x: F.pixel_shuffle(x.reshape(1, 12, 2, 6), 2)),
    ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2)),
    ("channel_shuffle", lambda x: F.channel_shuffle(x.reshape(1, 6, 4, 6), 3)),
    ("meshgrid", lambda x: torch.meshgrid(x[0, 0, 0], x[0, 0, 1], indexing="ij")),
]


@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_moves_are_exact(dtype: torch.dtype) -> None:
    moves = MOVES + FLOAT_MOVES if dtype.is_floating_point else MOVES
    x = data(dtype, 2, 3, 4, 6)
    check_all([Case(name, fn, (x,), exact=True) for name, fn in moves])


@pytest.mark.usefixtures("qnn_libraries")
def test_every_permutation_of_rank_4_is_exact() -> None:
    x = data(torch.float32, 2, 3, 4, 5)
    orders = torch.cartesian_prod(*[torch.arange(4)] * 4)
    perms = [p for p in orders.tolist() if sorted(p) == [0, 1, 2, 3]]

    def permuted(p: list[int]) -> Function:
        return lambda x: x.permute(p)

    check_all([Case(str(p), permuted(p), (x,), exact=True) for p in perms])


@pytest.mark.parametrize(
    ("fn", "types", "shapes"),
    [
        (lambda x: x.permute(0, 2, 1).permute(0, 2, 1).neg(), ["ElementWiseNeg"], [(2, 3, 4)]),
        (lambda x: x.permute(1, 0, 2).permute(0, 2, 1), ["Transpose"], [(2, 3, 4)]),
        (lambda x: x[:, :1].transpose(0, 1), ["StridedSlice", "Reshape"], [(2, 3, 4)]),
        (lambda x: x.view(24).view(2, 3, 4).neg(), ["ElementWiseNeg"], [(2, 3, 4)]),
        (lambda x: x.t().relu().neg().t(), ["Relu", "ElementWiseNeg"], [(2, 3)]),
        (lambda x, y: x + y.expand(2, 3, 4), ["ElementWiseAdd"], [(2, 3, 4), (2, 1, 4)]),
    ],
)  # fmt: skip
def test_changes_of_layout_that_cancel_cost_nothing(
    fn: Function, types: list[str], shapes: list[tuple[int, ...]]
) -> None:
    assert op_types(fn, *(data(torch.float32, *s) for s in shapes)) == types


def test_an_axis_without_elements_is_refused() -> None:
    assert "without elements" in refusal(lambda x: x[:, 2:2] * 2, torch.ones(2, 3))


@pytest.mark.usefixtures("qnn_libraries")
def test_empty_pieces_of_a_cat_are_ignored() -> None:
    check(lambda x: torch.cat([torch.zeros(0), x], 1), data(torch.float32, 2, 3), exact=True)


@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.float32], ids=str)
def test_a_constant_beside_a_slice_is_no_padding(dtype: torch.dtype) -> None:
    x = data(dtype, 2, 3, 4)

    def constant(value: int, *shape: int) -> torch.Tensor:
        return torch.full(shape, value, dtype=dtype)

    cases: dict[str, Function] = {
        "behind, last axis": lambda x: torch.cat([x[:, :, :3], constant(1, 2, 3, 1)], 2),
        "behind, longer": lambda x: torch.cat([x[:, :1], constant(7, 2, 4, 4)], 1),
        "behind, shorter": lambda x: torch.cat([x[:, :, :1], constant(7, 2, 3, 2)], 2),
        "before": lambda x: torch.cat([constant(0, 1, 3, 4), x[1:]], 0),
        "around": lambda x: torch.cat([constant(1, 2, 1, 4), x[:, 1:2], constant(3, 2, 1, 4)], 1),
        "flat": lambda x: torch.cat([x.view(-1)[:17], constant(1, 7)]),
        "a row that was selected": lambda x: torch.cat([x[:, 1], constant(1, 1, 4)], 0),
        "gathered": lambda x: torch.cat([x[torch.tensor([0])], constant(1, 1, 3, 4)], 0),
        "transposed": lambda x: torch.cat(
            [x.transpose(0, 2)[:3], constant(1, 1, 3, 2)], 0
        ).transpose(0, 2),
    }
    check_all([Case(name, fn, (x,), exact=True) for name, fn in cases.items()])


@st.composite
def movements(draw: st.DrawFn) -> Case:
    """Cuts, triangles, diagonals, strides and repetitions, of any shape and type."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=2, max_size=5)))
    x = data(dtype, *shape)
    d, e = draw(st.permutations(range(len(shape))))[:2]
    n = shape[d]
    offset = draw(st.integers(-shape[d] + 1, shape[e] - 1))
    parts = draw(st.integers(1, n + 1))
    size = draw(st.integers(1, n))
    step = draw(st.integers(1, 3))
    strides = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
    sizes = [draw(st.integers(1, 3)) for _ in strides]
    reach = 1 + sum((k - 1) * s for k, s in zip(sizes, strides, strict=True))
    long = data(dtype, reach + 3)
    line = x.diagonal(offset, d, e).shape
    table: list[tuple[str, Function, tuple[torch.Tensor, ...]]] = [
        (f"tril {offset}", lambda x: x.tril(offset), (x,)),
        (f"triu {offset}", lambda x: x.triu(offset), (x,)),
        (f"diagonal {offset} {d} {e}", lambda x: x.diagonal(offset, d, e).clone(), (x,)),
        (f"diagonal_scatter {offset} {d} {e}", lambda x, y: x.diagonal_scatter(y, offset, d, e),
         (x, data(dtype, *line, seed=1))),
        (f"diag_embed {offset}", lambda x: torch.diag_embed(x, offset), (x[(0,) * (x.dim() - 2)],)),
        (f"tensor_split {parts} {d}", lambda x: x.tensor_split(parts, d)[0].clone(), (x,)),
        (f"chunk {parts} {d}", lambda x: [t.clone() for t in x.chunk(parts, d)], (x,)),
        (f"narrow {size} {d}", lambda x: x.narrow(d, n - size, size).clone(), (x,)),
        (f"unfold {size} {step} {d}", lambda x: x.unfold(d, size, step).clone(), (x,)),
        (f"slice_scatter {size} {step} {d}",
         lambda x: x.slice_scatter(x.flip(d).narrow(d, 0, -(-size // step)), d, n - size, n, step),
         (x,)),
        (f"rot90 {step} {d} {e}", lambda x: torch.rot90(x, step, (d, e)), (x,)),
        (f"roll {offset} {d} {e}", lambda x: x.roll((offset, 1), (d, e)), (x,)),
        (f"repeat_interleave {step} {d}", lambda x: x.repeat_interleave(step, d), (x,)),
        (f"as_strided {sizes} {strides}", lambda x: x.as_strided(sizes, strides, 2).clone(),
         (long,)),
        (f"movedim {d} {e}", lambda x: x.movedim(d, e).clone(), (x,)),
        (f"flatten {d}", lambda x: x.flatten(min(d, e), max(d, e)), (x,)),
        ("cat of types", lambda x: torch.cat([x, x > 0, x.long()], d), (x,)),
        ("meshgrid", lambda x, y: torch.meshgrid(x, y, indexing="xy"), (long, long[:2])),
        ("block_diag", torch.block_diag, (x[(0,) * (x.dim() - 2)], long[:2][None])),
    ]  # fmt: skip
    name, fn, inputs = draw(st.sampled_from(table))
    return Case(f"{name} of {dtype} {shape}", fn, inputs, exact=True)


@pytest.mark.usefixtures("qnn_libraries")
def test_any_movement_is_exact() -> None:
    check_samples(movements(), 30)


@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes_are_moved_exactly() -> None:
    x = data(torch.float32, 4, 300, 520)
    table: list[tuple[str, Function]] = [
        ("tril", torch.tril),
        ("diagonal_scatter", lambda x: x.diagonal_scatter(x[:, :, 0], 1, 1, 2)),
        ("unfold", lambda x: x[0].unfold(1, 8, 4).clone()),
        ("as_strided", lambda x: x.as_strided((500, 700), (3, 1)).clone()),
        ("rot90", lambda x: torch.rot90(x, 1, (1, 2))),
        ("repeat_interleave", lambda x: x[0].repeat_interleave(4, 1)),
    ]
    check_all([Case(name, fn, (x,), exact=True) for name, fn in table])


@pytest.mark.usefixtures("qnn_libraries")
def test_a_diagonal_is_filled_in_place() -> None:
    def filled(x: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        y.fill_diagonal_(7.0)
        return y

    check(filled, data(torch.float32, 5, 5), exact=True)


def test_strides_of_what_is_strided_are_refused() -> None:
    assert "contiguous()" in refusal(
        lambda x: x.t().as_strided((2, 2), (1, 3)).clone(), data(torch.float32, 3, 4)
    )
