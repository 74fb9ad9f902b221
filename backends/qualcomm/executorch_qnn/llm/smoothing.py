# SPDX-License-Identifier: BSD-3-Clause
"""Smoothed decoders: outliers of activations made smaller, and the weights that read them greater.

SmoothQuant (Xiao et al., 2022, arXiv 2211.10438): channel `j` of a layer's input is divided by
`s_j = max|x_j|^a / max|w_j|^(1 - a)`, and column `j` of the weight multiplied by it.  The division
costs nothing: it is in the gain of the norm before, or in the rows of `up_proj`, whose products
`down_proj` reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoweringError
from .decoder import Decoder, Layer


def smooth(
    decoder: Decoder, batches: Iterable[tuple[Tensor, Tensor]], *, strength: float = 0.5
) -> Decoder:
    """Smooths the inputs of all linear layers but `o_proj` and the head, in place.

    Args:
        batches: inputs of consecutive calls, which show how great the channels are; the cache is
            empty before and after.
        strength: `a` above; 0 leaves it all to the activations, 1 to the weights.

    Raises:
        LoweringError: the strength is not between 0 and 1.
    """
    if not 0 <= strength <= 1:
        raise LoweringError(f"the strength of smoothing lies between 0 and 1, not {strength}")
    groups: list[tuple[nn.Module, list[nn.Linear]]] = []
    for layer in decoder.layers:
        assert isinstance(layer, Layer)
        attention, mlp = layer.self_attn, layer.mlp
        groups += [
            (layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj]),
            (layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj]),
            (mlp.up_proj, [mlp.down_proj]),
        ]
    seen = _largest(decoder, [readers[0] for _, readers in groups], batches)
    for source, readers in groups:
        own = torch.stack([r.weight.double().abs().amax(0) for r in readers]).amax(0)
        scale = seen[readers[0]].clamp(min=1e-5) ** strength / own.clamp(min=1e-5) ** (1 - strength)
        for linear in readers:
            _multiply(linear.weight, scale)
        if isinstance(source, nn.Linear):
            _multiply(source.weight, 1 / scale[:, None])
            if source.bias is not None:
                _multiply(source.bias, 1 / scale)
        else:
            _multiply(source.weight, 1 / scale)
    return decoder


def _largest(
    decoder: Decoder, linears: Sequence[nn.Linear], batches: Iterable[tuple[Tensor, Tensor]]
) -> dict[nn.Linear, Tensor]:
    """The greatest magnitude of each channel that layers read."""
    found = {m: torch.zeros(m.in_features, dtype=torch.float64) for m in linears}

    def look(module: nn.Module, args: Any) -> None:
        assert isinstance(module, nn.Linear)
        greatest = args[0].double().abs().flatten(0, -2).amax(0)
        found[module] = torch.maximum(found[module], greatest)

    decoder.reset_state()
    with ExitStack() as stack, torch.no_grad():
        for linear in linears:
            stack.callback(linear.register_forward_pre_hook(look).remove)
        for batch in batches:
            decoder(*batch)
    decoder.reset_state()
    return found


def _multiply(parameter: Any, factor: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(parameter.double() * factor)
