# SPDX-License-Identifier: BSD-3-Clause
"""Reductions on the simulator against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, op_types, refusal
from torch.nn import functional as F

Function = Callable[..., Any]


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def whole(*shape: int, low: int, high: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


X = normal(2, 3, 5, 8)
POSITIVE = X.abs() + 0.1
INTS = whole(2, 3, 11, low=-(2**27), high=2**27)
BOOLS = whole(2, 3, 11, low=0, high=4) > 0

DIMS: list[tuple[Any, bool]] = [
    (None, False),
    (-1, False),
    (-1, True),
    (0, False),
    ((1, 2), True),
    ((0, -1), False),
    ((0, 1, 2, 3), True),
]


def test_sums_means_and_extrema_over_any_dims() -> None:
    cases = []
    for dims, keep in DIMS:
        for name, fn, db in (
            ("sum", torch.sum, 62),
            ("mean", torch.mean, 62),
            ("amax", torch.amax, 300),
            ("amin", torch.amin, 300),
            ("var", torch.var, 56),
            ("std", torch.std, 56),
            ("logsumexp", torch.logsumexp, 62),
            ("norm", torch.linalg.vector_norm, 60),
        ):
            d = () if dims is None and name in ("amax", "amin") else dims
            if name == "logsumexp":
                d = tuple(range(4)) if dims is None else dims

            def case(x: torch.Tensor, fn: Function = fn, d: Any = d, k: bool = keep) -> Any:
                return fn(x, dim=d, keepdim=k)

            cases.append(Case(f"{name} {dims} {keep}", case, (POSITIVE,), db))
    check_all(cases)


FUNCTIONS: list[tuple[str, Function, torch.Tensor, float]] = [
    ("sum", lambda x: x.sum(), X, 50),
    ("mean", lambda x: x.mean(), POSITIVE, 60),
    ("sum of two", lambda x: x.sum((-1, 1)), X, 60),
    ("sum dtype", lambda x: x.sum(-1, dtype=torch.float32), X, 60),
    ("max", lambda x: x.max(), X, 300),
    ("min", lambda x: x.min(), X, 300),
    ("max dim", lambda x: x.max(-1), X, 300),
    ("min dim", lambda x: x.min(1, keepdim=True), X, 300),
    ("aminmax", lambda x: torch.aminmax(x, dim=2), X, 300),
    ("argmax", lambda x: x.argmax(), X, 300),
    ("argmax dim", lambda x: x.argmax(2), X, 300),
    ("argmax first dim", lambda x: x.argmax(0, keepdim=True), X, 300),
    ("argmin", lambda x: x.argmin(-1, keepdim=True), X, 300),
    ("first of equal", lambda x: (x * 2).round().argmax(-1), X, 300),
    ("prod", lambda x: x.prod(-1), POSITIVE, 55),
    ("prod all", lambda x: x.prod(), POSITIVE[:, :, 0, :3] + 0.3, 50),
    ("var mean", lambda x: torch.var_mean(x, dim=(0, 2), correction=0), X, 60),
    ("var correction", lambda x: x.var(-1, correction=2), X, 60),
    ("norm 1", lambda x: torch.linalg.vector_norm(x, 1, dim=-1), X, 60),
    ("norm 0", lambda x: torch.linalg.vector_norm(x.relu(), 0, dim=1), X, 300),
    ("norm 3", lambda x: torch.linalg.vector_norm(x, 3, dim=1), X, 60),
    ("norm 1.5", lambda x: torch.linalg.vector_norm(x, 1.5, dim=(0, 2)), X, 56),
    ("norm -2", lambda x: torch.linalg.vector_norm(x, -2, dim=-1), POSITIVE, 56),
    ("norm of order 4 large", lambda x: torch.linalg.vector_norm(x * 3000, 4, dim=1), X, 56),
    ("norm inf", lambda x: torch.linalg.vector_norm(x, math.inf, dim=(0, 1)), X, 300),
    ("normalize", lambda x: F.normalize(x, dim=-1), X, 58),
    ("normalize large", lambda x: F.normalize(x * 3000, dim=1), X, 58),
    ("cosine", lambda x: F.cosine_similarity(x, x.flip(-1), dim=-1), X, 56),
    ("count", lambda x: torch.count_nonzero(x > 0.5, dim=-1), X, 300),
    ("softmax", lambda x: x.softmax(-1), X, 64),
    ("softmax of axis 1", lambda x: x.softmax(1), X, 64),
    ("softmax far", lambda x: (x * 200).softmax(-1), X, 55),
    ("log_softmax", lambda x: x.log_softmax(-1), X, 64),
    ("log_softmax of axis 0", lambda x: x.log_softmax(0), X, 64),
    ("log_softmax far", lambda x: (x * 200).log_softmax(-1), X, 64),
    ("cumsum", lambda x: x.cumsum(-1), X, 66),
    ("cumsum of axis 1", lambda x: x.cumsum(1), X, 66),
    ("cumsum long", lambda x: x.cumsum(-1), normal(2, 1024).abs(), 66),
    ("cumsum longer", lambda x: x.cumsum(-1), normal(2, 1500).abs(), 60),
    ("cumprod", lambda x: x.cumprod(-1), POSITIVE, 58),
    ("rank 5", lambda x: x.sum((1, 3)) + x.amax((1, 3)), normal(2, 3, 2, 3, 4), 60),
    ("rank 5 last", lambda x: x.mean((3, 4)), normal(2, 3, 2, 3, 4), 55),
    ("rank 5 softmax", lambda x: x.softmax(2), normal(2, 3, 2, 3, 4), 64),
    ("rank 5 argmax", lambda x: x.argmax(2), normal(2, 3, 2, 3, 4), 300),
    (
        "rank 0",
        lambda x: (x.sum() + x.sum().amax() + x.sum().mean(), x.mean().argmax()),
        POSITIVE,
        55,
    ),
    ("softmax above axes of length 1", lambda x: x.reshape(-1, 4, 1, 1).softmax(1), X, 60),
    ("softmax of a column", lambda x: (x.reshape(-1, 1) * 0.5).softmax(0), X, 55),
    ("log_softmax of a column", lambda x: x.reshape(-1, 1).log_softmax(0), X, 60),
    ("logsumexp of a column", lambda x: x.reshape(-1, 1).logsumexp(0), X, 55),
    ("length 1", lambda x: x[:, :1].sum(1) + x[:, :1].softmax(1).mean(1), X, 60),
]


def test_functions() -> None:
    check_all([Case(n, f, (x,), db) for n, f, x, db in FUNCTIONS])


def test_means_of_many_large_values_do_not_overflow() -> None:
    large = normal(4, 2048, scale=50.0).abs() + 100
    check_all(
        [
            Case("rows", lambda x: x.mean(-1), (large,), 66),
            Case("columns", lambda x: x.mean(0), (large.t(),), 60),
            Case("images", lambda x: x.mean((2, 3)), (large.reshape(2, 4, 32, 32),), 62),
            Case("images last", lambda x: x.mean((1, 2)), (large.reshape(2, 32, 32, 4),), 58),
            Case("all", lambda x: x.mean(), (large,), 60),
            Case("variance", lambda x: x.var(-1), (large - 150,), 60),
            Case("squares", lambda x: x.var(-1), (normal(4, 512, scale=100.0),), 60),
            Case(
                "norm",
                lambda x: torch.linalg.vector_norm(x, dim=-1),
                (normal(4, 512, scale=900.0),),
                60,
            ),
        ]
    )


def test_integers_are_exact() -> None:
    check_all(
        [
            Case("sum", lambda x: (x // 64).sum(-1), (INTS,)),
            Case("sum of large", lambda x: x.sum(-1), (INTS[:, :, :7],)),
            Case("sum all", lambda x: (x // 64).sum(), (INTS,)),
            Case("sum keep", lambda x: (x // 64).sum((0, 2), keepdim=True), (INTS,)),
            Case("amax", lambda x: x.amax(-1), (INTS // 64,)),
            Case("amin", lambda x: x.amin(0), (INTS // 64,)),
            Case("max", lambda x: x.max(1), (INTS // 64,)),
            Case("argmin", lambda x: x.argmin(-1), (INTS // 64,)),
            Case("prod", lambda x: x.prod(-1), (whole(2, 7, low=-9, high=9) * 2 + 1,)),
            Case("cumsum", lambda x: x.cumsum(-1), (INTS[:, :, :7],)),
            Case("cumsum of axis 1", lambda x: x.cumsum(1), (INTS,)),
            Case("cumsum of axis 0", lambda x: x.cumsum(0), (INTS,)),
            Case("counts", lambda x: x.sum(-1), (BOOLS,)),
            Case("counts all", lambda x: x.sum(), (BOOLS,)),
            Case("running counts", lambda x: x.cumsum(1), (BOOLS,)),
            Case("positions", lambda x: x.long().cumsum(-1) - 1, (BOOLS,)),
            Case("mean of ints", lambda x: (x % 100).float().mean(-1), (INTS,), 60),
        ]
    )


def test_truths() -> None:
    check_all(
        [
            Case("any", lambda x: x.any(), (BOOLS,)),
            Case("any dim", lambda x: x.any(-1), (BOOLS & False,)),
            Case("any dims", lambda x: torch.any(x, (0, 1), keepdim=True), (BOOLS,)),
            Case("all", lambda x: x.all(), (BOOLS | True,)),
            Case("all dim", lambda x: x.all(1), (BOOLS,)),
            Case("all of numbers", lambda x: x.all(-1), (INTS % 2,)),
            Case("any of floats", lambda x: (x > 2).any(0) | x.bool().any(0), (X,)),
            Case("amax", lambda x: x.amax(-1), (BOOLS,)),
            Case("argmax", lambda x: x.int().argmax(-1), (BOOLS,)),
        ]
    )


@pytest.mark.parametrize("value", [-math.inf, -65504.0, -1e9, -30000.0, -1000.0, -100.0])
def test_masked_scores(value: float) -> None:
    scores = normal(2, 4, 6, 16, scale=4.0)
    scores[..., 9:] = value
    finite = scores.clamp(min=-60000.0)
    check_all(
        [
            Case("softmax", lambda x: x.softmax(-1), (scores,), 60),
            Case(
                "added",
                lambda x: (x + torch.where(torch.arange(16) > 8, value, 0.0)).softmax(-1),
                (normal(2, 16, scale=4.0),),
                60,
            ),
            Case("log_softmax", lambda x: x.log_softmax(-1), (finite,), 60),
            Case("logsumexp", lambda x: x.logsumexp(-1), (scores,), 60),
            Case("amax", lambda x: x.amax(-1), (scores,), exact=True),
            Case("argmax", lambda x: x.argmax(-1), (scores,)),
        ]
    )


def test_a_row_that_is_masked_whole_is_uniform_or_zero_but_never_nan() -> None:
    rows = torch.full((2, 8), -1e9)
    check_all([Case("finite", lambda x: x.softmax(-1), (rows,), 60)])


def test_what_htp_cannot_do_right_is_refused() -> None:
    assert "too few" in refusal(lambda x: x[:, :1].var(1), X)


def test_counting_costs_one_sum() -> None:
    assert op_types(lambda x: x.sum(-1), BOOLS) == ["Cast", "ReduceSum", "Reshape"]


@pytest.mark.usefixtures("qnn_libraries")
def test_reductions_of_sums_of_which_one_part_is_permuted() -> None:
    """Undoing one part's permutation permutes the other: that is done once, not for ever."""
    x, y = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(i)) for i in range(2))
    cases: dict[str, Callable[..., torch.Tensor]] = {
        "flipped": lambda x, y: (x.permute(2, 0, 1) + y.permute(2, 0, 1).flip(0)).mean(),
        "reshaped": lambda x, y: (x.permute(2, 0, 1) + y.reshape(4, 2, 3).relu()).mean(),
        "rows": lambda x, y: (x.permute(2, 0, 1) + y.reshape(4, 2, 3).relu()).sum(1),
    }
    check_all([Case(name, fn, (x, y)) for name, fn in cases.items()])
