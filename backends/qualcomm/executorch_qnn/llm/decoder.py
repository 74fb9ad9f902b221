# SPDX-License-Identifier: BSD-3-Clause
"""A LLaMA-class decoder written for static shapes and a cache that stays in place.

Parameters have Hugging Face's names (without the leading `model.`). Choices made for the NPU:

* The hidden state is `[T, dim]`: linear layers and norms need no reshape around them.
* Positions, rotary rows and the causal mask are computed once per call, not once per layer.
* Queries and keys are rotated together, and the rotary rows carry the softmax scale of the
  queries, so attention scores are small from the start (float16 has no room to spare).
* The query heads that share a key/value head lie along the query axis of one matmul, so the cache
  is never repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import LoweringError
from . import rope
from .config import DecoderConfig

# Finite in float16, also when the largest scores are added; exp() of it is exactly zero.
MASKED = -30000.0


class Step(NamedTuple):
    """What the layers of one call share."""

    positions: Tensor  # int64[T], rows of the cache that this call writes
    cos: Tensor  # float[n_heads + n_kv_heads, T, head_dim]
    sin: Tensor  # the same
    mask: Tensor  # float[group * T, max_seq_len], added to the scores


def _as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` as `dtype`; `Tensor.to` leaves a node in the graph even where it changes nothing."""
    return x if x.dtype is dtype else x.to(dtype)


class Attention(nn.Module):
    """Grouped-query attention over a cache of `max_seq_len` positions.

    State: `k_cache` and `v_cache`, float32[1, n_kv_heads, max_seq_len, head_dim], zero at first;
    float32 whatever the weights are, so that sessions read and write it as such.
    """

    k_cache: Tensor
    v_cache: Tensor

    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        bias = config.attention_bias
        q_width, kv_width = (n * config.head_dim for n in (config.n_heads, config.n_kv_heads))
        self.q_proj = nn.Linear(config.dim, q_width, bias)
        self.k_proj = nn.Linear(config.dim, kv_width, bias)
        self.v_proj = nn.Linear(config.dim, kv_width, bias)
        self.o_proj = nn.Linear(q_width, config.dim, bias)
        shape = (1, config.n_kv_heads, max_seq_len, config.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape, device="cpu"))
        self.register_buffer("v_cache", torch.zeros(shape, device="cpu"))

    def forward(self, x: Tensor, step: Step) -> Tensor:
        c, n = self.config, x.shape[0]
        qk = self._heads_first(torch.cat([self.q_proj(x), self.k_proj(x)], -1))
        qk = rope.apply(qk, step.cos, step.sin)
        q = qk[:, : c.n_heads].reshape(1, c.n_kv_heads, c.group * n, c.head_dim)
        v = self._heads_first(self.v_proj(x))
        self.k_cache.index_copy_(2, step.positions, _as(qk[:, c.n_heads :], torch.float32))
        self.v_cache.index_copy_(2, step.positions, _as(v, torch.float32))

        scores = torch.matmul(q, _as(self.k_cache.transpose(2, 3), x.dtype)) + step.mask
        y = torch.matmul(torch.softmax(scores, -1), _as(self.v_cache, x.dtype))
        if n > 1:
            y = y.reshape(c.n_heads, n, c.head_dim).transpose(0, 1)
        out: Tensor = self.o_proj(y.reshape(n, c.n_heads * c.head_dim))
        return out

    def _heads_first(self, x: Tensor) -> Tensor:
        """`[n, heads * head_dim]` to `[1, heads, n, head_dim]`."""
        n, width = x.shape[0], self.config.head_dim
        if n == 1:  # the same order in memory: no transpose
            return x.reshape(1, -1, 1, width)
        return x.reshape(n, -1, width).transpose(0, 1).unsqueeze(0)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.dim, config.hidden_dim, config.mlp_bias)
        self.up_proj = nn.Linear(config.dim, config.hidden_dim, config.mlp_bias)
        self.down_proj = nn.Linear(config.hidden_dim, config.dim, config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.self_attn = Attention(config, max_seq_len)
        self.post_attention_layernorm = nn.RMSNorm(config.dim, config.norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, step: Step) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), step)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Maps tokens at consecutive positions to the logits that follow the last of them.

    `forward(tokens int64[1, T], start_pos int64[1]) -> float32[1, vocab_size]` writes the keys and
    values of positions `start_pos .. start_pos + T - 1` into the caches and attends to everything
    before. Calls must stay within `max_seq_len`; eager PyTorch raises IndexError beyond it, the NPU
    does not check.

    Attributes:
        all_logits: give those that follow each token, float32[T, vocab_size]; to measure a model.
    """

    rope_cos: Tensor
    rope_sin: Tensor
    rope_scale: Tensor
    cache_positions: Tensor

    def __init__(self, config: DecoderConfig, max_seq_len: int) -> None:
        super().__init__()
        if not 0 < max_seq_len <= config.context_length:
            raise LoweringError(
                f"a context of {max_seq_len} tokens was asked for; the model was trained for 1 to "
                f"{config.context_length}"
            )
        self.config = config
        self.max_seq_len = max_seq_len
        self.all_logits = False
        self.embed_tokens = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Layer(config, max_seq_len) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.dim, config.norm_eps)
        self.lm_head = (
            None if config.tied_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        )
        with torch.device("cpu"):  # also while the parameters are made on the meta device
            cos, sin = rope.tables(config, max_seq_len)
            scale = torch.ones(config.n_heads + config.n_kv_heads, 1, 1)
            scale[: config.n_heads] = config.head_dim**-0.5
            positions = torch.arange(max_seq_len)
        for name, table in [
            ("rope_cos", cos),
            ("rope_sin", sin),
            ("rope_scale", scale),
            ("cache_positions", positions),
        ]:
            self.register_buffer(name, table, persistent=False)

    def forward(self, tokens: Tensor, start_pos: Tensor) -> Tensor:
        step = self._step(tokens.shape[1], start_pos)
        x = self.embed_tokens(tokens.view(-1))
        for layer in self.layers:
            x = layer(x, step)
        if x.shape[0] > 1 and not self.all_logits:
            x = x[-1:]
        x = self.norm(x)
        # A module of its own where there is one, so that a recipe can name it.
        head = self.lm_head
        logits = F.linear(x, self.embed_tokens.weight) if head is None else head(x)
        return _as(logits, torch.float32)

    def keep_state_in_float32(self) -> None:
        """Undoes for the caches what `to(dtype)` did to all floats."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.self_attn.k_cache = layer.self_attn.k_cache.float()
            layer.self_attn.v_cache = layer.self_attn.v_cache.float()

    def reset_state(self) -> None:
        """Forgets everything: zeros in each cache."""
        for layer in self.layers:
            assert isinstance(layer, Layer)
            layer.self_attn.k_cache.zero_()
            layer.self_attn.v_cache.zero_()

    def _step(self, n: int, start_pos: Tensor) -> Step:
        positions = start_pos if n == 1 else start_pos + self.cache_positions[:n]
        visible = self.cache_positions <= positions.unsqueeze(1)
        mask = _as(torch.where(visible, 0.0, MASKED), self.rope_cos.dtype)
        if n > 1:
            mask = mask.repeat(self.config.group, 1)
        return Step(
            positions,
            self.rope_cos[positions] * self.rope_scale,
            self.rope_sin[positions] * self.rope_scale,
            mask,
        )
