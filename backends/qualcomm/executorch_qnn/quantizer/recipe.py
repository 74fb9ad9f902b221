# SPDX-License-Identifier: BSD-3-Clause
"""What is quantized to how many bits."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torchao.quantization.pt2e import (
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from ..errors import RecipeError

OBSERVERS: dict[str, Callable[..., Any]] = {
    "minmax": MinMaxObserver,
    "moving_average": MovingAverageMinMaxObserver,
    "histogram": HistogramObserver,
}
_ACTIVATIONS = {8: (torch.uint8, 0, 255), 16: (torch.uint16, 0, 65535)}
# HTP's 4-bit weights live in bytes, from -8 to 7; its 16-bit ones have one scale.
_WEIGHTS = {4: (torch.int8, -8, 7), 8: (torch.int8, -127, 127), 16: (torch.int16, -32767, 32767)}
_EPS = 2.0**-40  # far below any scale that a model needs; torchao's own is the float32 epsilon


@dataclass(frozen=True)
class Bits:
    """Of activations and weights; None leaves an op in fp16."""

    activations: int
    weights: int


RECIPES: dict[str, Bits] = {
    "8a8w": Bits(8, 8),
    "16a8w": Bits(16, 8),
    "16a4w": Bits(16, 4),
    "16a16w": Bits(16, 16),
}


@dataclass(frozen=True)
class QuantRecipe:
    """Bits for a model, and exceptions for some of its ops.

    Attributes:
        base: one of `RECIPES`.
        ops: ATen op, or all overloads of one, to another recipe's name or None for fp16.
        modules: pattern of a module's path (as in `fnmatch`) to the same; the last that fits
            counts, and it outranks `ops`.
        observer: of activations, one of `OBSERVERS`.

    Raises:
        RecipeError: a recipe or an observer that there is not.
    """

    base: str
    ops: Mapping[OpOverload | OpOverloadPacket, str | None] = field(default_factory=dict)
    modules: Mapping[str, str | None] = field(default_factory=dict)
    observer: str = "minmax"

    def __post_init__(self) -> None:
        for name in (self.base, *self.ops.values(), *self.modules.values()):
            if name is not None and name not in RECIPES:
                raise RecipeError(
                    f"there is no quantization recipe {name!r}; there are {', '.join(RECIPES)}"
                )
        if self.observer not in OBSERVERS:
            raise RecipeError(
                f"there is no observer {self.observer!r}; there are {', '.join(OBSERVERS)}"
            )

    @staticmethod
    def of(recipe: QuantRecipe | str) -> QuantRecipe:
        return recipe if isinstance(recipe, QuantRecipe) else QuantRecipe(recipe)

    def bits(self, op: OpOverload, modules: Sequence[str]) -> Bits | None:
        """Bits of a node: its op, and the paths of the modules that it is in, innermost last."""
        name: str | None = self.base
        for key in (op.overloadpacket, op):
            name = self.ops.get(key, name)
        for pattern, other in self.modules.items():
            if any(fnmatch.fnmatchcase(path, pattern) for path in modules):
                name = other
        return None if name is None else RECIPES[name]

    def activation(self, bits: int) -> QuantizationSpec:
        """Affine, over the whole range of an unsigned integer."""
        dtype, low, high = _ACTIVATIONS[bits]
        observer = OBSERVERS[self.observer].with_args(eps=_EPS)  # type: ignore[attr-defined]
        return QuantizationSpec(dtype, observer, low, high, torch.per_tensor_affine)

    def weight(self, bits: int, axis: int) -> QuantizationSpec:
        """Symmetric, with a scale for each channel along `axis`; of 16 bits, with one for all."""
        dtype, low, high = _WEIGHTS[bits]
        if bits == 16:
            one = MinMaxObserver.with_args(eps=_EPS)
            return QuantizationSpec(dtype, one, low, high, torch.per_tensor_symmetric)
        each = PerChannelMinMaxObserver.with_args(eps=_EPS)
        return QuantizationSpec(dtype, each, low, high, torch.per_channel_symmetric, axis)
