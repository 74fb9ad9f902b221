# SPDX-License-Identifier: BSD-3-Clause
"""Elementwise ops on the simulator against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from harness import Case, check, check_all, op_types, refusal
from torch.nn import functional as F

Function = Callable[..., torch.Tensor]


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def span(low: float, high: float, n: int = 512) -> torch.Tensor:
    return torch.linspace(low, high, n).reshape(2, n // 2)


X, Y = normal(2, 3, 40), normal(2, 3, 40, seed=1)
POSITIVE = span(1e-3, 30.0)
INTS = torch.tensor(
    [[7, -7, 8, -8, 0, 1, -1, 100], [2147483647, -2147483647, 65537, 4097, 3, -3, 2, -2]]
)
NONZERO = torch.tensor([[3, 3, -3, -3, 5, 7, 7, -8], [2, 3, -5, 16, -7, -2, 1, 9]])
BOOLS = torch.tensor([[True, False, True, False], [False, False, True, True]])
OTHERS = torch.tensor([[True, True, False, False], [False, True, True, False]])
EDGES = torch.tensor([[-math.inf, math.inf, 0.0, 65504.0], [-65504.0, 1.0, -1.0, 6e-8]])

FLOAT_UNARY: list[tuple[str, Function, torch.Tensor, float]] = [
    ("neg", torch.neg, X, 300),
    ("abs", torch.abs, X, 300),
    ("sign", torch.sign, X, 300),
    ("sqrt", torch.sqrt, POSITIVE, 70),
    ("rsqrt", torch.rsqrt, POSITIVE, 70),
    ("square", torch.square, X, 70),
    ("reciprocal", torch.reciprocal, POSITIVE, 62),
    ("exp", torch.exp, span(-30.0, 11.0), 68),
    ("exp2", torch.exp2, span(-30.0, 15.0), 68),
    ("expm1", torch.expm1, span(-8.0, 8.0), 60),
    ("expm1_small", torch.expm1, span(-1e-3, 1e-3), 60),
    ("log", torch.log, POSITIVE, 66),
    ("log2", torch.log2, POSITIVE, 66),
    ("log10", torch.log10, POSITIVE, 66),
    ("log1p", torch.log1p, span(-0.9, 20.0), 62),
    ("log1p_small", torch.log1p, span(-1e-3, 1e-3), 60),
    ("sin", torch.sin, span(-6.0, 6.0), 58),
    ("sin_far", torch.sin, torch.arange(2048.0).reshape(8, 256), 50),
    ("cos", torch.cos, span(-6.0, 6.0), 58),
    ("cos_far", torch.cos, torch.arange(2048.0).reshape(8, 256), 50),
    ("tan", torch.tan, span(-1.2, 1.2), 52),
    ("atan", torch.atan, span(-40000.0, 40000.0), 60),
    ("tanh", torch.tanh, span(-8.0, 8.0), 70),
    ("erf", torch.erf, span(-5.0, 5.0), 66),
    ("erfc", torch.erfc, span(-5.0, 5.0), 66),
    ("sigmoid", torch.sigmoid, span(-12.0, 12.0), 66),
    ("silu", F.silu, span(-12.0, 12.0), 66),
    ("gelu", F.gelu, span(-6.0, 6.0), 60),
    ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"), span(-6.0, 6.0), 60),
    ("relu", F.relu, X, 300),
    ("relu6", F.relu6, span(-2.0, 8.0), 300),
    ("leaky_relu", lambda x: F.leaky_relu(x, 0.1), X, 70),
    ("prelu", lambda x: F.prelu(x, torch.tensor([0.25])), X, 70),
    ("elu", lambda x: F.elu(x, 0.7), span(-6.0, 6.0), 64),
    ("celu", lambda x: F.celu(x, 1.3), span(-6.0, 6.0), 62),
    ("selu", F.selu, span(-6.0, 6.0), 62),
    ("hardswish", F.hardswish, span(-6.0, 6.0), 60),
    ("hardsigmoid", F.hardsigmoid, span(-6.0, 6.0), 62),
    ("hardtanh", F.hardtanh, X, 300),
    ("softplus", F.softplus, span(-10.0, 10.0), 62),
    ("softplus_beta", lambda x: F.softplus(x, 2.0, 10.0), span(-10.0, 10.0), 60),
    ("logsigmoid", F.logsigmoid, span(-10.0, 10.0), 58),
    ("mish", F.mish, span(-8.0, 8.0), 60),
    ("softsign", F.softsign, X, 60),
    ("glu", F.glu, X, 60),
    ("floor", torch.floor, span(-9.9, 9.9), 300),
    ("ceil", torch.ceil, span(-9.9, 9.9), 300),
    ("round", torch.round, span(-2050.0, 2050.0, 8200), 300),
    ("round_ties", torch.round, torch.arange(-8.5, 9.0, 1.0), 300),
    ("trunc", torch.trunc, span(-9.9, 9.9), 300),
    ("frac", torch.frac, span(-9.9, 9.9), 58),
    ("pow_0", lambda x: x**0 + x, X, 70),
    ("pow_2", lambda x: x**2, X, 70),
    ("pow_3", lambda x: x**3, X, 66),
    ("pow_half", lambda x: x**0.5, POSITIVE, 70),
    ("pow_minus_half", lambda x: x**-0.5, POSITIVE, 70),
    ("pow_minus_2", lambda x: x**-2, span(0.5, 4.0), 60),
    ("pow_fraction", lambda x: x**1.7, POSITIVE, 60),
    ("pow_base", lambda x: 3.0**x, span(-12.0, 8.0), 62),
    ("clamp", lambda x: x.clamp(-0.5, 0.75), X, 300),
    ("clamp_min", lambda x: x.clamp_min(0.25), X, 300),
    ("clamp_max", lambda x: x.clamp_max(-0.25), X, 300),
    ("clamp_crossed", lambda x: x.clamp(1.0, -1.0), X, 300),
    ("threshold", lambda x: F.threshold(x, 0.25, 7.0), X, 300),
    ("hardshrink", F.hardshrink, X, 300),
    ("nan_to_num", torch.nan_to_num, X, 300),
    ("logit", torch.logit, span(0.05, 0.95), 55),
]


def test_functions_of_one_float() -> None:
    check_all([Case(n, f, (x,), db) for n, f, x, db in FLOAT_UNARY])


# Whole numbers, on which the quotients' exactness can be seen.
W, V = (X * 20).round(), (Y * 3).round() * 2 + 1

FLOAT_BINARY: list[tuple[str, Function, float]] = [
    ("add", lambda x, y: x + y, 70),
    ("add_alpha", lambda x, y: torch.add(x, y, alpha=0.3), 70),
    ("sub", lambda x, y: x - y, 70),
    ("sub_alpha", lambda x, y: torch.sub(x, y, alpha=2), 70),
    ("rsub", lambda x, y: 3.0 - x * y, 70),
    ("mul", lambda x, y: x * y, 70),
    ("div", lambda x, y: x / (y.abs() + 0.1), 60),
    ("div_large", lambda x, y: (x * 15000) / (y.abs() * 10000 + 15000), 60),
    ("div_scalar", lambda x, y: x / 7.0 + y, 66),
    ("div_large_scalar", lambda x, y: x * 3000 / 50000.0, 66),
    ("scalar_div", lambda x, y: 2.0 / (y.abs() + 0.5), 60),
    ("minimum", torch.minimum, 300),
    ("maximum", torch.maximum, 300),
    ("fmax", torch.fmax, 300),
    ("clamp_tensor", lambda x, y: x.clamp(-y.abs(), y.abs()), 300),
    ("addcmul", lambda x, y: torch.addcmul(x, x, y, value=0.5), 66),
    ("addcdiv", lambda x, y: torch.addcdiv(x, x, y.abs() + 1, value=0.5), 60),
    ("lerp", lambda x, y: torch.lerp(x, y, 0.3), 66),
    ("lerp_tensor", lambda x, y: torch.lerp(x, y, y.abs()), 66),
    ("pow_tensor", lambda x, y: (x.abs() + 0.5) ** y, 60),
]


def test_functions_of_two_floats() -> None:
    check_all([Case(n, f, (X, Y), db) for n, f, db in FLOAT_BINARY])


def test_whole_quotients_of_floats_are_exact() -> None:
    def div(mode: str) -> Function:
        return lambda x, y: torch.div(x, y, rounding_mode=mode)

    fns: list[tuple[str, Function]] = [
        ("floor", div("floor")),
        ("trunc", div("trunc")),
        ("floor_divide", torch.floor_divide),
        ("remainder", torch.remainder),
        ("fmod", torch.fmod),
        ("floor 3", lambda x, y: torch.floor_divide(x, 3.0)),
        ("floor -7", lambda x, y: torch.floor_divide(x, -7.0)),
        ("floor half", lambda x, y: torch.floor_divide(x, 0.5)),
        ("remainder -3", lambda x, y: torch.remainder(x, -3.0)),
        ("fmod 5", lambda x, y: torch.fmod(x, 5.0)),
    ]
    check_all([Case(n, f, (W, V), exact=True) for n, f in fns])


BROADCASTS = [
    ((2, 3, 4), (4,)),
    ((2, 3, 4), (3, 1)),
    ((1,), (2, 2)),
    ((2, 1, 4), (3, 1)),
    ((), (3,)),
    ((2, 1, 2, 1, 3), (2, 3)),
    ((2, 1, 2, 3, 2), (2, 3, 1, 3, 2)),
    ((1, 2, 3, 2, 2), (2, 1)),
    ((5, 1), (1, 6)),
]


def test_operands_are_broadcast() -> None:
    check_all(
        [
            Case(f"{name}{s}{t}", fn, (normal(*s), normal(*t, seed=1)), 60)
            for s, t in BROADCASTS
            for name, fn in (
                ("add", lambda x, y: x + y),
                ("max", torch.maximum),
                ("less", lambda x, y: x < y),
                ("where", lambda x, y: torch.where(x < y, x, y * 2)),
            )
        ]
    )


INTEGER: list[tuple[str, Function]] = [
    ("add", lambda x, y: torch.clamp(x, -(2**30), 2**30) + y),
    ("add_alpha", lambda x, y: torch.add(y, y, alpha=3)),
    ("sub", lambda x, y: torch.clamp(x, -(2**30), 2**30) - y),
    ("rsub", lambda x, y: 5 - y),
    ("mul", lambda x, y: y * y * 11),
    ("neg", lambda x, y: -x),
    ("abs", lambda x, y: x.abs()),
    ("sign", lambda x, y: x.sign()),
    ("relu", lambda x, y: F.relu(x)),
    ("square", lambda x, y: y**2),
    ("cube", lambda x, y: y**3),
    ("floor_divide", lambda x, y: x // y),
    ("floor_divide_scalar", lambda x, y: x // 3),
    ("floor_divide_negative", lambda x, y: x // -4),
    ("div_trunc", lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    ("remainder", lambda x, y: x % y),
    ("remainder_scalar", lambda x, y: x % -7),
    ("fmod", lambda x, y: torch.fmod(x, y)),
    ("minimum", lambda x, y: torch.minimum(x, y)),
    ("maximum", lambda x, y: torch.maximum(x, y)),
    ("clamp", lambda x, y: x.clamp(-2, 5)),
    ("bitwise_not", lambda x, y: ~x),
    ("where", lambda x, y: torch.where(x > y, x, y)),
    ("masked_fill", lambda x, y: x.masked_fill(y > 3, -7)),
    ("floor", lambda x, y: torch.floor(x)),
]


def test_integers_are_exact() -> None:
    check_all([Case(n, f, (INTS, NONZERO)) for n, f in INTEGER])


COMPARISONS: list[tuple[str, Function]] = [
    ("eq", torch.eq),
    ("ne", torch.ne),
    ("lt", torch.lt),
    ("le", torch.le),
    ("gt", torch.gt),
    ("ge", torch.ge),
]


SMALL = torch.tensor([[0.0, -0.0, 2.0**-24, -(2.0**-24)], [1.0, -1.0, math.inf, -math.inf]])


def test_comparisons_are_exact() -> None:
    near = torch.tensor([[4000, 4001, 4002, 16777216], [16777217, -5, 0, 1]])
    cases = []
    for n, f in COMPARISONS:
        cases += [
            # Without -0.0, which is less than 0.0 up to QAIRT 2.49.
            Case(f"{n} floats", f, (X.round() + 0.0, Y.round() + 0.0)),
            Case(f"{n} zero", lambda x, f=f: f(x, 0), (SMALL,)),
            Case(f"{n} zero point", lambda x, f=f: f(x, 0.0), (SMALL,)),
            Case(f"{n} edges", f, (EDGES, EDGES.flip(0))),
            Case(
                f"{n} scalar", lambda x, f=f: f(x, 0.125), (torch.tensor([0.125, 0.2, -0.1, 0.12]),)
            ),
            Case(f"{n} infinity", lambda x, f=f: f(x, -math.inf), (EDGES,)),
            Case(f"{n} ints", f, (near, near.flip(0))),
            Case(f"{n} int scalar", lambda x, f=f: f(x, 4001), (near,)),
            Case(f"{n} bools", f, (BOOLS, OTHERS)),
            Case(f"{n} bool and int", f, (BOOLS, near)),
            Case(f"{n} int and float", f, (INTS % 100, X[0, :2, :8].round())),
            Case(f"{n} bool scalar", lambda x, f=f: f(x, 1), (BOOLS,)),
        ]
        if n not in ("eq", "ne"):
            cases.append(Case(f"{n} int and half", lambda x, f=f: f(x, 4000.5), (near,)))
    check_all(cases)


def test_logic() -> None:
    number = torch.tensor([[0.0, 0.5, -2.0, 0.0], [1.0, 0.0, 3.0, 4.0]])
    fns: list[tuple[str, Function]] = [
        ("and", torch.logical_and),
        ("or", torch.logical_or),
        ("xor", torch.logical_xor),
        ("bitand", torch.bitwise_and),
        ("bitor", torch.bitwise_or),
        ("bitxor", torch.bitwise_xor),
        ("not", lambda x, y: ~x & y),
        ("add", lambda x, y: x + y),
        ("mul", lambda x, y: x * y),
        ("where", lambda x, y: torch.where(x, y, ~y)),
        ("min", torch.minimum),
        ("max", torch.maximum),
        ("scalar", lambda x, y: (x & True) | (y ^ True)),
        ("masked", lambda x, y: x.masked_fill(y, True)),
        ("add int", lambda x, y: x + y.long()),
        ("sum", lambda x, y: x * 2 + y),
    ]
    cases = [Case(n, f, (BOOLS, OTHERS)) for n, f in fns]
    cases += [
        Case("numbers and", torch.logical_and, (number, BOOLS)),
        Case("numbers not", torch.logical_not, (number,)),
        Case("ints xor", torch.logical_xor, (INTS[:, :4], BOOLS)),
        Case("isnan", torch.isnan, (torch.tensor([math.nan, 1.0, math.inf]),)),
        Case("isinf", torch.isinf, (torch.tensor([math.nan, 1.0, math.inf, -math.inf]),)),
        Case("isfinite", torch.isfinite, (torch.tensor([1.0, math.inf, -math.inf]),)),
    ]
    check_all(cases)


def test_selection_keeps_infinities() -> None:
    mask = X > 0
    check_all(
        [
            Case("where", lambda m, x: torch.where(m, x, -math.inf), (mask, X), exact=True),
            Case("masked_fill", lambda m, x: x.masked_fill(m, -math.inf), (mask, X), exact=True),
            Case(
                "tensor value",
                lambda m, x: x.masked_fill(m, torch.tensor(2.5)),
                (mask, X),
                exact=True,
            ),
            Case("scalars", lambda m, x: torch.where(m, 1.0, 0.5) + x, (mask, X), 70),
            Case(
                "mixed", lambda m, x: torch.where(m, x, INTS.sum() * 0 + 3), (mask, X), exact=True
            ),
            Case("added mask", lambda m, x: x + torch.where(m, 0.0, -math.inf), (mask, X), 70),
            Case("edges", lambda x: torch.maximum(x, -x), (EDGES,), exact=True),
        ]
    )


def test_casts() -> None:
    x = torch.tensor([[1.9, -1.9, 0.5, -0.5], [300.25, -2049.5, 0.0, 3.0]])
    check_all(
        [
            Case("float to int", lambda x: x.long(), (x,)),
            Case("there and back", lambda x: x.long().float(), (x,), exact=True),
            Case("through a view", lambda x: x.int().reshape(8).t().float(), (x,), exact=True),
            Case("float to bool", lambda x: x.bool(), (x,)),
            Case("zero to bool", lambda x: x.bool(), (SMALL,)),
            Case("int to bool", lambda i: i.bool(), (NONZERO - 3,)),
            Case("int to float", lambda i: i.float(), (NONZERO,), exact=True),
            Case("bool to float", lambda m: m.float() * 2, (BOOLS,), exact=True),
            Case("bool to int", lambda m: m.long() * 3, (BOOLS,)),
            Case("half", lambda x: x.half().float(), (x,), exact=True),
            Case("int and float", lambda i, x: i * x, (NONZERO[:, :4], x), 66),
            Case("true division", lambda i, j: i / j, (NONZERO * 7, NONZERO), 62),
            Case("int and scalar", lambda i: i * 0.5 + 1, (NONZERO,), exact=True),
            Case("clone", lambda x: x.clone().contiguous().detach() * 1.0, (x,), exact=True),
            Case("int64", lambda i: (i.int() + 1).long(), (NONZERO,)),
        ]
    )


@pytest.mark.parametrize(
    ("fn", "inputs", "reason"),
    [
        (lambda x, y: x**y, (NONZERO, NONZERO.abs()), "power"),
        (lambda x: x == 0.5, (INTS,), "compared with 0.5"),
        (lambda x: x.to(torch.uint8), (INTS,), "uint8"),
    ],
)
def test_what_htp_cannot_do_right_is_refused(
    fn: Function, inputs: tuple[torch.Tensor, ...], reason: str
) -> None:
    assert reason in refusal(fn, *inputs)


def test_scalar_operands_cost_no_op() -> None:
    assert op_types(lambda x: x / 8 + 1, X) == ["ElementWiseMultiply", "ElementWiseAdd"]
    assert op_types(lambda x: torch.floor_divide(x, 8.0), X) == [
        "ElementWiseMultiply",
        "ElementWiseFloor",
    ]


def test_a_value_that_is_an_input_and_an_output() -> None:
    check(lambda x: (x.clone(), x + 1), X, exact=False, min_sqnr=70)


def test_the_edge_dialects_copies_are_copies() -> None:
    pytest.importorskip("executorch.exir.passes.dim_order_ops_registry")
    ops = torch.ops.dim_order_ops

    def copies(x: torch.Tensor) -> torch.Tensor:
        y = ops._to_dim_order_copy.default(x, dtype=torch.int32, dim_order=[0, 1, 2])
        return ops._clone_dim_order.default(y, dim_order=[0, 1, 2])

    assert op_types(copies, X)[-1] == "Cast"


@pytest.mark.usefixtures("qnn_libraries")
def test_limits_of_a_product_with_a_bias_lose_no_digits() -> None:
    """Up to QAIRT 2.49 a fused ReluMinMax is exact relative to its lower limit only."""
    g = torch.Generator().manual_seed(0)
    w = (torch.randn(16, 16, generator=g) / 16).half().float()
    x = torch.randn(2, 4, 16, generator=g)
    cases: dict[str, Function] = {
        "wide": lambda x: torch.clamp(F.linear(x, w, w[0]), -60.0, 60.0),
        "hardtanh": lambda x: F.hardtanh(F.linear(x, w, w[0]) * 3.0),
        "above zero": lambda x: torch.clamp(F.linear(x, w, w[0]), 0.1, 3.0),
        "relu6": lambda x: F.relu6(F.linear(x, w, w[0])),
        "exp": lambda x: torch.exp(F.linear(x, w, w[0])),
        "conv": lambda x: torch.clamp(
            F.conv1d(x, w[:4, :12].reshape(4, 4, 3), w[0, :4]), -60.0, 60.0
        ),
    }
    check_all([Case(name, fn, (x,), min_sqnr=62) for name, fn in cases.items()])


@pytest.mark.usefixtures("qnn_libraries")
def test_tanh_of_a_product_is_as_exact_as_tanh() -> None:
    g = torch.Generator().manual_seed(0)
    w = (torch.randn(16, 16, generator=g) / 16).half().float()
    x = torch.randn(2, 4, 16, generator=g)
    cases: dict[str, Function] = {
        "product": lambda x: torch.tanh(x @ w),
        "linear": lambda x: torch.tanh(F.linear(x, w, w[0])),
        "sum": lambda x: torch.tanh(x @ w + x),
        "cell": lambda x: torch.tanh(F.linear(x, w) + F.linear(x.flip(0), w)),
        "attention": lambda x: torch.tanh(x @ x.transpose(1, 2) * 0.1 @ x),
        "conv": lambda x: torch.tanh(F.conv1d(x, w[:4, :12].reshape(4, 4, 3))),
    }
    check_all([Case(name, fn, (x,), min_sqnr=62) for name, fn in cases.items()])
