# SPDX-License-Identifier: BSD-3-Clause
"""A LLaMA forward pass written the plain way: whole sequence, no cache, complex rotations."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from executorch_qnn.llm.config import DecoderConfig


def logits(config: DecoderConfig, weights: Mapping[str, Tensor], tokens: list[int]) -> Tensor:
    """Logits float64[len(tokens), vocab] of a `Decoder`'s state dict."""
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["embed_tokens.weight"][tokens]
    for layer in range(config.n_layers):
        p = f"layers.{layer}."
        x = x + _attention(config, w, p + "self_attn.", _norm(config, w, p + "input_layernorm", x))
        h = _norm(config, w, p + "post_attention_layernorm", x)
        gate = _linear(w, p + "mlp.gate_proj", h)
        up = _linear(w, p + "mlp.up_proj", h)
        x = x + _linear(w, p + "mlp.down_proj", gate * torch.sigmoid(gate) * up)
    head = w.get("lm_head.weight", w["embed_tokens.weight"])
    return _norm(config, w, "norm", x) @ head.T


def rotate(config: DecoderConfig, x: Tensor, position: int) -> Tensor:
    """Turns each pair (i, i + half) of `x[..., head_dim]` by its angle at `position`."""
    half = config.head_dim // 2
    angles = [position * config.rope_theta ** (-2 * i / config.head_dim) for i in range(half)]
    turn = torch.tensor([complex(math.cos(a), math.sin(a)) for a in angles])
    turned = torch.complex(x[..., :half], x[..., half:]) * turn
    return torch.cat([turned.real, turned.imag], -1)


def _linear(w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[name + ".weight"].T + w.get(name + ".bias", torch.zeros(()))


def _norm(config: DecoderConfig, w: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    mean_square = (x * x).mean(-1, keepdim=True)
    return x / (mean_square + config.norm_eps).sqrt() * w[name + ".weight"]


def _attention(config: DecoderConfig, w: Mapping[str, Tensor], p: str, x: Tensor) -> Tensor:
    n, size = len(x), config.head_dim
    q = _linear(w, p + "q_proj", x).view(n, config.n_heads, size)
    k = _linear(w, p + "k_proj", x).view(n, config.n_kv_heads, size)
    v = _linear(w, p + "v_proj", x).view(n, config.n_kv_heads, size)
    q = torch.stack([rotate(config, row, t) for t, row in enumerate(q)])
    k = torch.stack([rotate(config, row, t) for t, row in enumerate(k)])
    out = torch.zeros(n, config.n_heads, size, dtype=x.dtype)
    for head in range(config.n_heads):
        shared = head // (config.n_heads // config.n_kv_heads)
        for t in range(n):
            scores = k[: t + 1, shared] @ q[t, head] / math.sqrt(size)
            out[t, head] = torch.softmax(scores, 0) @ v[: t + 1, shared]
    return _linear(w, p + "o_proj", out.view(n, -1))
