# SPDX-License-Identifier: BSD-3-Clause
"""Pools on the simulator against PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from harness import Case
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

Function = Callable[..., Any]
LENGTHS = (1, 2, 3, 5, 7, 8, 11, 16, 24)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def ranked(shape: tuple[int, ...], levels: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Few different values, so that maxima are met more than once; all negative."""
    values = torch.randint(0, levels, shape, generator=torch.Generator().manual_seed(levels))
    return (values - levels).to(dtype)


@st.composite
def images(draw: st.DrawFn, axes: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Leading axes with channels, and spatial axes."""
    lead = draw(st.sampled_from([(1, 3), (2, 1), (1, 8), (2, 33), (5,)]))
    lengths = LENGTHS[:6] if axes == 3 else LENGTHS
    return lead, tuple(draw(st.sampled_from(lengths)) for _ in range(axes))


@st.composite
def windows(draw: st.DrawFn, spatial: tuple[int, ...], dilated: bool) -> dict[str, Any]:
    """Kernel, stride, padding and dilation that PyTorch takes."""
    found: list[tuple[int, ...]] = []
    for n in spatial:
        d = draw(st.sampled_from([1, 1, 2, 3])) if dilated else 1
        k = draw(st.integers(1, 7))
        p = draw(st.integers(0, k // 2))
        inside = not dilated and len(spatial) == 3  # what avg_pool3d asks for
        while d * (k - 1) + 1 > n + (0 if inside else 2 * p):
            k, d = k - 1, 1
            p = min(p, k // 2)
        found.append((k, draw(st.integers(1, 4)), p, d))
    kernel, stride, padding, dilation = zip(*found, strict=True)
    chosen = {"kernel_size": kernel, "stride": stride, "padding": padding}
    chosen["ceil_mode"] = draw(st.booleans())
    return {**chosen, "dilation": dilation} if dilated else chosen


@st.composite
def maxima(draw: st.DrawFn) -> Case:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    lead, spatial = draw(images(axes))
    asked = draw(windows(spatial, dilated=True))
    indices = draw(st.booleans())
    dtype = draw(st.sampled_from([torch.float32] * 3 + [torch.int64]))
    x = ranked((*lead, *spatial), draw(st.sampled_from([3, 1000])), dtype)
    pool = getattr(F, f"max_pool{axes}d")
    name = f"max_pool{axes}d {tuple(x.shape)} {dtype} {asked} {indices}"
    return Case(name, lambda x: pool(x, **asked, return_indices=indices), (x,), exact=True)


@st.composite
def averages(draw: st.DrawFn) -> Case:
    axes = draw(st.sampled_from([1, 2, 2, 3]))
    lead, spatial = draw(images(axes))
    asked = draw(windows(spatial, dilated=False))
    asked["count_include_pad"] = draw(st.booleans())
    if axes > 1:
        asked["divisor_override"] = draw(st.sampled_from([None, None, 1, 5]))
    x = 1 + normal(*lead, *spatial)
    pool = getattr(F, f"avg_pool{axes}d")
    name = f"avg_pool{axes}d {tuple(x.shape)} {asked}"
    return Case(name, lambda x: pool(x, **asked), (x,), 55)


@st.composite
def adaptive(draw: st.DrawFn) -> Case:
    axes = draw(st.integers(1, 3))
    lead, spatial = draw(images(axes))
    size = tuple(draw(st.integers(1, 9)) for _ in range(axes))
    kind = draw(st.sampled_from(["avg", "max", "max with indices"]))
    x = ranked((*lead, *spatial), 5) if kind != "avg" else 1 + normal(*lead, *spatial)
    pool = getattr(F, f"adaptive_{kind[:3]}_pool{axes}d")
    more = {"return_indices": True} if kind.endswith("indices") else {}
    name = f"adaptive {kind} {axes}d {tuple(x.shape)} to {size}"
    return Case(name, lambda x: pool(x, size, **more), (x,), 55, exact=kind != "avg")
