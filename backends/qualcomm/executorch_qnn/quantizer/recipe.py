# SPDX-License-Identifier: BSD-3-Clause
"""What is quantized to how many bits, and how ranges are found."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torchao.quantization.pt2e import FakeQuantize, PartialWrapper
from torchao.quantization.pt2e.quantizer import QuantizationSpec

from ..errors import RecipeError
from .observers import (
    OBSERVERS,
    BlockFakeQuantize,
    BlockObserver,
    MovingAverageObserver,
    WeightFakeQuantize,
    WeightObserver,
)

_ACTIVATIONS = {8: (torch.uint8, 0, 255), 16: (torch.uint16, 0, 65535)}
# HTP's 4-bit weights live in bytes, from -8 to 7; its 16-bit ones have one scale.
_WEIGHTS = {4: (torch.int8, -8, 7), 8: (torch.int8, -127, 127), 16: (torch.int16, -32767, 32767)}
BLOCKS = (16, 32, 64)
"""Lengths of a block of 4-bit weights."""


@dataclass(frozen=True)
class Bits:
    """Bits of an op.

    Attributes:
        activations: of what it reads and puts out; 8 or 16.
        weights: 4, 8 or 16.
        block: a scale for each block of 4-bit weights, not only for each channel (LPBQ).
        operand: of the second operand of a product of two activations, if not `activations`.
    """

    activations: int
    weights: int
    block: bool = False
    operand: int | None = None

    def __post_init__(self) -> None:
        if self.activations not in _ACTIVATIONS or self.operand not in (None, *_ACTIVATIONS):
            raise RecipeError(f"activations have 8 or 16 bits, not {self.activations}")
        if self.weights not in _WEIGHTS:
            raise RecipeError(f"weights have 4, 8 or 16 bits, not {self.weights}")
        if self.block and self.weights != 4:
            raise RecipeError(f"blocks are of 4-bit weights, not of {self.weights}-bit ones")


RECIPES: dict[str, Bits] = {
    "8a8w": Bits(8, 8),
    "16a8w": Bits(16, 8),
    "16a4w": Bits(16, 4),
    "16a4w_block": Bits(16, 4, block=True),
    "16a16w": Bits(16, 16),
}

Op: TypeAlias = OpOverload | OpOverloadPacket
Where: TypeAlias = str | Op | tuple[str, Op]
"""A pattern of a module's path (as in `fnmatch`), an ATen op, or all overloads of one, or both."""


def bits_of(name: str | Bits | None) -> Bits | None:
    """The bits that a recipe's name stands for; None stands for fp16.

    Raises:
        RecipeError: there is no recipe of that name.
    """
    if name is None or isinstance(name, Bits):
        return name
    if name not in RECIPES:
        raise RecipeError(
            f"there is no quantization recipe {name!r}; there are {', '.join(RECIPES)}"
        )
    return RECIPES[name]


