# SPDX-License-Identifier: BSD-3-Clause
"""What a checkpoint says about its decoder, whatever file format it comes in."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import LoweringError

T = TypeVar("T")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context a model was trained with.

    `linear` divides every frequency by `factor`. `llama3` divides only those whose wavelength
    exceeds `original_context / low_freq_factor`, leaves those below
    `original_context / high_freq_factor`, and interpolates between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192


@dataclass(frozen=True)
class DecoderConfig:
    """A LLaMA-class decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Every architecture is described by options of this one class; `Decoder` has no subclasses.
    """

    vocab_size: int
    dim: int
    hidden_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    context_length: int
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.n_heads % self.n_kv_heads:
            raise LoweringError(
                f"{self.n_heads} attention heads cannot share {self.n_kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise LoweringError(f"rotary positions need an even head size, not {self.head_dim}")

    @property
    def group(self) -> int:
        """Query heads per key/value head."""
        return self.n_heads // self.n_kv_heads


def from_hf(config: Mapping[str, Any]) -> DecoderConfig:
    """The decoder that a Hugging Face `config.json` describes."""
    return _lookup(_HF_ARCHITECTURES, config.get("model_type"), "model_type")(config)


def from_gguf(metadata: Mapping[str, Any], *, tied_embeddings: bool) -> DecoderConfig:
    """The decoder that GGUF metadata describes.

    GGUF has no field for tied embeddings: the file simply lacks an output table, so the caller,
    who sees the tensors, says so.
    """
    architecture = metadata.get("general.architecture")
    return _lookup(_GGUF_ARCHITECTURES, architecture, "general.architecture")(
        metadata, tied_embeddings
    )


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file of a checkpoint."""
    try:
        value = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise LoweringError(f"{file} is missing") from None
    except ValueError as error:
        raise LoweringError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LoweringError(f"{file} does not hold a JSON object")
    return value


def _hf_llama(config: Mapping[str, Any]) -> DecoderConfig:
    _require(config.get("hidden_act", "silu") == "silu", "hidden_act", config.get("hidden_act"))
    # transformers 5 moved theta and the scaling into one dictionary.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    n_heads = int(config["num_attention_heads"])
    return DecoderConfig(
        vocab_size=int(config["vocab_size"]),
        dim=int(config["hidden_size"]),
        hidden_dim=int(config["intermediate_size"]),
        n_layers=int(config["num_hidden_layers"]),
        n_heads=n_heads,
        n_kv_heads=int(config.get("num_key_value_heads") or n_heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // n_heads),
        context_length=int(config.get("max_position_embeddings", 2048)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
        rope_scaling=_hf_rope_scaling(rope),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)),
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def _hf_rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return RopeScaling("linear", float(rope["factor"]))
    _require(kind == "llama3", "rope_type", kind)
    return RopeScaling(
        "llama3",
        float(rope["factor"]),
        float(rope["low_freq_factor"]),
        float(rope["high_freq_factor"]),
        int(rope["original_max_position_embeddings"]),
    )


def _gguf_llama(metadata: Mapping[str, Any], tied_embeddings: bool) -> DecoderConfig:
    field = {k.removeprefix("llama."): v for k, v in metadata.items() if k.startswith("llama.")}
    n_heads, dim = int(field["attention.head_count"]), int(field["embedding_length"])
    head_dim = int(field.get("attention.key_length", dim // n_heads))
    rotated = int(field.get("rope.dimension_count", head_dim))
    _require(rotated == head_dim, "rope.dimension_count", rotated)
    _require(int(field.get("expert_count", 0)) == 0, "expert_count", field.get("expert_count"))
    scaling = None
    if (kind := field.get("rope.scaling.type", "none")) != "none":
        _require(kind == "linear", "rope.scaling.type", kind)
        scaling = RopeScaling("linear", float(field["rope.scaling.factor"]))
    return DecoderConfig(
        vocab_size=int(field.get("vocab_size") or len(metadata["tokenizer.ggml.tokens"])),
        dim=dim,
        hidden_dim=int(field["feed_forward_length"]),
        n_layers=int(field["block_count"]),
        n_heads=n_heads,
        n_kv_heads=int(field.get("attention.head_count_kv", n_heads)),
        head_dim=head_dim,
        context_length=int(field["context_length"]),
        norm_eps=float(field["attention.layer_norm_rms_epsilon"]),
        rope_theta=float(field.get("rope.freq_base", 10000.0)),
        rope_scaling=scaling,
        tied_embeddings=tied_embeddings,
    )


def _require(supported: bool, field: str, value: object) -> None:
    if not supported:
        raise LoweringError(f"the checkpoint's {field} is {value!r}, which is not supported yet")


def _lookup(table: Mapping[str, T], key: object, field: str) -> T:
    if isinstance(key, str) and key in table:
        return table[key]
    raise LoweringError(
        f"the checkpoint's {field} is {key!r}; supported architectures: {', '.join(sorted(table))}"
    )


_HF_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {"llama": _hf_llama}
_GGUF_ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], bool], DecoderConfig]] = {
    "llama": _gguf_llama
}
