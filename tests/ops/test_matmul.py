# SPDX-License-Identifier: BSD-3-Clause
"""Matrix products and attention on the simulator against PyTorch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from harness import Case, check, check_all, op_types, refusal
from torch import nn
from torch.nn import functional as F


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


W, BIAS = normal(24, 16, seed=1), normal(24, seed=2)
RANKS = [(16,), (3, 16), (2, 3, 16), (1, 2, 3, 16), (2, 1, 2, 3, 16)]


def test_linear_of_any_rank() -> None:
    cases = []
    for s in RANKS:
        x = normal(*s)
        cases += [
            Case(f"{s}", lambda x: F.linear(x, W), (x,), 66),
            Case(f"{s} bias", lambda x: F.linear(x, W, BIAS), (x,), 66),
            Case(f"{s} right", lambda x: x @ W.t(), (x,), 66),
            Case(f"{s} plain", lambda x: torch.matmul(x, W.t().contiguous()), (x,), 66),
            Case(f"{s} vector", lambda x: x @ W[0], (x,), 60),
            Case(f"{s} run-time weight", lambda x, w: F.linear(x, w, BIAS), (x, W), 66),
        ]
    check_all(cases)


PAIRS = [
    ((16,), (16,)),
    ((3, 16), (16,)),
    ((16,), (16, 4)),
    ((3, 16), (16, 4)),
    ((2, 3, 16), (2, 16, 4)),
    ((2, 3, 16), (16, 4)),
    ((3, 16), (2, 16, 4)),
    ((2, 3, 16), (1, 16, 4)),
    ((2, 3, 16), (16,)),
    ((5, 2, 3, 16), (5, 2, 16, 4)),
    ((5, 1, 3, 16), (2, 16, 4)),
    ((2, 2, 5, 3, 16), (2, 2, 5, 16, 4)),
    ((2, 1, 5, 3, 16), (2, 1, 16, 4)),
    ((2, 2, 2, 3, 16), (16, 4)),
    ((1, 1, 16), (1, 16, 300)),
]


def test_products_of_any_ranks() -> None:
    check_all(
        [Case(f"{s} {t}", torch.matmul, (normal(*s), normal(*t, seed=1)), 60) for s, t in PAIRS]
    )


def test_transposes_are_read_not_made() -> None:
    q, k = normal(2, 4, 3, 8), normal(2, 4, 5, 8, seed=1)
    forms = [
        ("right", lambda q, k: q @ k.transpose(-1, -2)),
        ("permuted", lambda q, k: q @ k.permute(0, 1, 3, 2)),
        ("left", lambda q, k: (k @ q.mT).mT),
        ("both", lambda q, k: q.mT.contiguous().mT @ k.mT),
    ]
    check_all([Case(n, f, (q, k), 66) for n, f in forms])
    assert op_types(forms[0][1], q, k) == ["MatMul"]
    assert op_types(lambda q, k: q.mT.mT @ k.mT, q, k) == ["MatMul"]
    assert op_types(lambda x: x @ W.t(), normal(3, 16)) == ["FullyConnected"]
    assert op_types(lambda x: F.linear(x, W, BIAS), normal(3, 16)) == ["FullyConnected"]


def test_other_products() -> None:
    x, y, z = normal(3, 16), normal(16, 24, seed=3), normal(3, 24, seed=4)
    b1, b2, b3 = normal(2, 3, 4), normal(2, 4, 5, seed=1), normal(2, 3, 5, seed=2)
    check_all(
        [
            Case("addmm", lambda x: torch.addmm(BIAS, x, y), (x,), 66),
            Case("addmm of rows", lambda z, x: torch.addmm(z, x, y), (z, x), 66),
            Case(
                "addmm scaled",
                lambda z, x, y: torch.addmm(z, x, y, beta=0.5, alpha=2),
                (z, x, y),
                66,
            ),
            Case("addmm without bias", lambda z, x, y: torch.addmm(z, x, y, beta=0), (z, x, y), 66),
            Case("addmv", lambda x, v: torch.addmv(z[:, 0], x, v), (x, y[:, 0]), 60),
            Case("baddbmm", lambda b, x, y: torch.baddbmm(b, x, y, alpha=0.5), (b3, b1, b2), 62),
            Case("mm", torch.mm, (x, y), 66),
            Case("bmm", torch.bmm, (b1, b2), 62),
            Case("mv", torch.mv, (x, y[:, 0]), 60),
            Case("dot", torch.dot, (x[0], y[:, 0]), 50),
            Case("outer", torch.outer, (x[0], y[:, 0]), 66),
            Case("einsum", lambda x, y: torch.einsum("bij,bjk->bik", x, y), (b1, b2), 62),
            Case(
                "einsum of heads", lambda x, y: torch.einsum("bhd,kd->bhk", x, y), (b3, b3[0]), 62
            ),
            Case("constant left", lambda y: W @ y, (normal(16, 5),), 66),
        ]
    )


def test_long_sums_do_not_overflow_on_the_way() -> None:
    x = torch.full((1, 2048), 100.0)
    y = torch.tensor([100.0, -100.0]).repeat(1024)[:, None].repeat(1, 4)
    check_all(
        [
            Case("cancel", torch.matmul, (x, y), exact=True),
            Case(
                "large",
                torch.matmul,
                (normal(2, 2048, scale=20.0), normal(2048, 8, scale=20.0)),
                66,
            ),
        ]
    )


# -- attention ---------------------------------------------------------------------------------

Q, KEY, VALUE = normal(2, 4, 6, 16), normal(2, 4, 10, 16, seed=1), normal(2, 4, 10, 8, seed=2)
SEEN = torch.rand(6, 10, generator=torch.Generator().manual_seed(3)) > 0.4
SEEN[:, 0] = True
attend = F.scaled_dot_product_attention


def test_attention() -> None:
    two = KEY[:, :2], VALUE[:, :2]
    added = torch.where(SEEN, 0.0, -math.inf)
    far = torch.where(SEEN, 0.0, -1e9)
    nobody = SEEN.clone()
    nobody[2] = False
    check_all(
        [
            Case("plain", attend, (Q, KEY, VALUE), 58),
            Case("rank 3", attend, (Q[0], KEY[0], VALUE[0]), 58),
            Case("rank 5", attend, (Q[None], KEY[None], VALUE[None]), 58),
            Case("scale", lambda q, k, v: attend(q, k, v, scale=0.5), (Q, KEY, VALUE), 55),
            Case("causal", lambda q, k, v: attend(q, k, v, is_causal=True), (Q, KEY, VALUE), 58),
            Case("causal, square", lambda q: attend(q, q, q, is_causal=True), (Q,), 58),
            Case("bool mask", attend, (Q, KEY, VALUE, SEEN), 58),
            Case("constant bool mask", lambda q, k, v: attend(q, k, v, SEEN), (Q, KEY, VALUE), 58),
            Case("-inf mask", attend, (Q, KEY, VALUE, added), 58),
            Case("-1e9 mask", attend, (Q, KEY, VALUE, far), 58),
            Case("mask of a head", attend, (Q, KEY, VALUE, SEEN.expand(2, 1, 6, 10).clone()), 58),
            Case("nothing seen", attend, (Q, KEY, VALUE, nobody), 58),
            Case("grouped", lambda q, k, v: attend(q, k, v, enable_gqa=True), (Q, *two), 58),
            Case(
                "grouped, masked",
                lambda q, k, v, m: attend(q, k, v, m, enable_gqa=True),
                (Q, *two, SEEN),
                58,
            ),
            Case(
                "grouped, one token",
                lambda q, k, v: attend(q, k, v, SEEN[:1], enable_gqa=True),
                (Q[:, :, :1], *two),
                58,
            ),
        ]
    )


def test_many_scores_are_computed_head_by_head() -> None:
    q, k, v = normal(1, 8, 96, 16), normal(1, 4, 1024, 16, seed=1), normal(1, 4, 1024, 8, seed=2)
    seen = torch.rand(96, 1024, generator=torch.Generator().manual_seed(3)) > 0.4
    of_each = torch.rand(1, 8, 96, 1024, generator=torch.Generator().manual_seed(4)) > 0.4

    def grouped(*args: torch.Tensor) -> torch.Tensor:
        return attend(*args, enable_gqa=True)

    assert op_types(attend, q, q, q).count("MatMul") == 2
    repeated = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
    assert op_types(attend, q, *repeated, seen).count("MatMul") == 16
    check_all(
        [
            Case("heads", attend, (q, *repeated, seen), 58),
            Case("mask of each head", attend, (q, *repeated, of_each), 58),
        ]
    )
    q, seen = normal(1, 16, 33, 16, seed=5), of_each[0, :, :33].repeat(2, 1, 1)
    k, v = (torch.cat([x, x * 0.5], 1) for x in (k, v))  # 8 heads, each for two of queries
    assert op_types(grouped, q[:, :, :32], k, v, seen[:, :32]).count("MatMul") == 2
    assert op_types(grouped, q, k, v, seen).count("MatMul") == 16
    check_all([Case("grouped", grouped, (q, k, v, seen), 58)])


def test_scores_are_scaled_before_they_can_overflow() -> None:
    q = normal(1, 2, 4, 64, scale=60.0)
    check(attend, q, q, normal(1, 2, 4, 64), min_sqnr=50)


def test_multi_head_attention() -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(x: torch.Tensor, layer: Any) -> torch.Tensor:
        return layer(x, x, x, need_weights=False)[0]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x, self.layer)

    check(Block(), normal(2, 5, 16), min_sqnr=55)


def test_attention_of_one_token_costs_no_repetition_of_heads() -> None:
    types = op_types(
        lambda q, k, v: attend(q, k, v, enable_gqa=True), Q[:, :, :1], KEY[:, :2], VALUE[:, :2]
    )
    assert types.count("MatMul") == 2
    assert "Tile" not in types
    assert "Transpose" not in types


@pytest.mark.parametrize(
    ("fn", "inputs", "reason"),
    [
        (torch.matmul, (torch.ones(2, 3).long(), torch.ones(3, 2).long()), "matrices of integers"),
        (lambda q: attend(q, q, q, dropout_p=0.5), (Q,), "dropout"),
    ],
)
def test_what_htp_cannot_do_is_refused(
    fn: Any, inputs: tuple[torch.Tensor, ...], reason: str
) -> None:
    assert reason in refusal(fn, *inputs)
