# SPDX-License-Identifier: BSD-3-Clause
"""The graph IR between the op table and the QNN compiler: plain values, no torch, no QNN handles.

A `Graph` is what one QNN graph is made of: tensors, nodes in topological order, and nothing else.
It can be pickled, so that the compiler runs in a process of its own.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]


class DType(enum.IntEnum):
    """Element types; the values are QNN's own numbers (`Qnn_DataType_t`)."""

    INT8 = 0x008
    INT16 = 0x016
    INT32 = 0x032
    INT64 = 0x064
    UINT8 = 0x108
    UINT16 = 0x116
    UINT32 = 0x132
    FLOAT16 = 0x216
    FLOAT32 = 0x232
    SFIXED8 = 0x308
    SFIXED16 = 0x316
    SFIXED32 = 0x332
    UFIXED8 = 0x408
    UFIXED16 = 0x416
    UFIXED32 = 0x432
    BOOL8 = 0x508

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return max(1, int(f"{self.value & 0xFF:x}") // 8)

    @property
    def is_float(self) -> bool:
        return self in (DType.FLOAT16, DType.FLOAT32)

    @property
    def is_fixed(self) -> bool:
        """Whether the integers stand for real numbers, by an encoding."""
        return 0x300 <= self.value < 0x500

    @property
    def is_int(self) -> bool:
        return self.value < 0x200


NUMPY: dict[DType, np.dtype[Any]] = {
    DType.INT8: np.dtype(np.int8),
    DType.INT16: np.dtype(np.int16),
    DType.INT32: np.dtype(np.int32),
    DType.INT64: np.dtype(np.int64),
    DType.UINT8: np.dtype(np.uint8),
    DType.UINT16: np.dtype(np.uint16),
    DType.UINT32: np.dtype(np.uint32),
    DType.FLOAT16: np.dtype(np.float16),
    DType.FLOAT32: np.dtype(np.float32),
    DType.SFIXED8: np.dtype(np.int8),
    DType.SFIXED16: np.dtype(np.int16),
    DType.SFIXED32: np.dtype(np.int32),
    DType.UFIXED8: np.dtype(np.uint8),
    DType.UFIXED16: np.dtype(np.uint16),
    DType.UFIXED32: np.dtype(np.uint32),
    DType.BOOL8: np.dtype(np.bool_),
}


class Kind(enum.IntEnum):
    """What a tensor is to its graph; the values are QNN's own numbers (`Qnn_TensorType_t`)."""

    INPUT = 0
    OUTPUT = 1
    NATIVE = 3
    STATIC = 4


class ScaleOffset(NamedTuple):
    """Per-tensor encoding: `real = (q + offset) * scale`, so `offset` is minus the zero point."""

    scale: float
    offset: int


class QuantType(NamedTuple):
    """The element type and encoding of a tensor of quantized real numbers."""

    dtype: DType
    encoding: ScaleOffset


Encoding: TypeAlias = ScaleOffset | tuple[Any, ...]
"""Of a tensor: `ScaleOffset`, or what `per_channel` and `blockwise` give for a weight."""


def per_channel(axis: int, scales: Sequence[float], bits: int = 8) -> Encoding:
    """`real = q * scales[i]`, `i` along `axis`; `q` has `bits` bits, whatever holds it."""
    if bits == 4:
        return ("bits_axis", bits, axis, tuple(scales), None)
    return ("axis", axis, tuple(scales), None)


def blockwise(axis: int, scales: Sequence[float], factors: Array) -> Encoding:
    """`real = q * scales[i] * factors[i, block]`, `i` along `axis`; `q` has 4 bits (QNN's LPBQ).

    Args:
        factors: uint8 `[channels, blocks]`, 1 to 16; the blocks lie along the input channels.
    """
    return ("blockwise", 4, axis, tuple(scales), factors.shape[1], factors.tobytes())


class FileSlice(NamedTuple):
    """Static data that lies in a file: read through a mapping, never held twice."""

    path: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class LazyData:
    """Static data that is made when it is written: weights never exist twice in memory."""

    make: Callable[[], Array]


@dataclass(eq=False)
class Tensor:
    """A tensor of a graph.  Identity is the object; `name` is unique within its graph.

    Attributes:
        shape: dimensions, at least one (a 0-d value is stored as `(1,)`).
        data: only for `Kind.STATIC`: the values, C-contiguous, of `dtype`.  `None` while an op is
            only being asked about.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind = Kind.NATIVE
    encoding: Encoding | None = None
    data: Array | FileSlice | LazyData | None = None

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class Scalar(NamedTuple):
    """A scalar parameter of a node."""

    dtype: DType
    value: float | int | bool


Param: TypeAlias = Scalar | Tensor


@dataclass(eq=False)
class Node:
    """One QNN op: `type` is a name of QNN's op package "qti.aisw"."""

    name: str
    type: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    params: dict[str, Param] = field(default_factory=dict)
    source: str = ""
    """The ATen node that this op came from, for messages."""


@dataclass(eq=False)
class Graph:
    """Nodes in topological order, and the tensors in the order they were made."""

    name: str
    tensors: list[Tensor] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)

    def of_kind(self, kind: Kind) -> list[Tensor]:
        return [t for t in self.tensors if t.kind is kind]