@dataclass(frozen=True)
class QuantRecipe:
    """Bits for a model, and exceptions for some of its ops, modules and buffers.

    `QuantRecipe("16a4w", {"lm_head": "16a8w", aten.softmax: "16a8w", "layers.0.*": None})`

    Attributes:
        base: one of `RECIPES`.
        rules: where something else holds than `base`: another recipe's name, `Bits`, or None for
            fp16.  Of several rules that fit an op the last one counts.
        state: pattern of a buffer's name to the bits that it is stored with, 8 or 16, if that is
            not what is written to it.
        block_size: length of a block of weights, for `16a4w_block`: 16, 32 or 64.
        observer: how ranges of activations are found, one of `OBSERVERS`.
        percentile: of the observer `percentile`.
        least_squares: scales of weights have the least squared error, not that of the greatest
            value; by default those of 4 bits.
        seq_mse: scales of the weights of linear layers and 1x1 convolutions have the least error
            of what the layer puts out; calibration takes longer. See `seq_mse`.

    Raises:
        RecipeError: there is no such recipe, observer, block or number of bits.
    """

    base: str | Bits
    rules: Mapping[Where, str | Bits | None] = field(default_factory=dict)
    state: Mapping[str, int] = field(default_factory=dict)
    block_size: int = 32
    observer: str = "minmax"
    percentile: float = 99.99
    least_squares: bool | None = None
    seq_mse: bool = False

    def __post_init__(self) -> None:
        for name in (self.base, *self.rules.values()):
            bits_of(name)
        for pattern, bits in self.state.items():
            if bits not in _ACTIVATIONS:
                raise RecipeError(f"buffers ({pattern}) are stored with 8 or 16 bits, not {bits}")
        if self.observer not in OBSERVERS:
            raise RecipeError(
                f"there is no observer {self.observer!r}; there are {', '.join(OBSERVERS)}"
            )
        if self.block_size not in BLOCKS:
            raise RecipeError(f"blocks are of 16, 32 or 64 weights, not {self.block_size}")
        if not 50 < self.percentile <= 100:
            raise RecipeError(f"a percentile is between 50 and 100, not {self.percentile}")

    @staticmethod
    def of(recipe: QuantRecipe | str) -> QuantRecipe:
        return recipe if isinstance(recipe, QuantRecipe) else QuantRecipe(recipe)

    def bits(self, op: OpOverload, modules: Sequence[str]) -> Bits | None:
        """Bits of a node; None for fp16.

        Args:
            modules: paths of the modules that it is in.
        """
        name: str | Bits | None = self.base
        for where, other in self.rules.items():
            pattern, target = where if isinstance(where, tuple) else (where, where)
            at = not isinstance(pattern, str) or any(
                fnmatch.fnmatchcase(path, pattern) for path in modules
            )
            if at and (isinstance(target, str) or target in (op, op.overloadpacket)):
                name = other
        return bits_of(name)

    def state_bits(self, name: str, default: int) -> int:
        """Bits that a buffer is stored with."""
        for pattern, bits in self.state.items():
            if fnmatch.fnmatchcase(name, pattern):
                default = bits
        return default

    def activation(self, bits: int, *, qat: bool, symmetric: bool = False, **how: Any) -> Spec:
        """Affine, over the whole range of an unsigned integer.

        Args:
            symmetric: zero is in the middle.
            how: arguments of the observer.
        """
        dtype, low, high = _ACTIVATIONS[bits]
        kind = MovingAverageObserver if qat else OBSERVERS[self.observer]
        if self.observer == "percentile" and not qat:
            how["percentile"] = self.percentile
        scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
        return Spec(dtype, _constructor(kind, qat, **how), low, high, scheme)

    def weight(self, bits: Bits, shape: Sequence[int], axis: int, *, qat: bool) -> Spec:
        """Symmetric, with a scale for each channel along `axis`; of 16 bits, with one for all."""
        dtype, low, high = _WEIGHTS[bits.weights]
        best = bits.weights == 4 if self.least_squares is None else self.least_squares
        how: dict[str, Any] = {"least_squares": best and not qat}
        if self.seq_mse and not qat:
            how["seq_mse"] = True
        scheme = torch.per_channel_symmetric
        if bits.block and axis == 0 and _has_blocks(shape, self.block_size):
            kind = BlockFakeQuantize if qat else BlockObserver
            made = kind.with_args(block=self.block_size, **how)
            return Spec(dtype, made, low, high, scheme)
        how["fixed"] = not qat
        if bits.weights == 16:
            scheme = torch.per_tensor_symmetric
        else:
            how["ch_axis"] = axis
        made = (
            WeightFakeQuantize.with_args(observer=WeightObserver, **how)
            if qat
            else WeightObserver.with_args(**how)
        )
        return Spec(dtype, made, low, high, scheme)


class Spec(QuantizationSpec):  # type: ignore[misc]
    """How a value is quantized, and what else has the same encoding.

    Attributes:
        leader: the node or edge whose encoding this one has, and whose observer it is not shown to.
        slots: names of the buffers that are stored so.
    """

    leader: Any = None
    slots: frozenset[str] = frozenset()

    def tied(self, leader: Any = None, slots: frozenset[str] = frozenset()) -> Spec:
        object.__setattr__(self, "leader", leader)
        object.__setattr__(self, "slots", slots)
        return self


def _constructor(kind: Any, qat: bool, **how: Any) -> PartialWrapper:
    """What makes an observer, or the fake-quantizer with it."""
    if not qat:
        return kind.with_args(**how)
    return FakeQuantize.with_args(observer=kind, **how)


def _has_blocks(shape: Sequence[int], size: int) -> bool:
    """Whether a weight is a matrix, or a 1x1 convolution, of whole blocks."""
    return len(shape) >= 2 and shape[1] % size == 0 and all(n == 1 for n in shape[2:])
