# SPDX-License-Identifier: BSD-3-Clause
"""Reading configurations, and refusing those that would be read wrongly."""

from __future__ import annotations

from typing import Any

import pytest

from executorch_qnn.errors import LoweringError
from executorch_qnn.llm.config import DecoderConfig, RopeScaling, from_gguf, from_hf

from .conftest import tiny_config

HF: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
GGUF: dict[str, Any] = {
    "general.architecture": "llama",
    "tokenizer.ggml.tokens": ["a"] * 97,
    "llama.context_length": 64,
    "llama.embedding_length": 32,
    "llama.block_count": 2,
    "llama.feed_forward_length": 48,
    "llama.attention.head_count": 6,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 8,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 8,
}


def test_hugging_face_config_of_llama_3_2() -> None:
    assert from_hf({**HF, "rope_scaling": LLAMA3}) == DecoderConfig(
        vocab_size=128256,
        dim=2048,
        hidden_dim=8192,
        n_layers=16,
        n_heads=32,
        n_kv_heads=8,
        head_dim=64,
        context_length=131072,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0, 1.0, 4.0, 8192),
        tied_embeddings=True,
    )


def test_newer_rope_parameters_mean_the_same() -> None:
    newer = {k: v for k, v in HF.items() if k != "rope_theta"}
    newer["rope_parameters"] = {**LLAMA3, "rope_theta": 500000.0}
    assert from_hf(newer) == from_hf({**HF, "rope_scaling": LLAMA3})


def test_gguf_metadata() -> None:
    assert from_gguf(GGUF, tied_embeddings=False) == tiny_config()
    assert from_gguf(GGUF, tied_embeddings=True) == tiny_config(tied_embeddings=True)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"model_type": None}, "model_type"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"num_key_value_heads": 5}, "32 attention heads"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(LoweringError, match=named):
        from_hf({**HF, **change})


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"general.architecture": "gemma3"}, "gemma3"),
        ({"llama.expert_count": 8}, "expert_count"),
        ({"llama.rope.scaling.type": "yarn"}, "yarn"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count"),
    ],
)
def test_gguf_options_that_are_not_supported_are_refused(
    change: dict[str, Any], named: str
) -> None:
    with pytest.raises(LoweringError, match=named):
        from_gguf({**GGUF, **change}, tied_embeddings=False)
