# SPDX-License-Identifier: BSD-3-Clause
"""Quantized graphs on the simulator, against what PyTorch computes with the same `q/dq` nodes.

A program is compared with its *fake-quant* graph, which says what the bits alone cost.  An output
may be off by some steps of its encoding: HTP rounds its own way, and looks functions of 16 bits up
in tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import sqnr
from torch import Tensor
from torch.nn import functional as F

import executorch_qnn as qnn

quantized_decomposed: Any = torch.ops.quantized_decomposed
TYPES = {8: (torch.uint8, 0, 255), 16: (torch.uint16, 0, 65535)}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def fake(x: Tensor, low: float, high: float, bits: int) -> Tensor:
    """`x` quantized to `bits` bits over `low` to `high`, and back."""
    dtype, least, greatest = TYPES[bits]
    scale = (high - low) / (greatest - least)
    encoding = (scale, round(least - low / scale), least, greatest, dtype)
    return quantized_decomposed.dequantize_per_tensor(
        quantized_decomposed.quantize_per_tensor(x, *encoding), *encoding
    )


class Weight(torch.nn.Module):
    """A weight as PT2E leaves it: integers, and a scale for each output channel."""

    def __init__(self, weight: Tensor, bits: int, axis: int = 0) -> None:
        super().__init__()
        self.axis, self.high = axis, 2 ** (bits - 1) - 1
        self.low = -self.high if bits == 8 else -self.high - 1
        others = [d for d in range(weight.dim()) if d != axis]
        scales = weight.abs().amax(others) / self.high
        along = [-1 if d == axis else 1 for d in range(weight.dim())]
        q = torch.round(weight / scales.reshape(along)).clamp(self.low, self.high)
        self.register_buffer("q", q.to(torch.int8))
        self.register_buffer("scales", scales)
        self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64))

    def forward(self) -> Tensor:
        return quantized_decomposed.dequantize_per_channel(
            self.q, self.scales, self.zeros, self.axis, self.low, self.high, torch.int8
        )


@dataclass
class Case:
    """A function of quantized tensors.

    Attributes:
        steps: by how many steps of its encoding an output may be off, at 8 and at 16 bits.
        weights: shapes, bits and axes of weights that follow the inputs.
        same: the output has the encoding of the first input.
    """

    name: str
    fn: Callable[..., Tensor]
    inputs: Sequence[Tensor]
    steps: tuple[int, int] = (1, 1)
    weights: Sequence[Weight] = ()
    same: bool = False
    ranges: list[tuple[float, float]] = field(default_factory=list)


def span(x: Tensor) -> tuple[float, float]:
    return min(float(x.min()), 0.0), max(float(x.max()), 1e-3)


class Model(torch.nn.Module):
    """All cases in one graph, each between `q/dq` nodes whose ranges were observed."""

    def __init__(self, cases: Sequence[Case], bits: int) -> None:
        super().__init__()
        self.cases, self.bits = cases, bits
        self.weights = torch.nn.ModuleList(torch.nn.ModuleList(c.weights) for c in cases)
        for c, weights in zip(cases, self.weights, strict=True):
            out = c.fn(*c.inputs, *(w() for w in weights))
            ranges = [span(x) for x in c.inputs]
            c.ranges = [*ranges, ranges[0] if c.same else span(out)]

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        left, outputs = list(inputs), []
        for c, weights in zip(self.cases, self.weights, strict=True):
            mine, left = left[: len(c.inputs)], left[len(c.inputs) :]
            xs = [fake(x, *r, self.bits) for x, r in zip(mine, c.ranges[:-1], strict=True)]
            y = c.fn(*xs, *(w() for w in weights))
            outputs.append(fake(y, *c.ranges[-1], self.bits))
        return outputs


def check(cases: Sequence[Case], bits: int, folder: Path, libraries: str) -> Any:
    """Runs all cases in one program; returns its report."""
    torch.set_num_threads(1)
    model = Model(cases, bits).eval()
    inputs = tuple(x for c in cases for x in c.inputs)
    want = model(*inputs)
    program = qnn.lower(model, inputs, target="SM8650", qnn_libraries=libraries)
    program.save(folder / "quantized.pte")
    got = qnn.load(folder / "quantized.pte", qnn_libraries=libraries)(*inputs)
    problems = []
    for c, g, w in zip(cases, got, want, strict=True):
        low, high = c.ranges[-1]
        step = (high - low) / (2**bits - 1)
        off = float((g - w).abs().max()) / step
        allowed = c.steps[0 if bits == 8 else 1]
        if off > allowed + 0.01:
            problems.append(f"{c.name}: {off:.2f} steps, {sqnr(g, w):.1f} dB")
    assert not problems, "\n".join(problems)
    report = program.report.methods["forward"]
    assert len(report.delegates) == 1
    assert not report.cpu_ops
    return report


X, Y = normal(2, 4, 8, 16), normal(2, 4, 8, 16, seed=1)
P = X.abs() + 0.1

ELEMENTWISE = [
    Case("add", torch.add, [X, Y]),
    Case("add, broadcast", torch.add, [X, Y[0, 0, :1]]),
    Case("add a number", lambda x: x + 0.75, [X]),
    Case("sub", torch.sub, [X, Y]),
    Case("mul", torch.mul, [X, Y]),
    Case("mul by a number", lambda x: x * 0.125, [X]),
    Case("square", lambda x: x**2, [X]),
    Case("div by a number", lambda x: x / 3, [X]),
    Case("maximum", torch.maximum, [X, Y]),
    Case("minimum", torch.minimum, [X, Y]),
    Case("neg", torch.neg, [X]),
    Case("abs", torch.abs, [X]),
    Case("relu", torch.relu, [X]),
    Case("relu6", F.relu6, [X * 3]),
    Case("clamp", lambda x: x.clamp(-0.5, 0.75), [X]),
    Case("hardtanh", F.hardtanh, [X]),
    Case("sigmoid", torch.sigmoid, [X], (1, 6)),
    Case("tanh", torch.tanh, [X], (2, 6)),
    Case("silu", F.silu, [X], (2, 8)),
    Case("hardswish", F.hardswish, [X], (1, 4)),
    Case("elu", F.elu, [X], (1, 4)),
    Case("leaky_relu", F.leaky_relu, [X], (1, 4)),
    Case("exp", torch.exp, [X], (1, 8)),
    Case("rsqrt", torch.rsqrt, [P], (1, 2)),
    Case("sin", torch.sin, [X], (1, 8)),
]
REDUCTIONS = [
    Case("softmax", lambda x: torch.softmax(x, -1), [X], (2, 96)),
    Case("softmax of an axis", lambda x: torch.softmax(x, 1), [X], (2, 96)),
    Case("log_softmax", lambda x: torch.log_softmax(x, -1), [X], (2, 8)),
    Case("mean", lambda x: x.mean(-1), [X], (1, 2)),
    Case("mean of axes", lambda x: x.mean((2, 3), keepdim=True), [X], (1, 2)),
    Case("sum", lambda x: x.sum(1), [X], (1, 2)),
    Case("amax", lambda x: x.amax(-1), [X], same=True),
    *(
        Case(
            f"avg_pool {n} by {k}",
            lambda x, k=k: F.avg_pool2d(x, k),
            [normal(1, 8, *n) + 0.5],
            (1, 2),
        )
        for n, k in [
            ((12, 12), 2),
            ((12, 12), 4),
            ((12, 12), (6, 4)),
            ((20, 20), 10),
            ((12, 12), 12),
            ((8, 64), (4, 32)),
            ((16, 14), (8, 7)),
        ]
    ),
    Case("layer_norm", lambda x: F.layer_norm(x, (16,)), [X], (2, 2)),
    Case("rms_norm", lambda x: F.rms_norm(x, (16,)), [X], (2, 2)),
]
MOVES = [
    Case("permute", lambda x: x.permute(3, 1, 0, 2), [X], (0, 0), same=True),
    Case("reshape", lambda x: x.reshape(8, -1), [X], (0, 0), same=True),
    Case("slice", lambda x: x[:, 1:3, ::2], [X], (0, 0), same=True),
    Case("select", lambda x: x[1, :, 3], [X], (0, 0), same=True),
    Case("expand", lambda x: x[:, :1].expand(2, 4, 8, 16), [X], (0, 0), same=True),
    Case("cat", lambda x: torch.cat([x, x[:, :2]], 1), [X], (0, 0), same=True),
    Case("flip", lambda x: x.flip(2), [X], (0, 0), same=True),
    Case("roll", lambda x: x.roll(3, -1), [X], (0, 0), same=True),
    Case("index", lambda x: x[:, torch.tensor([3, 1])], [X], (0, 0), same=True),
    Case("pad", lambda x: F.pad(x, (1, 2)), [X], (0, 0), same=True),
    Case("max_pool", lambda x: F.max_pool2d(x, 2), [X], (0, 0), same=True),
    Case("upsample", lambda x: F.interpolate(x, scale_factor=2), [X], (0, 0), same=True),
    Case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), [X], (0, 0), same=True),
    Case("masked_fill", lambda x: x.masked_fill(x > 0.5, 0.0), [X], (0, 0), same=True),
]


def weighted(bits: int) -> list[Case]:
    """Ops with weights of `bits` bits; 4-bit ones are off by more at 16-bit activations."""
    few = 3 if bits == 8 else 48
    bias = normal(24, seed=9)
    image, sound, box = normal(1, 8, 9, 10), normal(1, 8, 30), normal(1, 4, 5, 6, 7)

    def w(*shape: int, axis: int = 0) -> list[Weight]:
        return [Weight(normal(*shape, seed=3) * 0.3, bits, axis)]

    return [
        Case("linear", lambda x, w: F.linear(x, w, bias), [normal(3, 5, 16)], (1, few), w(24, 16)),
        Case("linear, no bias", F.linear, [normal(5, 16)], (1, few), w(24, 16)),
        Case("matmul", lambda x, w: x @ w.t(), [normal(5, 16)], (1, few), w(24, 16)),
        Case("conv2d", lambda x, w: F.conv2d(x, w, bias, padding=1), [image], (1, few),
             w(24, 8, 3, 3)),
        Case("conv2d of groups", lambda x, w: F.conv2d(x, w, bias, 2, 1, groups=4), [image],
             (1, few), w(24, 2, 3, 3)),
        Case("depthwise", lambda x, w: F.conv2d(x, w, bias[:8], padding=1, groups=8), [image],
             (1, max(few, 2)), w(8, 1, 3, 3)),
        Case("conv1d", lambda x, w: F.conv1d(x, w, bias, padding=1), [sound], (1, few),
             w(24, 8, 3)),
        Case("conv3d", lambda x, w: F.conv3d(x, w, bias, padding=1), [box], (1, few),
             w(24, 4, 3, 3, 3)),
        Case("conv_transpose2d", lambda x, w: F.conv_transpose2d(x, w, bias, 2, 1), [image],
             (1, few), w(8, 24, 3, 3, axis=1)),
    ]  # fmt: skip


def fp16_reasons(report: Any) -> dict[str, str]:
    return {op.op: op.reason for op in report.fp16_ops}


@pytest.mark.parametrize("bits", [8, 16])
def test_elementwise_ops_are_computed_in_integers(
    bits: int, tmp_path: Path, qnn_libraries: str
) -> None:
    assert not fp16_reasons(check(ELEMENTWISE, bits, tmp_path, qnn_libraries))


@pytest.mark.parametrize("bits", [8, 16])
def test_reductions_and_norms_are_computed_in_integers(
    bits: int, tmp_path: Path, qnn_libraries: str
) -> None:
    assert not fp16_reasons(check(REDUCTIONS, bits, tmp_path, qnn_libraries))


@pytest.mark.parametrize("bits", [8, 16])
def test_what_only_moves_keeps_every_bit(bits: int, tmp_path: Path, qnn_libraries: str) -> None:
    assert not fp16_reasons(check(MOVES, bits, tmp_path, qnn_libraries))


@pytest.mark.parametrize("weight_bits", [8, 4])
@pytest.mark.parametrize("bits", [8, 16])
def test_weights_stay_integers(
    bits: int, weight_bits: int, tmp_path: Path, qnn_libraries: str
) -> None:
    assert not fp16_reasons(check(weighted(weight_bits), bits, tmp_path, qnn_libraries))


@pytest.mark.parametrize("bits", [8, 16])
def test_a_product_of_two_activations(bits: int, tmp_path: Path, qnn_libraries: str) -> None:
    cases = [
        Case("matmul", torch.matmul, [normal(2, 8, 32), normal(2, 32, 12, seed=1)], (1, 40)),
        Case("transposed", lambda x, y: x @ y.transpose(-1, -2),
             [normal(2, 8, 32), normal(2, 12, 32, seed=1)], (1, 40)),
    ]  # fmt: skip
    assert not fp16_reasons(check(cases, bits, tmp_path, qnn_libraries))


def test_what_htp_does_badly_in_integers_is_computed_in_fp16(
    tmp_path: Path, qnn_libraries: str
) -> None:
    cases = [
        Case("sqrt", torch.sqrt, [P], (1, 40)),
        Case("log", torch.log, [P], (1, 60)),
        Case("div", torch.div, [X, P], (1, 80)),
    ]
    report = check(cases, 16, tmp_path, qnn_libraries)
    assert {op.split(".")[1] for op in fp16_reasons(report)} == {"sqrt", "log", "div"}
    assert all("16-bit" in why for why in fp16_reasons(report).values())


def test_a_range_of_nothing_and_one_number(tmp_path: Path, qnn_libraries: str) -> None:
    zero = torch.zeros(1, 8)
    check([Case("zeros", lambda x: x + 0.0, [zero]), Case("one", lambda x: x * 2.0, [zero + 3])],
          8, tmp_path, qnn_libraries)  # fmt: skip
    assert math.isfinite(span(zero)[1])
