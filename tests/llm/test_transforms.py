# SPDX-License-Identifier: BSD-3-Clause
"""Rotated and smoothed decoders are the same functions, with fewer outliers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from executorch_qnn.errors import LoweringError
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.rotation import orthogonal, rotate
from executorch_qnn.llm.smoothing import smooth

from .conftest import random_decoder, run, tiny_config

TOKENS = [3, 91, 14, 15, 92, 65, 35, 89]
OPTIONS = [
    {"attention_bias": True, "mlp_bias": True},
    {"dim": 36, "tied_embeddings": True},
    {"n_kv_heads": 1, "head_dim": 6},
]


def logits(decoder: Decoder) -> Tensor:
    decoder.reset_state()
    found = torch.stack([run(decoder, [token], i) for i, token in enumerate(TOKENS)])
    decoder.reset_state()
    return found


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(torch.tensor([[t]]), torch.tensor([i])) for i, t in enumerate(TOKENS)]


def near(got: Tensor, want: Tensor) -> bool:
    return float((got - want).abs().max() / want.abs().max()) < 1e-4


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rotations_and_smoothing_change_no_logits(options: dict[str, object]) -> None:
    decoder = random_decoder(tiny_config(**options))
    want = logits(decoder)
    table = decoder.embed_tokens.weight.clone()
    assert near(logits(rotate(decoder)), want)
    assert not near(decoder.embed_tokens.weight, table)
    assert decoder.lm_head is not None
    assert not decoder.config.tied_embeddings
    assert near(logits(smooth(decoder, batches())), want)
    assert not any(b.any() for n, b in decoder.named_buffers() if n.endswith("_cache"))


def test_embeddings_stay_tied_where_they_can() -> None:
    decoder = random_decoder(tiny_config(tied_embeddings=True))
    torch.nn.init.ones_(decoder.norm.weight)
    want = logits(decoder)
    assert near(logits(rotate(decoder)), want)
    assert decoder.lm_head is None


def test_the_seed_decides() -> None:
    first, again, other = (
        rotate(random_decoder(tiny_config()), seed=seed).embed_tokens.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("size", [1, 8, 9, 64, 576])
def test_matrices_are_orthogonal_and_spread_evenly(size: int) -> None:
    matrix = orthogonal(size, torch.Generator().manual_seed(0))
    assert torch.allclose(matrix @ matrix.t(), torch.eye(size, dtype=torch.float64))
    if size % 64 == 0:
        assert float(matrix.abs().max()) < 1 / 8 + 1e-9


def outlier(decoder: Decoder) -> float:
    """How much greater the greatest input of a layer is than a usual one."""
    found: list[float] = []

    def look(module: torch.nn.Module, args: tuple[Tensor, ...]) -> None:
        found.append(float(args[0].abs().max() / args[0].square().mean().sqrt()))

    hooks = [
        m.register_forward_pre_hook(look)
        for n, m in decoder.named_modules()
        if n.endswith(("q_proj", "gate_proj"))
    ]
    logits(decoder)
    for hook in hooks:
        hook.remove()
    return max(found)


@pytest.mark.parametrize("how", ["rotate", "smooth"])
def test_outliers_become_smaller(how: str) -> None:
    decoder = random_decoder(tiny_config())
    for layer in decoder.layers:  # what trained models have: a channel that is far greater
        layer.input_layernorm.weight[5] = 6.0
        layer.post_attention_layernorm.weight[5] = 6.0
    decoder.embed_tokens.weight[:, 5] += 3.0
    before = outlier(decoder)
    rotate(decoder) if how == "rotate" else smooth(decoder, batches(), strength=0.8)
    assert outlier(decoder) < 0.8 * before


def test_strength_is_a_share() -> None:
    with pytest.raises(LoweringError, match="between 0 and 1"):
        smooth(random_decoder(tiny_config()), batches(), strength=2.0)
