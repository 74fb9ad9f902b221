# SPDX-License-Identifier: BSD-3-Clause
"""Rotary position tables."""

from __future__ import annotations

import math

import torch

from .config import DecoderConfig


def frequencies(config: DecoderConfig) -> torch.Tensor:
    """Radians per position of each rotated pair: float64[head_dim / 2]."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    plain = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is None:
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    wavelengths = 2 * math.pi / plain
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 where the wavelength is too long for the original context, 1 where it is short enough.
    kept = ((scaling.original_context / wavelengths - low) / (high - low)).clamp(0, 1)
    return plain * (kept + (1 - kept) / scaling.factor)


def tables(config: DecoderConfig, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The tables `cos, sin` by which `apply` rotates: float32[max_seq_len, head_dim] each.

    `sin` carries the sign of the rotation in its first half, so that rotating needs no negation.
    """
    positions = torch.arange(max_seq_len, dtype=torch.float64)
    angles = torch.outer(positions, frequencies(config))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).float(), torch.cat([-sin, sin], -1).float()


def apply(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotates the pairs (i, i + head_dim / 2) of the last axis of `x`."""
    half = x.shape[-1] // 2
    swapped = torch.cat([x[..., half:], x[..., :half]], -1)
    return x * cos + swapped * sin
