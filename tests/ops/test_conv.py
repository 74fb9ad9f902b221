# SPDX-License-Identifier: BSD-3-Clause
"""Convolutions, pools and resampling on the simulator against PyTorch."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check_all, op_types, refusal
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

POOLS: list[tuple[str, Function]] = [
    ("max", lambda x: F.max_pool2d(x, 2)),
    ("max padded", lambda x: F.max_pool2d(x, 3, 2, 1)),
    ("max ceil", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True)),
    ("max ceil, last window left out", lambda x: F.max_pool2d(x, (2, 3), (2, 3), (0, 1), 1, True)),
    ("max rest unused", lambda x: F.max_pool2d(x, 4, 4)),
    ("max of one image", lambda x: F.max_pool2d(x[0], 2)),
    ("max 1d", lambda x: F.max_pool1d(x[0], 3, 2)),
    ("adaptive max", lambda x: F.adaptive_max_pool2d(x, (3, 4))),
    ("avg", lambda x: F.avg_pool2d(x, 2)),
    ("avg padded", lambda x: F.avg_pool2d(x, 3, 2, 1)),
    ("avg without padding", lambda x: F.avg_pool2d(x, 3, 2, 1, count_include_pad=False)),
    ("avg ceil", lambda x: F.avg_pool2d(x, 3, 2, 0, ceil_mode=True)),
    ("avg ceil padded", lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True)),
    ("avg ceil, no padding counted",
     lambda x: F.avg_pool2d(x, (2, 3), (2, 3), (0, 1), True, False)),
    ("avg divisor", lambda x: F.avg_pool2d(x, 2, divisor_override=3)),
    ("avg 1d", lambda x: F.avg_pool1d(x[0], 3, 2, 1)),
    ("avg 1d overlapping", lambda x: F.avg_pool1d(x[0], 5, 1, 2)),
    ("avg overlapping", lambda x: F.avg_pool2d(x.reshape(1, 1, 24, 24), 3, 1, 1)),
    ("avg overlapping inside", lambda x: F.avg_pool2d(x.reshape(1, 1, 24, 24), 2, 1)),
    ("max overlapping", lambda x: F.max_pool2d(x.reshape(1, 1, 24, 24), 3, 1, 1)),
    ("adaptive avg", lambda x: F.adaptive_avg_pool2d(x, (3, 2))),
    ("adaptive avg to one", lambda x: F.adaptive_avg_pool2d(x, (1, 4))),
    ("adaptive avg 1d", lambda x: F.adaptive_avg_pool1d(x[0], 4)),
    ("nearest", lambda x: F.interpolate(x, scale_factor=2)),
    ("nearest down", lambda x: F.interpolate(x, size=(5, 11))),
    ("nearest 1d", lambda x: F.interpolate(x[0], scale_factor=2)),
    ("bilinear", lambda x: F.interpolate(x, scale_factor=2, mode="bilinear")),
    ("bilinear down", lambda x: F.interpolate(x, size=(5, 11), mode="bilinear")),
    ("bilinear corners",
     lambda x: F.interpolate(x, size=(7, 15), mode="bilinear", align_corners=True)),
]  # fmt: skip


@pytest.mark.usefixtures("qnn_libraries")
def test_convolutions_follow_pytorch() -> None:
    check_all([Case(name, fn, (X,), min_sqnr=60) for name, fn in CONVOLUTIONS])


@pytest.mark.usefixtures("qnn_libraries")
def test_pools_and_resampling_follow_pytorch() -> None:
    check_all([Case(name, fn, (X,), min_sqnr=55) for name, fn in POOLS])


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


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x: F.max_pool2d(x, 2, return_indices=True), "where the maxima stood"),
        (lambda x: F.max_pool2d(x, 2, dilation=2), "no dilation"),
        (lambda x: F.adaptive_avg_pool2d(x, (4, 3)), "does not divide"),
        (lambda x: F.interpolate(x, scale_factor=1.3), "not by 1.3"),
        (lambda x: F.conv_transpose3d(x[None], torch.ones(2, 2, 2, 2, 2)), "three spatial axes"),
    ],
)
def test_what_qnn_cannot_do_is_refused_with_the_reason(fn: Function, reason: str) -> None:
    assert reason in refusal(fn, X)
