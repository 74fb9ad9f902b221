# SPDX-License-Identifier: BSD-3-Clause
"""Properties of op families: shapes, types, dims and attributes at random, against PyTorch.

Families with a property test of their own are not here: see `test_bits`, `test_functions`,
`test_ranks`, `test_recurrent`, `test_transposes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_samples
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from test_conv import convolutions
from test_pool import adaptive, averages, maxima
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]
Entry = tuple[str, Function, tuple[Tensor, ...], float]

EXACT = math.inf


def eighths(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values that fp16 holds exactly, and sums of some of them too."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    values = torch.randint(-40, 40, shape, generator=g)
    return values / 8 if dtype.is_floating_point else values


def normal(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chosen(draw: st.DrawFn, entries: list[Entry], shape: tuple[int, ...]) -> Case:
    name, fn, inputs, sqnr = draw(st.sampled_from(entries))
    exact = sqnr == EXACT
    return Case(f"{name} {shape}", fn, inputs, 0 if exact else sqnr, exact)


def shapes(least: int = 1, most: int = 4, longest: int = 9) -> SearchStrategy[tuple[int, ...]]:
    """Few elements, or one axis of some thousand and up to 2 MB."""
    few = st.lists(st.integers(1, longest), min_size=least, max_size=most).map(tuple)
    many = few.map(lambda s: (*s[:-1], 1 + 1000 * s[-1]))
    return st.one_of(few, few, many.filter(lambda s: math.prod(s) <= 1 << 20))


@st.composite
def elementwise(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    narrow = tuple(draw(st.sampled_from([n, n, 1])) for n in shape)
    narrow = narrow[draw(st.integers(0, len(shape))) :]
    dtype = draw(st.sampled_from([torch.float32, torch.int32, torch.int64]))
    x, y = eighths(shape, dtype), eighths(narrow, dtype, 1)
    low, high = sorted(draw(st.tuples(st.integers(-4, 4), st.integers(-4, 4))))
    number = draw(st.sampled_from([-3, -1, 0, 2, 5]))
    entries: list[Entry] = [
        ("add", lambda x, y: torch.add(x, y, alpha=2), (x, y), EXACT),
        ("rsub", lambda x: torch.rsub(x, number), (x,), EXACT),
        ("mul", torch.mul, (x, y), 60),
        ("neg and abs", lambda x: (-x, x.abs()), (x,), EXACT),
        ("sign", torch.sign, (x,), EXACT),
        ("maximum", torch.maximum, (x, y), EXACT),
        ("minimum", torch.minimum, (x, y), EXACT),
        (f"clamp {low} {high}", lambda x: x.clamp(low, high), (x,), EXACT),
        ("compared", lambda x, y: (x < y, x >= y, x == y, x != y), (x, y), EXACT),
        (f"compared to {number}", lambda x: (x > number, x <= number), (x,), EXACT),
        ("where", lambda x, y: torch.where(x > 0, x, y), (x, y), EXACT),
        ("masked_fill", lambda x, y: x.masked_fill(y > 0, number), (x, y), EXACT),
        ("logical", lambda x, y: torch.logical_xor(x, y) & torch.logical_not(x), (x, y), EXACT),
    ]
    if dtype.is_floating_point:
        away = torch.where(y.abs() < 0.5, 0.75, y)
        entries += [
            ("div", torch.div, (x, away), 60),
            ("floor", lambda x: (x.floor(), x.ceil(), x.round(), x.trunc()), (x,), EXACT),
            ("sqrt", lambda x: (x.abs().sqrt(), (x.abs() + 0.25).rsqrt()), (x,), 55),
            ("silu", F.silu, (x,), 50),
            ("tanh", lambda x: (x.tanh(), x.sigmoid()), (x,), 55),
            ("relu", lambda x: (F.relu(x), F.leaky_relu(x, 0.125), F.relu6(x)), (x,), 60),
            ("lerp", lambda x, y: torch.lerp(x, y, 0.25), (x, y), 55),
            ("addcmul", lambda x, y: torch.addcmul(x, y, y, value=0.5), (x, y), 55),
        ]
    else:
        some = torch.where(y == 0, 3, y)
        entries += [
            ("floor_divide", lambda x, y: torch.div(x, y, rounding_mode="floor"), (x, some), EXACT),
            ("trunc_divide", lambda x, y: torch.div(x, y, rounding_mode="trunc"), (x, some), EXACT),
            ("remainder", torch.remainder, (x, some), EXACT),
        ]
    return chosen(draw, entries, shape)


@st.composite
def reductions(draw: st.DrawFn) -> Case:
    shape = draw(shapes())
    dims = draw(st.lists(st.sampled_from(range(len(shape))), unique=True, min_size=1))
    keep = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32, torch.int32]))
    x = eighths(shape, dtype)
    near = (x / 64).float()
    d = dims[0]
    more = {"keepdim": keep}
    entries: list[Entry] = [
        (f"sum {dims}", lambda x: x.sum(dims, **more), (x,), 50),
        (f"amax {dims}", lambda x: (x.amax(dims, **more), x.amin(dims, **more)), (x,), EXACT),
        (f"argmax {d}", lambda x: (x.argmax(d, **more), x.argmin(d, **more)), (x,), EXACT),
        (f"max {d}", lambda x: x.max(d, **more).values, (x,), EXACT),
        (f"any {d}", lambda x: ((x > 4).any(d, **more), (x > -4).all(d, **more)), (x,), EXACT),
        (f"mean {dims}", lambda x: x.mean(dims, **more), (near + 1,), 50),
        (f"var {dims}", lambda x: x.var(dims, correction=0, **more), (near,), 40),
        (f"norm {dims}", lambda x: torch.linalg.vector_norm(x, 2, dims, **more), (near,), 50),
        (f"softmax {d}", lambda x: (x.softmax(d), x.log_softmax(d)), (near * 8,), 50),
        (f"cumsum {d}", lambda x: x.cumsum(d), (near,), 45),
        (f"logsumexp {dims}", lambda x: x.logsumexp(dims, **more), (near,), 50),
    ]
    return chosen(draw, entries, shape)


@st.composite
def products(draw: st.DrawFn) -> Case:
    m, k, n = (draw(st.sampled_from([1, 2, 3, 8, 17, 64])) for _ in range(3))
    lead = draw(st.lists(st.integers(1, 3), max_size=2).map(tuple))
    rhs = draw(st.sampled_from([lead, tuple(1 for _ in lead), ()]))
    x, y = normal((*lead, m, k)) / math.sqrt(k), normal((*rhs, k, n), 1)
    weight, bias = normal((n, k), 2) / math.sqrt(k), normal((n,), 3)
    flat = (x.reshape(-1, k), y.reshape(-1, k, n)[0])
    heads = draw(st.sampled_from([1, 2, 4]))
    q, c = (normal((1, heads, length, 8), i) for i, length in enumerate((m, k)))
    mask = torch.arange(k) <= torch.arange(m)[:, None] + k // 2
    entries: list[Entry] = [
        ("matmul", torch.matmul, (x, y), 50),
        ("known on the right", lambda x: x @ y, (x,), 50),
        ("transposed", lambda x, y: x @ y.mT, (x, y.mT.contiguous()), 50),
        ("linear", lambda x: F.linear(x, weight, bias), (x,), 50),
        ("linear without bias", lambda x: F.linear(x, weight), (x,), 50),
        ("linear at run time", F.linear, (x, weight), 50),
        ("addmm", lambda b, x, y: torch.addmm(b, x, y, beta=0.5), (bias, *flat), 50),
        ("einsum", lambda x, y: torch.einsum("ik,kj->ji", x, y), flat, 50),
        ("mv", lambda x, y: torch.mv(x, y[:, 0]), flat, 50),
        ("attention", lambda q, c: F.scaled_dot_product_attention(q, c, c), (q, c), 45),
        ("masked attention",
         lambda q, c: F.scaled_dot_product_attention(q, c, c, attn_mask=mask), (q, c), 45),
    ]  # fmt: skip
    return chosen(draw, entries, (*lead, m, k, n))


@st.composite
def norms(draw: st.DrawFn) -> Case:
    shape = draw(shapes(2, 4, 8).filter(lambda s: math.prod(s) > 4))
    x = normal(shape) * draw(st.sampled_from([0.25, 1.0, 8.0])) + draw(st.sampled_from([0.0, 2.0]))
    last = draw(st.integers(1, len(shape) - 1))
    normed = shape[-last:]
    weight, bias = normal(normed, 1), normal(normed, 2)
    channels = shape[1]
    groups = draw(st.sampled_from([g for g in (1, 2, 3, 4, channels) if channels % g == 0]))
    scale, shift = normal((channels,), 3), normal((channels,), 4)
    mean, var = normal((channels,), 5), normal((channels,), 6).abs() + 0.25
    entries: list[Entry] = [
        ("batch_norm", lambda x: F.batch_norm(x, mean, var, scale, shift), (x,), 45),
        ("layer_norm", lambda x: F.layer_norm(x, normed, weight, bias), (x,), 40),
        ("rms_norm", lambda x: F.rms_norm(x, normed[-1:], weight.reshape(-1, normed[-1])[0]),
         (x,), 40),
    ]  # fmt: skip
    if math.prod(shape[2:]) * channels // groups > 4:
        entries.append(
            ("group_norm", lambda x: F.group_norm(x, groups, scale, shift), (x,), 40)
        )  # fmt: skip
    return chosen(draw, entries, shape)


@st.composite
def indexing(draw: st.DrawFn) -> Case:
    shape = draw(shapes(1, 4, 8))
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    d = draw(st.integers(0, len(shape) - 1))
    n = shape[d]
    count = draw(st.integers(1, min(n, 5)))
    g = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    places = torch.randperm(n, generator=g)[:count]
    part = tuple(draw(st.integers(1, k)) if i != d else count for i, k in enumerate(shape))
    spread = places.reshape(-1, *(1,) * (len(shape) - 1 - d)).expand(part).contiguous()
    x = eighths(shape, dtype)
    rows = eighths((*shape[:d], count, *shape[d + 1 :]), dtype, 1)
    some = eighths(part, dtype, 2)
    start = draw(st.integers(0, n - 1))
    stop, step = draw(st.integers(start + 1, n)), draw(st.integers(1, 3))
    length = len(range(start, stop, step))
    source = eighths((*shape[:d], length, *shape[d + 1 :]), dtype, 3)
    index = (slice(None),) * d
    entries: list[Entry] = [
        (f"index_select {d}", lambda x, i: x.index_select(d, i), (x, places), EXACT),
        (f"index {d}", lambda x, i: x[(*index, i)], (x, places - n), EXACT),
        (f"gather {d} {part}", lambda x, i: x.gather(d, i), (x, spread), EXACT),
        (f"scatter {d} {part}", lambda x, i, s: x.scatter(d, i, s), (x, spread, some), EXACT),
        (f"index_copy {d}", lambda x, i, r: x.index_copy(d, i, r), (x, places, rows), EXACT),
        (f"index_put {d}", lambda x, i, r: torch.ops.aten.index_put(x, [None] * d + [i], r),
         (x, places, rows), EXACT),
        (f"slice_scatter {d} {start}:{stop}:{step}",
         lambda x, s: torch.slice_scatter(x, s, d, start, stop, step), (x, source), EXACT),
        (f"select_scatter {d} {start}",
         lambda x, s: torch.select_scatter(x, s.select(d, 0), d, start), (x, source), EXACT),
    ]  # fmt: skip
    if dtype is not torch.bool:
        entries += [
            (f"index_add {d}", lambda x, i, r: x.index_add(d, i, r), (x, places, rows), EXACT),
            (f"scatter_add {d}", lambda x, i, s: x.scatter_add(d, i, s), (x, spread, some), EXACT),
        ]
    return chosen(draw, entries, shape)


@st.composite
def layouts(draw: st.DrawFn) -> Case:
    shape = draw(shapes(2, 4, 8))
    dtype = draw(st.sampled_from([torch.float32, torch.int32, torch.bool]))
    x, y = eighths(shape, dtype), eighths(shape, dtype, 1)
    d = draw(st.integers(0, len(shape) - 1))
    perm = draw(st.permutations(range(len(shape))))
    cut = draw(st.integers(1, shape[d]))
    times = tuple(draw(st.integers(1, 2)) for _ in shape)
    shift = draw(st.integers(-9, 9))
    pads = [draw(st.integers(0, 2)) for _ in range(4)]
    entries: list[Entry] = [
        (f"permute {perm}", lambda x: x.permute(perm).contiguous(), (x,), EXACT),
        (f"cat {d}", lambda x, y: torch.cat([x, y.narrow(d, 0, cut), x], d), (x, y), EXACT),
        (f"split {d} {cut}", lambda x: [t.clone() for t in x.split(cut, d)], (x,), EXACT),
        (f"stack {d}", lambda x, y: torch.stack([x, y], d), (x, y), EXACT),
        (f"repeat {times}", lambda x: x.repeat(times), (x,), EXACT),
        (f"flip {d}", lambda x: x.flip(d), (x,), EXACT),
        (f"roll {shift} {d}", lambda x: x.roll(shift, d), (x,), EXACT),
        (f"unfold {d}", lambda x: x.unfold(d, cut, 1 + cut // 2).clone(), (x,), EXACT),
        (f"pad {pads}", lambda x: F.pad(x, pads, value=1), (x,), EXACT),
        (f"flatten {d}", lambda x: x.permute(perm).reshape(-1), (x,), EXACT),
    ]
    if len(shape) == 4 and dtype is torch.float32:
        h, w = (min(p, n - 1) for p, n in zip((pads[2], pads[0]), shape[2:], strict=True))
        more = st.integers(1, 9)
        size = (draw(more), draw(more))
        entries += [
            ("reflect", lambda x: F.pad(x, (w, w, h, 0), "reflect"), (x,), EXACT),
            ("replicate", lambda x: F.pad(x, (1, 2, 0, 1), "replicate"), (x,), EXACT),
            (f"nearest to {size}", lambda x: F.interpolate(x, size), (x,), EXACT),
            (f"bilinear to {size}",
             lambda x: F.interpolate(x, size, mode="bilinear", align_corners=bool(h)), (x,), 50),
        ]  # fmt: skip
    return chosen(draw, entries, shape)


FAMILIES: dict[str, SearchStrategy[Case]] = {
    "elementwise": elementwise(),
    "reductions": reductions(),
    "products": products(),
    "norms": norms(),
    "indexing": indexing(),
    "layouts": layouts(),
    "convolutions": convolutions(),
    "pools": st.one_of(maxima(), averages(), adaptive()),
}


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("family", FAMILIES)
def test_ops_of_any_form_follow_pytorch(family: str) -> None:
    check_samples(FAMILIES[family], 16, 1)
