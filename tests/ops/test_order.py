# SPDX-License-Identifier: BSD-3-Clause
"""Sorting, extrema and searches on the simulator: exactly as PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, op_types, refusal
from hypothesis import strategies as st
from torch import Tensor

Function = Callable[..., Any]


def values(dtype: torch.dtype, shape: tuple[int, ...], different: int, seed: int = 0) -> Tensor:
    """Of so many different values."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(0, different, shape, generator=g) - different // 2
    return x > 0 if dtype is torch.bool else x.to(dtype) * (0.25 if dtype.is_floating_point else 1)


def checked(fn: Function, d: int) -> Function:
    """Of equal elements any may have been meant: the places must be those of the values."""

    def both(x: Tensor) -> tuple[Tensor, ...]:
        found, at = fn(x)
        keep = found.dim() == x.dim()
        rows = at if keep else at.unsqueeze(d)
        return found, x.gather(d, rows)

    return both


@st.composite
def orders(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=6)))
    d = draw(st.integers(0, len(shape) - 1))
    n = shape[d]
    x = values(dtype, shape, draw(st.sampled_from([2, 5, 2000])))
    k = draw(st.integers(1, n))
    flag, keep = draw(st.booleans()), draw(st.booleans())
    table: list[tuple[str, Function]] = [
        (f"sort {d} {flag}", lambda x: x.sort(d, flag)),
        (f"stable sort {d} {flag}", lambda x: torch.sort(x, dim=d, stable=True, descending=flag)),
        (f"argsort {d} {flag}", lambda x: x.argsort(d, flag)),
        (f"cumsum {d}", lambda x: x.cumsum(d)),
    ]
    if dtype is not torch.bool:
        table += [
            (f"topk {k} {d} {flag}", checked(lambda x: x.topk(k, d, largest=flag), d)),
            (f"kthvalue {k} {d} {keep}", checked(lambda x: x.kthvalue(k, d, keep), d)),
            (f"median {d} {keep}", checked(lambda x: x.median(d, keep), d)),
            ("median", torch.median),
            (f"cummax {d}", lambda x: x.cummax(d)),
            (f"cummin {d}", lambda x: x.cummin(d)),
        ]
    name, fn = draw(st.sampled_from(table))
    return Case(f"{name} of {dtype} {shape}", fn, (x,), exact=True)


@pytest.mark.usefixtures("qnn_libraries")
def test_orders_are_exact() -> None:
    check_samples(orders(), 24, 3)


@st.composite
def searches(draw: st.DrawFn) -> Case:
    dtype = draw(st.sampled_from([torch.float32, torch.int64]))
    n = draw(st.integers(1, 9))
    right = draw(st.booleans())
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=0, max_size=4)))
    x = values(dtype, shape, 12, 1)
    row = values(dtype, (n,), 10).sort().values
    rows = values(dtype, (*shape[:-1], n), 10).sort(-1).values
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("searchsorted", lambda s, x: torch.searchsorted(s, x, right=right), (row, x)),
        ("left", lambda s, x: torch.searchsorted(s, x, side="left", out_int32=True), (row, x)),
        ("in rows", lambda s, x: torch.searchsorted(s, x, right=right), (rows, x)),
        ("number", lambda s: torch.searchsorted(s, 1, right=right), (row,)),
        ("bucketize", lambda x: torch.bucketize(x, row, right=right), (x,)),
        ("isin", lambda x: torch.isin(x, row), (x,)),
    ]
    name, fn, inputs = draw(st.sampled_from(table if shape else table[:2]))
    return Case(f"{name} {n} {right} of {dtype} {shape}", fn, inputs)


@pytest.mark.usefixtures("qnn_libraries")
def test_searches_are_exact() -> None:
    check_samples(searches(), 16, 2)


@pytest.mark.usefixtures("qnn_libraries")
def test_infinities_have_their_places() -> None:
    far = torch.tensor([[1.0, -torch.inf, torch.inf, 2.0, 0.5, -3.0]])
    table: list[tuple[str, Function]] = [
        ("topk", lambda x: x.topk(6)),
        ("smallest", lambda x: x.topk(6, largest=False)),
        ("sort", lambda x: x.sort()),
        ("median", lambda x: x.median(1)),
        ("cummax", lambda x: x.cummax(1)),
        ("searchsorted", lambda x: torch.searchsorted(torch.tensor([-1.0, 0.0, 9.0]), x)),
    ]
    check_all([Case(name, fn, (far,), exact=True) for name, fn in table])


@pytest.mark.usefixtures("qnn_libraries")
def test_large_integers_come_out_as_they_went_in() -> None:
    far = torch.tensor([[2**31 - 1, -(2**31), 2**27 + 1, 5, -5, -(2**27) - 1]])
    check_all([Case("sort", lambda x: x.sort(), (far,)), Case("max", lambda x: x.topk(2), (far,))])


@pytest.mark.usefixtures("qnn_libraries")
def test_composites() -> None:
    x = torch.randn(4, 30, generator=torch.Generator().manual_seed(0))
    table: list[tuple[str, Function, float]] = [
        ("quantile", lambda x: x.quantile(0.3, dim=1), 55),
        ("quantiles", lambda x: x.quantile(torch.tensor([0.1, 0.5, 0.9]), dim=1), 55),
        ("msort", torch.msort, 300),
        ("logcumsumexp", lambda x: x.logcumsumexp(1), 62),
        ("logcumsumexp far", lambda x: (x * 300).logcumsumexp(0), 60),
        ("top-p filter", lambda x: top_p(x, 0.8), 60),
        ("rank", lambda x: x.argsort(1).argsort(1), 300),
    ]
    check_all([Case(name, fn, (x,), db) for name, fn, db in table])


def top_p(x: Tensor, p: float) -> Tensor:
    """Of each row the probabilities of the likeliest, up to `p` together; nucleus sampling."""
    ordered, at = x.softmax(-1).sort(-1, descending=True)
    kept = ordered.cumsum(-1) - ordered < p
    return torch.zeros_like(x).scatter(-1, at, ordered * kept)


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes() -> None:
    x = torch.randn(256, 2500, generator=torch.Generator().manual_seed(0))
    check_all(
        [
            Case("topk", lambda x: x.topk(40).values, (x,), exact=True),
            Case(
                "stable", lambda x: torch.sort(x, stable=True), (x[:, :1000].round(),), exact=True
            ),
            Case("along columns", lambda x: x.sort(0).values, (x,), exact=True),
            Case("median", lambda x: x.median(), (x[:64],), exact=True),
            Case("cummax", lambda x: x.cummax(1), (x[:, :600],), exact=True),
        ]
    )


def test_what_is_too_long_is_refused_or_in_any_order() -> None:
    x = torch.zeros(2, 5000)
    assert "equal elements" in refusal(lambda x: x.sort(stable=True), x)
    assert not refusal(lambda x: x.sort(stable=True).values, x)
    assert op_types(lambda x: x.sort().values, x) == ["ElementWiseNeg", "TopK", "ElementWiseNeg"]
