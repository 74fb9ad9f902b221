# SPDX-License-Identifier: BSD-3-Clause
"""What convolutions, pools and resampling share.

PyTorch keeps channels in front, QNN behind.  Each op changes to QNN's layout and back; between two
of them the changes cancel (see `Builder.transpose`).  What has one spatial axis runs as two, the
first of length one; what has three runs plane by plane, then along the third.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from .builder import Builder, Value
from .matmul import product


class Axis(Protocol):
    """What an op does to one spatial axis; `count` is the length that it gives."""

    @property
    def count(self) -> int: ...


A = TypeVar("A", bound=Axis)


def channels_last(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, *range(2, x.rank), 1))


def channels_first(b: Builder, x: Value) -> Value:
    return b.transpose(x, (0, x.rank - 1, *range(1, x.rank - 1)))


def each(values: Sequence[int], n: int) -> list[int]:
    """PyTorch's spelling of one value per axis: one for all, or none for a default of 1."""
    return list(values) * n if len(values) == 1 else list(values)


def by_planes(
    b: Builder,
    x: Value,
    axes: Sequence[A],
    still: Callable[[int], A],
    fn: Callable[[Value, A, A], Value],
) -> Value:
    """An op of one to three spatial axes, from one of two.

    Args:
        x: `[*lead, channels, *spatial]`.
        axes: what happens to each spatial axis.
        still: makes one to which nothing happens.
        fn: the op on `[batch, height, width, channels]`, given what happens to height and width.
    """
    k = len(axes)
    lead, c, spatial = x.shape[: -k - 1], x.shape[-k - 1], x.shape[-k:]
    n, counts = math.prod(lead), tuple(a.count for a in axes)
    y = channels_last(b, b.reshape(x, (n, c, *spatial)))
    h, w = axes[-2:] if k > 1 else (still(1), axes[-1])
    y = b.reshape(y, (n * math.prod(spatial[:-2]), *((1,) * (2 - k)), *spatial[-2:], c))
    y = fn(y, h, w)
    if k == 3:
        area = h.count * w.count
        y = fn(b.reshape(y, (n, spatial[0], area, c)), axes[0], still(area))
    y = channels_first(b, b.reshape(y, (n, *counts, c)))
    return b.reshape(y, (*lead, c, *counts))


def mixed(b: Builder, x: Value, dim: int, matrix: Value) -> Value:
    """`matrix @ x` along axis `dim`: `matrix` is a constant `[new length, old length]`."""
    m = matrix.shape[0]
    y = product(b, matrix, b.around(x, dim))
    return b.reshape(y, (*x.shape[:dim], m, *x.shape[dim + 1 :]))
