# SPDX-License-Identifier: BSD-3-Clause
"""Functions that HTP has no op for, on the simulator against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, refusal
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[..., Any]


def span(low: float, high: float, n: int = 1003) -> Tensor:
    return torch.linspace(low, high, n)


def around_zero(limit: float) -> Tensor:
    """Sizes of all magnitudes, of both signs."""
    size = torch.logspace(-4, math.log10(limit), 500)
    return torch.cat([-size, size])


ONE: list[tuple[str, Function, Tensor, float]] = [
    ("sinh", torch.sinh, span(-11.7, 11.7), 55),
    ("sinh near zero", torch.sinh, around_zero(0.5), 60),
    ("cosh", torch.cosh, span(-11.7, 11.7), 55),
    ("cosh near zero", torch.cosh, around_zero(2.0), 62),
    ("asinh", torch.asinh, span(-60000.0, 60000.0), 62),
    ("asinh near zero", torch.asinh, around_zero(2.0), 60),
    ("asinh middle", torch.asinh, span(-300.0, 300.0), 60),
    ("acosh", torch.acosh, span(1.0, 60000.0), 62),
    ("acosh near one", torch.acosh, 1 + span(0.0, 3.0), 58),
    ("atanh", torch.atanh, span(-0.999, 0.999), 58),
    ("atanh near zero", torch.atanh, around_zero(0.5), 60),
    ("asin", torch.asin, span(-1.0, 1.0), 60),
    ("asin near zero", torch.asin, around_zero(0.3), 54),
    ("acos", torch.acos, span(-1.0, 1.0), 60),
    ("acos near one", torch.acos, span(0.95, 1.0), 56),
    ("erfinv", torch.erfinv, span(-0.998, 0.998), 56),
    ("erfinv near zero", torch.erfinv, around_zero(0.5), 58),
    ("round to tenths", lambda x: torch.round(x, decimals=1), span(-90.0, 90.0), 52),
    ("round to hundredths", lambda x: torch.round(x, decimals=2), span(-3.0, 3.0), 50),
    ("round large", lambda x: torch.round(x, decimals=2), span(-60000.0, 60000.0), 60),
    ("round to hundreds", lambda x: torch.round(x, decimals=-2), span(-6000.0, 6000.0), 48),
    ("round to wholes", lambda x: torch.round(x, decimals=0), span(-9.9, 9.9), 300),
    ("signbit", torch.signbit, span(-1.0, 1.0), 300),
    ("copysign", lambda x: torch.copysign(x, -2.0), span(-1.0, 1.0), 300),
    ("ldexp", lambda x: torch.ldexp(x, torch.tensor([3])), span(-1.0, 1.0), 60),
    ("rrelu", F.rrelu, span(-2.0, 2.0), 60),
    ("dropout", lambda x: torch.native_dropout(x, 0.5, False), span(-2.0, 2.0), 300),
    ("dist", lambda x: torch.dist(x, x.flip(0)), span(-2.0, 3.0), 60),
    ("dist of order 1", lambda x: torch.dist(x, x.flip(0), 1), span(-0.2, 0.3), 60),
    ("integers", lambda i: torch.sinh(i) + torch.atan2(i, i + 1), torch.arange(-5, 5), 55),
    ("bools", lambda i: torch.asin(i > 1), torch.arange(-5, 5), 55),
]


@pytest.mark.usefixtures("qnn_libraries")
def test_functions_of_one_float() -> None:
    check_all([Case(n, f, (x,), db) for n, f, x, db in ONE])


@pytest.mark.usefixtures("qnn_libraries")
def test_infinities_at_the_ends() -> None:
    ends = torch.tensor([-1.0, 0.0, 1.0])
    check_all([Case(f.__name__, f, (ends,), exact=True) for f in (torch.atanh, torch.erfinv)])


def points(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(40, 33, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.usefixtures("qnn_libraries")
def test_functions_of_two_floats() -> None:
    x, y = points(0), points(1)
    cross = torch.tensor([0.0, 1.0, -1.0, 3.0, -3.0])
    grid = (cross[:, None] + 0.0, cross[None] + 0.0)
    far = (points(2, 10000.0).clamp(-40000, 40000), points(3, 10000.0).clamp(-40000, 40000))
    check_all(
        [
            Case("atan2", torch.atan2, (x, y), 62),
            Case("atan2 on the axes", torch.atan2, grid, 62),
            Case("atan2 far", torch.atan2, far, 60),
            Case("atan2 of different sizes", torch.atan2, (x * 100, y * 0.1), 60),
            Case("hypot", torch.hypot, (x, y), 62),
            Case("hypot far", torch.hypot, far, 60),
            Case("hypot of zeros", torch.hypot, grid, 62),
            Case("copysign", torch.copysign, (x, y), 300),
            Case("dist", lambda x, y: torch.dist(x, y, 3), (x, y), 55),
        ]
    )


FUNCTIONS: dict[str, tuple[Function, float, float]] = {
    "sinh": (torch.sinh, -11.7, 11.7),
    "cosh": (torch.cosh, -11.7, 11.7),
    "asinh": (torch.asinh, -60000.0, 60000.0),
    "acosh": (torch.acosh, 1.01, 60000.0),
    "atanh": (torch.atanh, -0.99, 0.99),
    "asin": (torch.asin, -1.0, 1.0),
    "acos": (torch.acos, -1.0, 0.99),
    "erfinv": (torch.erfinv, -0.99, 0.99),
    "atan2": (lambda x: torch.atan2(x, x.flip(0) + 0.1), -100.0, 100.0),
    "hypot": (lambda x: torch.hypot(x, x.flip(0)), -100.0, 100.0),
    "rrelu": (nn.RReLU().eval(), -9.0, 9.0),
    "copysign": (lambda x: torch.copysign(x, x.flip(0) + 0.01), -9.0, 9.0),
}


@st.composite
def ranges(draw: st.DrawFn) -> Case:
    """A function over part of its domain, in a tensor of any shape."""
    name = draw(st.sampled_from(sorted(FUNCTIONS)))
    fn, low, high = FUNCTIONS[name]
    middle = low + (high - low) * draw(st.floats(0, 1))
    width = draw(st.sampled_from([1.0, 0.1, 0.01])) * (high - low)
    low, high = max(low, middle - width), min(high, middle + width)
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=5)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    x = torch.rand(shape, generator=g) * (high - low) + low
    return Case(f"{name} {shape} {low:.4g} {high:.4g}", fn, (x,), 46)


@pytest.mark.usefixtures("qnn_libraries")
def test_any_part_of_a_domain() -> None:
    check_samples(ranges(), 20)


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes() -> None:
    x = torch.rand(300, 2049, generator=torch.Generator().manual_seed(0)) * 1.98 - 0.99
    for name, fn in (("atanh", torch.atanh), ("atan2", lambda x: torch.atan2(x, x.flip(1)))):
        check_all([Case(name, fn, (x,), 56)])


def test_training_is_refused() -> None:
    x = points(0)
    assert "model.eval()" in refusal(lambda x: torch.native_dropout(x, 0.5, True), x)
