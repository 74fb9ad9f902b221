# SPDX-License-Identifier: BSD-3-Clause
"""Normalisation layers on the simulator against PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import Case, check, check_all, op_types
from torch import nn
from torch.nn import functional as F

native_group_norm = torch.ops.aten.native_group_norm


def normal(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def outliers() -> torch.Tensor:
    """Activations with channels whose squares fp16 does not hold."""
    x = normal(1, 3, 64)
    x[..., 7] = 300.0
    x[:, 2, 9] = -450.0
    return x


W, B = normal(16, seed=1), normal(16, seed=2)
W2, B2 = normal(5, 16, seed=7), normal(5, 16, seed=8)
X = normal(2, 5, 16)
IMAGE = normal(2, 6, 5, 7) * 3 + 1
C = normal(6, seed=3), normal(6, seed=4)


def trained(layer: nn.Module) -> nn.Module:
    """`layer` with weights and statistics that are not the neutral ones."""
    torch.manual_seed(5)
    for t in [*layer.parameters(), *layer.buffers()]:
        if t.is_floating_point():
            t.data = torch.rand_like(t) + 0.5
    return layer.eval()


class HandWritten(nn.Module):
    """The formula of an RMS norm as most decoders spell it."""

    def __init__(self, n: int, weight_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(n, seed=6))
        self.weight_first = weight_first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x if self.weight_first else x * self.weight


def test_layers() -> None:
    cases: list[tuple[str, Callable[..., Any], torch.Tensor]] = [
        ("rms_norm", lambda x: F.rms_norm(x, (16,), W, 1e-5), X),
        ("rms_norm without weight", lambda x: F.rms_norm(x, (16,)), X),
        ("rms_norm of two axes", lambda x: F.rms_norm(x, (5, 16), W2, 1e-6), X),
        ("rms_norm module", trained(nn.RMSNorm(16)), X),
        ("rms_norm of a row", lambda x: F.rms_norm(x, (16,), W), X[0, 0]),
        ("rms_norm of rank 5", lambda x: F.rms_norm(x, (16,), W), X.reshape(1, 2, 1, 5, 16)),
        ("rms_norm of outliers", lambda x: F.rms_norm(x, (64,), eps=1e-6), outliers()),
        ("rms_norm of large outliers", lambda x: F.rms_norm(x * 130, (64,), eps=1e-6), outliers()),
        ("layer_norm", lambda x: F.layer_norm(x, (16,), W, B), X),
        ("layer_norm without weights", lambda x: F.layer_norm(x, (16,)), X),
        ("layer_norm without bias", lambda x: F.layer_norm(x, (16,), W), X),
        ("layer_norm of two axes", lambda x: F.layer_norm(x, (5, 16), W2, B2), X),
        ("layer_norm module", trained(nn.LayerNorm(16)), X),
        ("layer_norm of rank 5", lambda x: F.layer_norm(x, (16,), W), X.reshape(1, 2, 1, 5, 16)),
        ("layer_norm of outliers", lambda x: F.layer_norm(x, (64,)), outliers()),
        ("layer_norm far from zero", lambda x: F.layer_norm(x, (16,), W, B), X + 100),
        ("native", lambda x: torch.ops.aten.native_layer_norm(x, [16], W, B, 1e-5), X),
        ("group_norm", lambda x: F.group_norm(x, 3, *C), IMAGE),
        ("group_norm without weights", lambda x: F.group_norm(x, 2), IMAGE),
        ("group_norm of one group", trained(nn.GroupNorm(1, 6)), IMAGE),
        ("group_norm of rows", lambda x: F.group_norm(x.flatten(2), 3, *C), IMAGE),
        ("group_norm of channels", lambda x: F.group_norm(x, 4), X[:, 0]),
        ("group_norm of rank 5", lambda x: F.group_norm(x[:, :, None], 3, *C), IMAGE),
        ("native group", lambda x: native_group_norm(x, *C, 2, 6, 35, 3, 1e-5), IMAGE),
        ("instance_norm", lambda x: F.instance_norm(x), IMAGE),
        ("instance_norm module", trained(nn.InstanceNorm2d(6, affine=True)), IMAGE),
        ("instance_norm of rows", trained(nn.InstanceNorm1d(6, affine=True)), IMAGE.flatten(2)),
        ("batch_norm", trained(nn.BatchNorm2d(6)), IMAGE),
        ("batch_norm without affine", trained(nn.BatchNorm2d(6, affine=False)), IMAGE),
        ("batch_norm of rows", trained(nn.BatchNorm1d(6)), IMAGE.flatten(2)),
        ("batch_norm of features", trained(nn.BatchNorm1d(16)), X[0]),
        ("batch_norm of volumes", trained(nn.BatchNorm3d(6)), IMAGE[:, :, None]),
        ("with statistics", trained(nn.InstanceNorm2d(6, track_running_stats=True)), IMAGE),
        ("by hand", HandWritten(16, weight_first=True), X),
        ("by hand, weight last", HandWritten(16, weight_first=False), X),
        ("by hand, of outliers", HandWritten(64, weight_first=True), outliers()),
        ("weight of the run", lambda x: F.rms_norm(x, (16,), x[0, 0], 1e-5), X),
    ]
    check_all([Case(n, f, (x,), 62) for n, f, x in cases])


@pytest.mark.parametrize("eps", [1e-5, 1e-6, 1e-12])
def test_epsilon_counts_where_values_are_small(eps: float) -> None:
    small = normal(3, 64, scale=1e-3)
    check_all(
        [
            Case("rms", lambda x: F.rms_norm(x, (64,), eps=eps), (small,), 62),
            Case("layer", lambda x: F.layer_norm(x, (64,), eps=eps), (small,), 62),
        ]
    )


def test_zeros_stay_zeros() -> None:
    zeros = torch.zeros(2, 16)
    check(lambda x: (F.rms_norm(x, (16,)), F.layer_norm(x, (16,))), zeros, exact=True)


def test_a_norm_is_one_op() -> None:
    assert op_types(lambda x: F.rms_norm(x, (16,), W), X) == ["RmsNorm"]
    assert op_types(lambda x: F.layer_norm(x, (16,), W, B), X) == ["LayerNorm"]
    assert op_types(HandWritten(16, weight_first=True), X) == ["RmsNorm"]
    assert op_types(HandWritten(16, weight_first=False), X) == ["RmsNorm"]


def test_formulas_that_only_look_like_a_norm_are_left_alone() -> None:
    def other(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return y * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def outer(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-2, keepdim=True) + 1e-6)

    def product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt((x * y).abs().mean(-1, keepdim=True) + 1e-6)

    for fn, inputs in ((other, (X, W)), (outer, (X,)), (product, (X, B))):
        assert "RmsNorm" not in op_types(fn, *inputs)
    check_all([Case("other", other, (X, W), 55), Case("outer", outer, (X,), 55)])


def test_statistics_may_be_computed_at_run_time() -> None:
    def norm(x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, x[0].mean((1, 2)), x[0].var((1, 2)))

    check(norm, IMAGE, min_sqnr=50)


def test_rows_longer_than_fp16_counts() -> None:
    long = normal(2, 40960, scale=math.sqrt(3.0))
    check(lambda x: (F.layer_norm(x, (40960,)), F.rms_norm(x, (40960,))), long, min_sqnr=66)


# -- batch norms behind layers with weights ----------------------------------------------------


class Twice(nn.Module):
    """A layer whose result is read beside the batch norm, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Conv2d(3, 8, 3), trained(nn.BatchNorm2d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.norm(y) + y


PLANE = torch.linspace(-2, 2, 2 * 3 * 8 * 8).reshape(2, 3, 8, 8).sin()
LINE, BLOCK = PLANE.reshape(2, 3, 64), PLANE.reshape(2, 3, 4, 4, 4)
# Layer and batch norm, input, the op that does both.
LAYERS: list[tuple[nn.Module, nn.Module, torch.Tensor, str]] = [
    (nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), PLANE, "Conv2d"),
    (nn.Conv2d(3, 8, 3, 2, bias=False), nn.BatchNorm2d(8, affine=False), PLANE, "Conv2d"),
    (nn.Conv2d(3, 6, 3, groups=3), nn.BatchNorm2d(6), PLANE, "DepthWiseConv2d"),
    (nn.Conv2d(3, 3, 3, groups=3), nn.BatchNorm2d(3), PLANE, "DepthWiseConv2d"),
    (nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), LINE, "Conv2d"),
    (nn.Conv3d(3, 8, 3), nn.BatchNorm3d(8), BLOCK, "Conv3d"),
    (nn.ConvTranspose2d(3, 8, 2, 2), nn.BatchNorm2d(8), PLANE, "TransposeConv2d"),
    (nn.Linear(64, 8), nn.BatchNorm1d(8), LINE[:, 0], "FullyConnected"),
]


def both(layer: nn.Module, norm: nn.Module) -> nn.Module:
    return nn.Sequential(layer, trained(norm)).eval()


def test_batch_norms_are_in_the_weights_of_the_layer_before() -> None:
    for layer, norm, x, op in LAYERS:
        types = op_types(both(layer, norm), x)
        assert op in types
        assert not {"ElementWiseMultiply", "ElementWiseAdd"} & set(types), types


def test_a_layer_that_others_read_is_computed_once() -> None:
    assert op_types(Twice(), PLANE).count("Conv2d") == 1


def test_weights_that_fp16_would_lose_are_not_scaled() -> None:
    model = both(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    model[0].weight.data *= 1e-3
    model[1].weight.data[2] = 1e-3
    assert "ElementWiseMultiply" in op_types(model, PLANE)


@pytest.mark.usefixtures("qnn_libraries")
def test_layers_with_batch_norms_follow_pytorch() -> None:
    cases = [Case(op, both(layer, norm), (x,)) for layer, norm, x, op in LAYERS]
    check_all([*cases, Case("twice", Twice().eval(), (PLANE,))])
