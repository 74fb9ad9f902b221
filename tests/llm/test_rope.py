# SPDX-License-Identifier: BSD-3-Clause
"""Rotary positions against the formula, pair by pair."""

from __future__ import annotations

import math

import pytest
import torch

from executorch_qnn.llm import rope
from executorch_qnn.llm.config import RopeScaling

from . import reference
from .conftest import tiny_config


def test_rotation_equals_complex_multiplication() -> None:
    config = tiny_config(rope_theta=1234.5)
    cos, sin = rope.tables(config, 40)
    x = torch.randn(40, 3, config.head_dim, generator=torch.Generator().manual_seed(0))
    got = rope.apply(x, cos.unsqueeze(1), sin.unsqueeze(1))
    want = torch.stack([reference.rotate(config, row.double(), i) for i, row in enumerate(x)])
    assert torch.allclose(got.double(), want, atol=1e-6)


def test_scores_depend_on_the_distance_only() -> None:
    config = tiny_config()
    cos, sin = rope.tables(config, 32)
    q, k = torch.randn(2, config.head_dim, generator=torch.Generator().manual_seed(1))

    def score(i: int, j: int) -> float:
        return float(rope.apply(q, cos[i], sin[i]) @ rope.apply(k, cos[j], sin[j]))

    assert score(9, 4) == pytest.approx(score(30, 25), abs=1e-5)


def test_tables_stay_exact_at_far_positions() -> None:
    config = tiny_config(context_length=131072, rope_theta=10000.0)
    cos, _ = rope.tables(config, 100_000)
    assert float(cos[99_999, 0]) == pytest.approx(math.cos(99_999), abs=1e-7)


def test_linear_scaling_stretches_positions() -> None:
    plain, stretched = tiny_config(), tiny_config(rope_scaling=RopeScaling("linear", 4.0))
    assert torch.allclose(rope.tables(plain, 8)[0], rope.tables(stretched, 32)[0][::4])


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones() -> None:
    scaling = RopeScaling("llama3", 8.0, 1.0, 4.0, 8192)
    config = tiny_config(head_dim=128, rope_theta=500000.0, rope_scaling=scaling)
    got = rope.frequencies(config).tolist()
    for i, value in enumerate(got):
        frequency = 500000.0 ** (-2 * i / 128)
        wavelength = 2 * math.pi / frequency
        if wavelength < 8192 / 4:
            want = frequency
        elif wavelength > 8192 / 1:
            want = frequency / 8
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            want = (1 - smooth) * frequency / 8 + smooth * frequency
        assert value == pytest.approx(want, rel=1e-12)
