# SPDX-License-Identifier: BSD-3-Clause
"""Scales of weights by the error of what their layers put out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import executorch_qnn as qnn
from executorch_qnn.quantizer.observers import WeightObserver
from executorch_qnn.quantizer.seq_mse import SHARES, best_scales

from .test_quantize import Batch, noise, run, sqnr


class Mixed(nn.Module):
    """1x1 convolutions, linear layers, and a state that is made from itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.narrow = nn.Conv2d(32, 32, 1, stride=2), nn.Conv1d(32, 32, 1)
        self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 32)
        self.register_buffer("h", torch.zeros(1, 64))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.conv(x)).flatten(2)
        y = torch.relu(self.narrow(y)).mean(2)
        self.h.copy_(torch.tanh(self.a(self.h) + torch.cat([y, y], 1)))
        return self.b(self.h)


def batches() -> list[Batch]:
    """Channels of very different sizes, which depend on each other."""
    mix = noise(99, 32, 32) * torch.logspace(-1, 1, 32)
    return [((noise(i, 1, 5, 5, 32) @ mix).movedim(3, 1),) for i in range(12)]


def quantized(recipe: Any) -> tuple[float, list[Tensor]]:
    """How near the quantized model is to the model, and its tensors."""
    model, data = Mixed().eval(), batches()
    module = torch.export.export(model, data[0], strict=False).module()
    prepared = prepare_pt2e(module, qnn.QnnQuantizer(recipe))
    assert qnn.calibrate(prepared, iter(data)) == 12
    converted = convert_pt2e(prepared)
    assert not dict(converted.named_buffers())["h"].any()
    kept = [t.clone() for t in converted.state_dict().values()]
    return sqnr(run(converted, data), run(model, data)), kept


@pytest.mark.parametrize("base", ["16a4w", "16a4w_block"])
def test_outputs_are_nearer(base: str) -> None:
    before, _ = quantized(qnn.QuantRecipe(base))
    after, kept = quantized(qnn.QuantRecipe(base, seq_mse=True))
    _, again = quantized(qnn.QuantRecipe(base, seq_mse=True))
    assert after > before + 1
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def test_no_other_scale_has_less_error() -> None:
    w, x = noise(0, 6, 16), noise(1, 64, 16) @ noise(2, 16, 16)
    observer = WeightObserver(
        ch_axis=0, dtype=torch.int8, quant_min=-8, quant_max=7, qscheme=torch.per_channel_symmetric
    )
    observer(w)
    chosen = best_scales(w, x.t() @ x, observer)

    def errors(scale: Tensor) -> Tensor:
        q = (w / scale[:, None]).round().clamp(-8, 7) * scale[:, None]
        return (x @ (q - w).t()).square().sum(0)

    shares = torch.linspace(0.4, 1.0, SHARES)
    assert bool(
        (torch.stack([errors(observer.scale * s) for s in shares]) >= errors(chosen) * 0.999).all()
    )
    assert bool((errors(chosen) < errors(observer.scale)).any())
