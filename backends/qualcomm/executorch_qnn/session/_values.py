# SPDX-License-Identifier: BSD-3-Clause
"""Between torch's tensors and what the native half takes: addresses, ExecuTorch's type numbers."""

from __future__ import annotations

import math
from typing import TypeAlias

import torch

from ..errors import StateError

DTYPES: dict[int, torch.dtype] = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    7: torch.float64,
    11: torch.bool,
    27: torch.uint16,
}
_NUMBERS = {dtype: number for number, dtype in DTYPES.items()}

NativeInput: TypeAlias = tuple[int, int, int, tuple[int, ...]] | int | float | bool | None
NativeOutput: TypeAlias = tuple[int, int] | None


def to_native(value: object, where: str) -> NativeInput:
    """An argument as the native half takes it; a tensor is lent, not copied.

    Raises:
        StateError: the value cannot be handed over as it is; nothing is copied or moved silently.
    """
    if value is None or isinstance(value, int | float):
        return value
    if not isinstance(value, torch.Tensor):
        raise StateError(f"{where} must be a tensor or a number, got {type(value).__name__}")
    if value.device.type != "cpu":
        raise StateError(f"{where} is on {value.device}, the session runs on the CPU: move it")
    if value.layout is not torch.strided or value.is_neg() or not value.is_contiguous():
        strides = tuple(value.stride()) if value.layout is torch.strided else value.layout
        raise StateError(
            f"{where} is not contiguous (shape {tuple(value.shape)}, strides {strides}): "
            "call .contiguous() on it"
        )
    if value.dtype not in _NUMBERS:
        raise StateError(f"{where} is of type {value.dtype}, which no method takes")
    return value.data_ptr(), value.nbytes, _NUMBERS[value.dtype], tuple(value.shape)


def empty(scalar_type: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Memory for an output of at most that shape."""
    if scalar_type not in DTYPES:
        raise StateError(
            f"the method returns a tensor of a type (number {scalar_type}) that is not supported"
        )
    return torch.empty(shape, dtype=DTYPES[scalar_type])


def trimmed(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The part that an output of a dynamic shape fills; `tensor` itself if it is all of it."""
    if tuple(tensor.shape) == shape:
        return tensor
    return tensor.reshape(-1)[: math.prod(shape)].reshape(shape)
