# SPDX-License-Identifier: BSD-3-Clause
"""Changes of layout: those that cancel cost nothing, and none of them changes a value."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from functools import reduce

import pytest
import torch
from harness import Case, check_all, check_samples, op_types
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

Step = Callable[[Tensor], Tensor]


def _view(*shape: int) -> Step:
    return lambda x: x.reshape(shape)


def _permute(*dims: int) -> Step:
    return lambda x: x.permute(dims)


def _slice(dim: int, start: int, stop: int, step: int) -> Step:
    return lambda x: x[(slice(None),) * dim + (slice(start, stop, step),)]


def _plus(values: Tensor) -> Step:
    return lambda x: x + values


def _with(dim: int, other: Callable[[Tensor], Tensor]) -> Step:
    return lambda x: torch.cat([x, other(x)], dim)


def _halves(dim: int) -> Step:
    return lambda x: torch.cat([x.chunk(2, dim)[0] * 2, x.chunk(2, dim)[1]], dim)


KINDS = ["permute"] * 3 + [
    "merge", "split", "one", "slice", "select", "abs", "plus", "cat", "constant", "halves", "flip"
]  # fmt: skip


@st.composite
def chains(draw: st.DrawFn) -> Case:
    """Views, permutations, slices, concatenations and pointwise ops, one after another."""
    starts = [(2, 6, 4, 4), (1, 12, 4, 6), (4, 6), (2, 3, 4), (1, 8, 1, 1), (2, 2, 6, 2, 2)]
    first = draw(st.sampled_from(starts))
    dtype = draw(st.sampled_from([torch.float32, torch.int32]))
    shape, steps, names = list(first), list[Step](), list[str]()
    for _ in range(draw(st.integers(3, 8))):
        kind = draw(st.sampled_from(KINDS))
        n, dim = len(shape), draw(st.integers(0, len(shape) - 1))
        length, step = shape[dim], None
        if kind == "permute":
            order = draw(st.permutations(range(n)))
            step, shape = _permute(*order), [shape[i] for i in order]
        elif kind == "merge" and dim > 0 and n > 2:
            shape[dim - 1 : dim + 1] = [shape[dim - 1] * length]
            step = _view(*shape)
        elif kind == "split" and n < 5 and length > 2 and length % 2 == 0:
            shape[dim : dim + 1] = draw(st.sampled_from([[2, length // 2], [length // 2, 2]]))
            step = _view(*shape)
        elif kind == "one" and n < 5:
            shape.insert(dim, 1)
            step = _view(*shape)
        elif kind == "slice" and length > 1:
            start = draw(st.integers(0, length - 2))
            stop, by = draw(st.integers(start + 1, length)), draw(st.integers(1, 2))
            step, shape[dim] = _slice(dim, start, stop, by), -((start - stop) // by)
        elif kind == "select" and n > 2:
            at = draw(st.integers(0, length - 1))
            step = lambda x, dim=dim, at=at: x.select(dim, at)  # noqa: E731
            del shape[dim]
        elif kind == "abs":
            step = lambda x: x + x.abs()  # noqa: E731
        elif kind == "plus":
            step = _plus(torch.arange(length, dtype=dtype).reshape(-1, *[1] * (n - dim - 1)))
        elif kind == "cat" and math.prod(shape) < 500:
            step, shape[dim] = _with(dim, torch.neg), 2 * length
        elif kind == "constant":
            three = torch.full([*shape[:dim], 1, *shape[dim + 1 :]], 3, dtype=dtype)
            step, shape[dim] = _with(dim, lambda x, y=three: y), length + 1
        elif kind == "halves" and length % 2 == 0:
            step = _halves(dim)
        elif kind == "flip":
            step = lambda x, dim=dim: x.flip(dim)  # noqa: E731
        if step is not None:
            steps.append(step)
            names.append(f"{kind} {dim} {shape}")

    def fn(x: Tensor) -> Tensor:
        return reduce(lambda y, step: step(y), steps, x)

    x = (torch.arange(math.prod(first)).reshape(first) % 37 - 18).to(dtype)
    return Case(f"{first} {dtype}: {'; '.join(names)}", fn, (x,), exact=True)


@pytest.mark.usefixtures("qnn_libraries")
def test_chains_of_moves_are_exact() -> None:
    check_samples(chains(), 40)


@pytest.mark.usefixtures("qnn_libraries")
def test_slices_with_steps_behind_a_reshape_are_exact() -> None:
    added = torch.arange(4.0) + 1

    def sliced(start: int, stop: int) -> Step:
        return lambda x: (x[..., 0].reshape(6, 4) + added).reshape(6, 1, 4)[:, :, start:stop:2]

    x = torch.arange(48.0).reshape(6, 4, 1, 2)
    check_all(
        [Case(f"{a} {b}", sliced(a, b), (x,), exact=True) for a, b in [(0, 4), (1, 4), (2, 4)]]
    )


# -- what models are made of -------------------------------------------------------------------


def conv(inputs: int, outputs: int, kernel: int = 1) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


class SqueezeExcitation(nn.Module):
    """The gate of an image's channels, as in EfficientNet and MobileNetV3."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.last = conv(3, 16, 3), conv(16, 4)
        self.down, self.up = conv(16, 8), conv(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.image(x)
        gate = self.down(F.adaptive_avg_pool2d(y, 1))
        return self.last(y * torch.sigmoid(self.up(gate * torch.tanh(gate))))


class Shuffle(nn.Module):
    """Units of ShuffleNet: a half of the channels is convolved, then both are interleaved."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.first = conv(3, 16, 3)
        self.units = nn.ModuleList(conv(8, 8, 3) for _ in range(units))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            half, other = x.chunk(2, 1)
            x = torch.cat([half, unit(other).relu()], 1)
            n, c, h, w = x.shape
            x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return x


class Patches(nn.Module):
    """Patches of an image as tokens, as in ViT, a position added, and a layer on each."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.layer = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.gelu(self.patches(x)).flatten(2).permute(0, 2, 1) + 1)


class Heads(nn.Module):
    """Queries, keys and values out of one projection, and attention of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)

    def forward(self, x: Tensor) -> Tensor:
        n, s, _ = x.shape
        q, k, v = self.qkv(x).view(n, s, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(n, s, 16)


class Pooled(nn.Module):
    """A head on an image whose channels are last, as in Swin and ConvNeXt."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).permute(0, 3, 1, 2)
        return self.last(F.adaptive_avg_pool2d(y, 1).flatten(1))


IMAGE = torch.linspace(-2, 2, 3 * 16 * 16).reshape(1, 3, 16, 16).sin()
TOKENS = torch.linspace(-2, 2, 2 * 6 * 16).reshape(2, 6, 16).cos()
# Model, input, Transposes, Reshapes if they matter.  An image comes and goes channels first; the
# last shuffle of channels puts them there.
MODELS: list[tuple[nn.Module, Tensor, int, int | None]] = [
    (SqueezeExcitation(), IMAGE, 2, 0),
    (nn.Sequential(conv(3, 8, 3), nn.Hardswish(), conv(8, 8, 3)), IMAGE, 2, 0),
    (Shuffle(1), IMAGE, 2, None),
    (Shuffle(3), IMAGE, 4, None),
    (Patches(), IMAGE, 1, None),
    (Heads(), TOKENS, 4, None),
    (Pooled(), TOKENS.reshape(2, 2, 3, 16), 0, None),
]


@pytest.mark.parametrize(("model", "x", "transposes", "reshapes"), MODELS)
def test_changes_of_layout_cancel(
    model: nn.Module, x: Tensor, transposes: int, reshapes: int | None
) -> None:
    types = Counter(op_types(model, x))
    assert types["Transpose"] == transposes
    assert reshapes in (None, types["Reshape"])


@pytest.mark.usefixtures("qnn_libraries")
def test_models_follow_pytorch() -> None:
    check_all([Case(str(i), model, (x,)) for i, (model, x, *_) in enumerate(MODELS)])
