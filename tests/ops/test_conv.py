# SPDX-License-Identifier: BSD-3-Clause
"""Convolutions on the simulator against PyTorch."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, op_types
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

Function = Callable[..., Any]


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@functools.cache  # made before a function is traced: a generator cannot be exported
def filters(*shape: int) -> torch.Tensor:
    return normal(*shape, seed=1) * 0.3


X = normal(2, 4, 9, 8)
BIAS = normal(8, seed=2)

CONVOLUTIONS: list[tuple[str, Function]] = [
    ("3x3", lambda x: F.conv2d(x, filters(6, 4, 3, 3), BIAS[:6])),
    ("no bias", lambda x: F.conv2d(x, filters(6, 4, 3, 3), padding=1)),
    ("1x1", lambda x: F.conv2d(x, filters(6, 4, 1, 1), BIAS[:6])),
    ("oblong", lambda x: F.conv2d(x, filters(6, 4, 3, 2), None, (2, 1), (1, 0), (1, 2))),
    ("same", lambda x: F.conv2d(x, filters(6, 4, 4, 3), padding="same")),
    ("groups", lambda x: F.conv2d(x, filters(8, 2, 3, 3), BIAS, padding=1, groups=2)),
    ("depthwise", lambda x: F.conv2d(x, filters(4, 1, 3, 3), BIAS[:4], padding=1, groups=4)),
    ("depthwise x2", lambda x: F.conv2d(x, filters(8, 1, 3, 3), BIAS, stride=2, groups=4)),
    ("dilated depthwise", lambda x: F.conv2d(x, filters(4, 1, 3, 3), None, 1, 2, 2, 4)),
    ("patches", lambda x: F.conv2d(x, filters(6, 4, 4, 4), BIAS[:6], stride=4)),
    ("weights at run time", lambda x: F.conv2d(x, x[:, :, :3, :3] * 0.3, padding=1)),
    ("reflected", lambda x: F.conv2d(F.pad(x, (1, 1, 1, 1), "reflect"), filters(6, 4, 3, 3))),
    ("1d", lambda x: F.conv1d(x[0], filters(6, 9, 3).repeat(1, 1, 1), BIAS[:6], padding=1)),
    ("1d causal", lambda x: F.conv1d(F.pad(x[0], (3, 0)), filters(9, 1, 4), None, groups=9)),
    *((f"row of {n} by {k}",
       lambda x, n=n, k=k: F.conv1d(x.reshape(1, 6, -1)[..., :n], filters(6, 6, k), padding=k // 2))
      for n, k in ((8, 5), (8, 7), (16, 7), (24, 9))),
    ("1d dilated", lambda x: F.conv1d(x[0], filters(6, 3, 3), None, 1, 2, 2, 3)),
    *((f"1d, channels last, {n} by {k}, dilation {d}",
       lambda x, n=n, k=k, d=d: F.conv1d(x.reshape(2, -1, 6)[:, :n].transpose(1, 2),
                                         filters(6, 6, k), None, 1, d * (k // 2), d))
      for n, k, d in ((8, 3, 1), (8, 3, 2), (12, 3, 2), (16, 7, 1), (24, 3, 4))),
    ("1d padded before", lambda x: F.conv1d(F.pad(x[0], (2, 2)), filters(6, 9, 5))),
    ("1d strided", lambda x: F.conv1d(x[0], filters(6, 9, 5), None, 2, 2)),
    ("column", lambda x: F.conv2d(x[:, :, :8, :1], filters(6, 4, 3, 1), None, 1, (1, 0))),
    ("row", lambda x: F.conv2d(x[:, :, :1], filters(6, 4, 1, 5), None, 1, (0, 2))),
    ("one place", lambda x: F.conv2d(x[:, :, :1, :1], filters(6, 4, 3, 3), None, 1, 1)),
    ("transposed", lambda x: F.conv_transpose2d(x, filters(4, 6, 3, 3), BIAS[:6], 2, 1, 1)),
    ("transposed oblong",
     lambda x: F.conv_transpose2d(x, filters(4, 6, 3, 2), None, (3, 2), (1, 0))),
    ("transposed groups",
     lambda x: F.conv_transpose2d(x, filters(4, 3, 3, 3), BIAS[:6], 2, 1, 0, 2)),
    ("transposed dilated",
     lambda x: F.conv_transpose2d(x, filters(4, 6, 3, 3), None, 1, 1, 0, 1, 2)),
    ("transposed depthwise",
     lambda x: F.conv_transpose2d(x, filters(4, 2, 2, 2), None, 2, 0, 0, 4)),
    ("transposed 1d", lambda x: F.conv_transpose1d(x[0], filters(9, 6, 4), BIAS[:6], 2, 1)),
    ("3d", lambda x: F.conv3d(x[None], filters(4, 2, 2, 3, 3), None, (1, 1, 2), (0, 1, 1))),
]  # fmt: skip


@pytest.mark.usefixtures("qnn_libraries")
def test_convolutions_follow_pytorch() -> None:
    check_all([Case(name, fn, (X,), min_sqnr=60) for name, fn in CONVOLUTIONS])


@st.composite
def convolutions(draw: st.DrawFn) -> Case:
    """Of one to three axes, transposed or not, with weights that are known or not."""
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    lengths = [1, 2, 3, 5, 8] if axes == 3 else [1, 2, 3, 5, 7, 8, 16, 24]
    spatial = [draw(st.sampled_from(lengths)) for _ in range(axes)]
    groups = draw(st.sampled_from([1, 1, 1, 2, 3, 8]))
    inner, outer = (draw(st.sampled_from([1, 1, 2, 5])) for _ in range(2))
    if groups == 1:
        inner, outer = (draw(st.sampled_from([1, 3, 8, 33])) for _ in range(2))
    lead = draw(st.sampled_from([(1,), (1,), (2,), ()]))
    transposed = draw(st.booleans())
    dilated = draw(st.booleans())
    numbers: list[tuple[int, ...]] = []
    for n in spatial:
        d = draw(st.integers(1, 3)) if dilated else 1
        k = draw(st.integers(1, 5))
        s = draw(st.integers(1, 4))
        p = draw(st.integers(0, 3))
        if transposed:
            while (n - 1) * s - 2 * p + d * (k - 1) + 1 < 1:
                p -= 1
        while not transposed and d * (k - 1) + 1 > n + 2 * p:
            k -= 1
        meets = any((i * s - p + j * d) in range(n) for i in range(n + 2 * p) for j in range(k))
        p = p if transposed or meets else 0  # a result of the bias alone
        numbers.append((k, s, p, d, draw(st.integers(0, max(s, d) - 1))))
    kernel, stride, padding, dilation, extra = (list(v) for v in zip(*numbers, strict=True))
    x = normal(*lead, groups * inner, *spatial)
    channels = (groups * inner, outer) if transposed else (groups * outer, inner)
    w = normal(*channels, *kernel, seed=1)
    w /= math.sqrt(inner * math.prod(kernel))
    bias = draw(st.sampled_from([None, normal(groups * outer, seed=2)]))
    named = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups}
    if transposed:
        named["output_padding"] = extra
    op = getattr(F, f"conv{'_transpose' * transposed}{axes}d")
    known = draw(st.booleans())
    name = f"{op.__name__} {tuple(x.shape)} by {tuple(w.shape)} {named} {bias is not None} {known}"
    if known:
        return Case(name, lambda x: op(x, w, bias, **named), (x,), 50)
    return Case(name, lambda x, w: op(x, w, bias, **named), (x, w), 50)


class Residual(nn.Module):
    """Convolutions with all that may stand between two of them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.c, self.gate = nn.Conv2d(12, 4, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.a(x))
        y = y + self.b(y) * 0.5
        y = y * torch.sigmoid(self.gate(F.adaptive_avg_pool2d(y, (1, 1))))
        y = self.c(torch.cat([y, x], 1))
        return F.max_pool2d(torch.relu(y), 2)


