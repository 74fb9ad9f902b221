# SPDX-License-Identifier: BSD-3-Clause
"""Scatters that reduce, and bags of embeddings, on the simulator against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, refusal
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Function = Callable[..., Any]


def data(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    """Numbers whose sums, and products of a few, fp16 holds exactly."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randint(1, 5, shape, generator=g) * (torch.randint(0, 2, shape, generator=g) * 2 - 1)
    return x / 2 if dtype.is_floating_point else x


def places(n: int, shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randint(0, n, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def scatters(draw: st.DrawFn) -> Case:
    """Of any shape and axis, also into a part, with and without what was there before."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64]))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    d = draw(st.integers(0, len(shape) - 1))
    length = draw(st.integers(1, 9))
    how = draw(st.sampled_from(["sum", "prod", "mean", "amax", "amin"]))
    if dtype is torch.int64 and how == "mean":
        dtype = torch.float32
    include = draw(st.booleans())
    x = data(dtype, shape)
    some = tuple(length if k == d else draw(st.integers(1, n)) for k, n in enumerate(shape))
    whole = (*shape[:d], length, *shape[d + 1 :])
    source = data(dtype, whole, 1)
    row = places(shape[d], (length,))
    lined = row.reshape(-1, *(1,) * (len(shape) - d - 1))
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("scatter", lambda x, i, y: x.scatter_reduce(d, i, y, how, include_self=include),
         (x, places(shape[d], some), source)),
        ("rows", lambda x, i, y: x.scatter_reduce(
            d, i.expand(whole), y, how, include_self=include), (x, lined, source)),
        ("known", lambda x, y: x.scatter_reduce(
            d, lined.expand(whole), y, how, include_self=include), (x, source)),
    ]  # fmt: skip
    if how != "sum":
        table.append(
            ("index_reduce", lambda x, i, y: x.index_reduce(d, i, y, how, include_self=include),
             (x, row, source))
        )  # fmt: skip
    name, fn, inputs = draw(st.sampled_from(table))
    exact = how not in ("mean", "prod") or dtype is torch.int64
    return Case(f"{name} {how} {include} {d} of {dtype} {shape} {some}", fn, inputs, 58, exact)


@pytest.mark.slow  # runs on the newest release: the compiler of 2.3.0 refuses one of the graphs
@pytest.mark.usefixtures("qnn_libraries")
def test_scatters_reduce() -> None:
    check_samples(scatters(), 12, 3)


@st.composite
def bags(draw: st.DrawFn) -> Case:
    mode = draw(st.sampled_from(["sum", "mean", "max"]))
    padding = draw(st.sampled_from([None, 1]))
    last = draw(st.booleans())
    g = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    table = torch.randn(10, draw(st.integers(1, 7)), generator=g)
    bag = nn.EmbeddingBag.from_pretrained(
        table, mode=mode, padding_idx=padding, include_last_offset=last
    )
    n = draw(st.integers(1, 12))
    index = torch.randint(0, 10, (n,), generator=g)
    starts = sorted(draw(st.lists(st.integers(0, n), max_size=4)))
    offsets = torch.tensor([0, *starts, *([n] if last else [])])
    weights = torch.randn(n, generator=g) if mode == "sum" and draw(st.booleans()) else None
    known = draw(st.booleans())
    name = f"{mode} {padding} {offsets.tolist()} of {n} last={last} known={known}"
    if draw(st.booleans()) and not last:
        matrix = torch.randint(0, 10, (3, n), generator=g)
        return Case(f"matrix {name}", bag, (matrix,), 58)
    if known:
        return Case(name, lambda i: bag(i, offsets, weights), (index,), 58)
    if weights is None:
        return Case(name, bag, (index, offsets), 58)
    return Case(name, bag, (index, offsets, weights), 58)


@pytest.mark.usefixtures("qnn_libraries")
def test_bags_of_embeddings() -> None:
    check_samples(bags(), 16, 3)


class GraphLayer(nn.Module):
    """Messages along edges: each node takes the largest, the mean and the softmax of its own."""

    def forward(self, nodes: Tensor, source: Tensor, target: Tensor) -> Tensor:
        n, width = nodes.shape
        at = target[:, None].expand(-1, width)
        messages = nodes[source]
        zero = torch.zeros(n, width)
        most = zero.scatter_reduce(0, at, messages, "amax", include_self=False)
        mean = zero.scatter_reduce(0, at, messages, "mean", include_self=False)
        e = (messages - most[target]).exp()
        share = e / zero.scatter_add(0, at, e)[target]
        return most + mean + zero.scatter_add(0, at, share * messages)


@pytest.mark.usefixtures("qnn_libraries")
def test_a_layer_of_a_graph_network() -> None:
    nodes = torch.randn(20, 8, generator=torch.Generator().manual_seed(0))
    check_all([Case("layer", GraphLayer(), (nodes, places(20, (60,)), places(20, (60,), 1)), 52)])


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_megabytes() -> None:
    x, y = data(torch.float32, (2000, 64)), data(torch.float32, (9000, 64), 1)
    row = places(2000, (9000, 1))
    table = torch.randn(4000, 256, generator=torch.Generator().manual_seed(0))
    index = places(4000, (64, 40))
    check_all(
        [
            Case("amax", lambda x, i, y: x.scatter_reduce(0, i.expand(-1, 64), y, "amax"),
                 (x, row, y), exact=True),
            Case("sum", lambda x, i, y: x.scatter_reduce(0, i.expand(-1, 64), y, "sum"),
                 (x, row, y), exact=True),
            Case("bags", lambda i: F.embedding_bag(i, table), (index,), 55),
            Case("bags by offsets", lambda i, o: F.embedding_bag(i, table, o, mode="sum"),
                 (index.flatten(), torch.arange(0, 2560, 37)), 55),
        ]
    )  # fmt: skip


def test_what_has_no_float_form_is_refused() -> None:
    i, x = places(4, (4,)), torch.ones(4, dtype=torch.int64)
    assert "rounded down" in refusal(lambda x, i: x.scatter_reduce(0, i, x, "mean"), x, i)
    assert "bools" in refusal(lambda x, i: x.scatter_reduce(0, i, x, "amax"), x > 0, i)
