# SPDX-License-Identifier: BSD-3-Clause
"""Rotated decoders: the same function of tokens, with activations that have no outliers.

A few channels of a language model's hidden state are a hundred times as great as the others, and
take the steps of all of them when a range is quantized.  An orthogonal matrix mixes the channels;
RMSNorm does not see it, and it is multiplied into the weights of the layers around:

* R1 turns the hidden state between the layers, with the gains of the norms folded into the linear
  layers that read them, since a gain for each channel does not commute with a rotation.
* R2 turns the values of each attention head, and with them the value cache.

QuaRot (Ashkboos et al., 2024, arXiv 2404.00456) takes randomized Hadamard matrices, which spread an
outlier evenly; SpinQuant (Liu et al., 2024, arXiv 2405.16406), from where the names are, trains
them.  Here they are not trained.  Nothing is computed at run time for either.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from .decoder import Decoder, Layer


def rotate(decoder: Decoder, *, seed: int = 0) -> Decoder:
    """Turns the hidden state (R1) and the heads' values (R2) of a decoder, in place.

    Tied embeddings are untied if the last norm has a gain.  A cache that is not empty is not
    turned with the rest: reset it.

    Args:
        seed: of the signs, and of the matrices of odd sizes.
    """
    fold_gains(decoder)
    generator = torch.Generator().manual_seed(seed)
    turn = orthogonal(decoder.config.dim, generator)
    _reads(decoder.embed_tokens, turn)
    if decoder.lm_head is not None:
        _reads(decoder.lm_head, turn)
    for layer in _layers(decoder):
        attention, mlp = layer.self_attn, layer.mlp
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj):
            _reads(linear, turn)
        for linear in (mlp.gate_proj, mlp.up_proj):
            _reads(linear, turn)
        for linear in (attention.o_proj, mlp.down_proj):
            _puts_out(linear, turn)
        heads = orthogonal(decoder.config.head_dim, generator)
        _puts_out(attention.v_proj, torch.block_diag(*[heads] * decoder.config.n_kv_heads))
        _reads(attention.o_proj, torch.block_diag(*[heads] * decoder.config.n_heads))
    return decoder


def fold_gains(decoder: Decoder) -> None:
    """Puts the gains of the norms into the weights of what reads them."""
    for layer in _layers(decoder):
        attention, mlp = layer.self_attn, layer.mlp
        _fold(layer.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj)
        _fold(layer.post_attention_layernorm, mlp.gate_proj, mlp.up_proj)
    if bool((decoder.norm.weight == 1).all()):
        return
    if decoder.lm_head is None:
        table = decoder.embed_tokens.weight
        rows, columns = table.shape
        decoder.lm_head = nn.Linear(columns, rows, bias=False, device="meta")
        decoder.lm_head.weight = nn.Parameter(table.detach().clone(), requires_grad=False)
        decoder.config = replace(decoder.config, tied_embeddings=False)
    _fold(decoder.norm, decoder.lm_head)


def orthogonal(size: int, generator: torch.Generator) -> Tensor:
    """A random orthogonal matrix, float64[size, size], whose elements are of much the same size.

    A Hadamard matrix of the greatest power of two in `size`, times, as Kronecker products, a random
    orthogonal matrix of the odd factor that is left; with random signs.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    odd = size
    while odd % 2 == 0:
        half = matrix / 2**0.5
        matrix = torch.cat([torch.cat([half, half], 1), torch.cat([half, -half], 1)])
        odd //= 2
    if odd > 1:
        normal = torch.randn(odd, odd, dtype=torch.float64, generator=generator)
        matrix = torch.kron(matrix, torch.linalg.qr(normal).Q.contiguous())
    signs = torch.randint(2, (size, 1), generator=generator) * 2 - 1
    return matrix * signs


def _layers(decoder: Decoder) -> list[Layer]:
    layers = list(decoder.layers)
    assert all(isinstance(layer, Layer) for layer in layers)
    return layers  # type: ignore[return-value]


def _fold(norm: nn.RMSNorm, *linears: nn.Linear) -> None:
    for linear in linears:
        _set(linear.weight, linear.weight.double() * norm.weight.double())
    _set(norm.weight, torch.ones_like(norm.weight))


def _puts_out(linear: nn.Linear, turn: Tensor) -> None:
    """Has a layer put out `y @ turn` where it put out `y`."""
    _set(linear.weight, turn.t() @ linear.weight.double())
    if linear.bias is not None:
        _set(linear.bias, linear.bias.double() @ turn)


def _reads(layer: nn.Linear | nn.Embedding, turn: Tensor) -> None:
    """Has a layer read `x @ turn` where it read `x`; has each row of a table be so."""
    _set(layer.weight, layer.weight.double() @ turn)


def _set(parameter: Tensor, value: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(value)