class Padded(nn.Module):
    """A stack whose later layers get rows that are only reshaped."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Conv1d(4, 8, 5, padding=2), nn.ReLU(), nn.Conv1d(8, 8, 3, padding=2, dilation=2),
            nn.ReLU(), nn.Conv1d(8, 4, 3, padding=1),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Conv1dChain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.mark.parametrize(
    ("module", "x"),
    [(Residual(), X), (Conv1dChain(), X[:, :, 0]), (Conv1dChain(), X[:1, :, 0])],
    ids=["2d", "1d", "1d, one in the batch"],
)
def test_only_the_ends_of_a_chain_of_convolutions_change_layout(
    module: nn.Module, x: torch.Tensor
) -> None:
    assert Counter(op_types(module, x))["Transpose"] == 2


@pytest.mark.usefixtures("qnn_libraries")
def test_chains_of_convolutions_follow_pytorch() -> None:
    check_all(
        [
            Case("2d", Residual(), (X,), min_sqnr=50),
            Case("1d", Conv1dChain(), (X[:, :, 0],), min_sqnr=50),
            Case("1d, one in the batch", Conv1dChain(), (X[:1, :, 0],), min_sqnr=50),
            Case("1d padded", Padded(), (X[:, :, 0],), min_sqnr=50),
            Case("1d padded, one in the batch", Padded(), (X[:1, :, 0],), min_sqnr=50),
        ]
    )
