# SPDX-License-Identifier: BSD-3-Clause
"""Sums over calls, of which accuracies are made."""

from __future__ import annotations

import math
from typing import Any

import torch

from .accuracy import Accuracy


class Sums:
    """What is known of values and of what they should be, of all calls."""

    def __init__(self) -> None:
        self.signal = self.noise = self.dot = self.power = self.greatest = 0.0

    def add(self, got: torch.Tensor, want: torch.Tensor) -> float:
        """Takes values in; returns their own signal to noise in decibels."""
        counts = torch.isfinite(want.detach().reshape(-1))
        g, w = (t.detach().reshape(-1)[counts].double() for t in (got, want))
        error = g - w
        signal, noise = float(w.square().sum()), float(error.square().sum())
        noise = noise if math.isfinite(noise) else math.inf
        self.signal += signal
        self.noise += noise
        self.dot += float(g @ w)
        self.power += float(g.square().sum())
        if error.numel():
            greatest = float(error.abs().max())
            self.greatest = max(self.greatest, greatest if math.isfinite(greatest) else math.inf)
        return _db(signal, noise)

    @property
    def relative(self) -> float:
        """Noise by signal."""
        return 0.0 if self.noise == 0 else self.noise / self.signal if self.signal else math.inf

    def accuracy(self) -> Accuracy:
        length = math.sqrt(self.signal * self.power)
        cosine = self.dot / length if length else float(self.noise == 0)
        cosine = min(max(cosine, -1.0), 1.0) if math.isfinite(cosine) else 0.0
        return Accuracy(_db(self.signal, self.noise), cosine, self.greatest)


def _db(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal and noise < math.inf else -math.inf


class Pairs:
    """Of one value: fake-quant, delegate and eager against each other."""

    def __init__(self) -> None:
        self.fake, self.hardware, self.total, self.tapped = (Sums() for _ in range(4))
        self.shape: tuple[int, ...] = ()
        self.quantized = False
        self.by_call: list[float] = []

    def add(self, eager: torch.Tensor, fake: torch.Tensor | None, got: torch.Tensor) -> None:
        self.shape = tuple(eager.shape)
        self.by_call.append(self.total.add(got, eager))
        if fake is not None:
            self.quantized = True
            self.fake.add(fake, eager)
            self.hardware.add(got, fake)

    def figures(self) -> dict[str, Any]:
        pairs = (self.fake, self.hardware) if self.quantized else (None, None)
        fake, hardware = (p and p.accuracy() for p in pairs)
        return {
            "shape": self.shape,
            "fake_vs_eager": fake,
            "delegate_vs_fake": hardware,
            "delegate_vs_eager": self.total.accuracy(),
        }
