# SPDX-License-Identifier: BSD-3-Clause
"""State as real models use it: filters, streaming convolutions, recurrent cells, caches, counters.

Each runs small, and at a real size with `--long`: buffers of a megabyte or so, and more calls.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn

from .models import Model

F = nn.functional
Step = Callable[[int], tuple[Any, ...]]
Use = Callable[[int], tuple[nn.Module, Step]]
USES: dict[str, tuple[Use, int]] = {}


def use(real: int) -> Callable[[Use], Use]:
    """Registers a use of state.

    The function gets a size, small or `real`, and returns equal models each time, and the inputs
    of call `i`.
    """

    def register(function: Use) -> Use:
        USES[function.__name__.replace("_", " ")] = function, real
        return function

    return register


def noise(seed: int, *shape: int) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.half().float()


def _x(*shape: int) -> Step:
    return lambda i: (noise(100 + i, *shape),)


# -- filters -----------------------------------------------------------------------------------


@use(real=1 << 19)
def leaky_integrator(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.a.mul_(0.75).add_(x * 0.25)
        return s.a - x

    return Model(step, a=noise(1, n)), _x(n)


@use(real=1 << 18)
def biquad(n: int) -> tuple[nn.Module, Step]:
    """Second order filter in direct form 1: two delay lines of two."""

    def step(s: Any, x: Tensor) -> Tensor:
        y = 0.3 * x + 0.2 * s.x1 + 0.1 * s.x2 + 0.4 * s.y1 - 0.2 * s.y2
        s.x2.copy_(s.x1)
        s.x1.copy_(x)
        s.y2.copy_(s.y1)
        s.y1.copy_(y)
        return y

    zeros = torch.zeros(n)
    return Model(step, x1=zeros, x2=zeros, y1=zeros, y2=zeros), _x(n)


@use(real=1 << 18)
def peak_and_floor(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.high.copy_(torch.maximum(s.high * 0.99, x))
        s.low.copy_(torch.minimum(s.low * 0.99, x))
        return s.high - s.low

    return Model(step, high=noise(1, 1, n), low=noise(2, 1, n)), _x(1, n)


@use(real=4096)
def running_mean_and_variance(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.mean.lerp_(x.mean(0), 0.1)
        s.var.lerp_((x - s.mean).square().mean(0), 0.1)
        s.n.add_(1)
        return (x - s.mean) * torch.rsqrt(s.var + 1e-2)

    buffers = {"mean": torch.zeros(n), "var": torch.ones(n), "n": torch.tensor(0)}
    return Model(step, **buffers), _x(8, n)


# -- streaming convolutions: the layout of the state must not change between write and read ------


@use(real=512)
def causal_conv1d(c: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        window = torch.cat([s.a, x], -1)
        s.a.copy_(window[..., x.shape[-1] :])
        return F.conv1d(window, s.w, s.b)

    buffers = {"a": noise(1, 1, c, 4), "w": noise(2, c, c, 5) * 0.1 / c**0.5, "b": noise(3, c)}
    return Model(step, **buffers), _x(1, c, 3)


@use(real=1024)
def depthwise_conv1d_of_one_step(c: int) -> tuple[nn.Module, Step]:
    """As in Mamba: rolled, the newest column written, weighted sum."""

    def step(s: Any, x: Tensor) -> Tensor:
        s.a.copy_(torch.roll(s.a, -1, -1))
        s.a[:, :, -1] = x
        return F.silu((s.a * s.w).sum(-1))

    return Model(step, a=torch.zeros(1, c, 4), w=noise(2, c, 4)), _x(1, c)


@use(real=256)
def dilated_conv1d(c: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        window = torch.cat([s.a, x], -1)
        s.a.copy_(window[..., -8:])
        y = F.conv1d(window, s.w, dilation=4)
        return torch.tanh(y) + x

    return Model(step, a=torch.zeros(1, c, 8), w=noise(2, c, c, 3) * 0.3 / c**0.5), _x(1, c, 4)


@use(real=128)
def conv2d_of_rows(c: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        window = torch.cat([s.a, x], 2)
        s.a.copy_(window[:, :, -2:])
        return F.relu(F.conv2d(window, s.w, padding=(0, 1)))

    buffers = {"a": noise(1, 1, c, 2, 20), "w": noise(2, c, c, 3, 3) * 0.3 / c**0.5}
    return Model(step, **buffers), _x(1, c, 2, 20)


@use(real=128)
def transposed_conv_with_overlap_add(c: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        y = F.conv_transpose1d(x, s.w, stride=2)
        y = torch.cat([y[..., :2] + s.a, y[..., 2:]], -1)
        s.a.copy_(y[..., -2:])
        return y[..., :-2]

    return Model(step, a=torch.zeros(1, c, 2), w=noise(2, c, c, 4) * 0.3 / c**0.5), _x(1, c, 4)


class TwoConvs(nn.Module):
    """A network of streaming layers, each with a window of its own."""

    def __init__(self, c: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.ModuleList(nn.Conv1d(c, c, 3) for _ in range(2))
        for layer in self.layers:
            layer.register_buffer("window", torch.zeros(1, c, 2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            whole = torch.cat([layer.window, x], -1)
            layer.window = whole[..., -2:]
            x = torch.tanh(layer(whole))
        return x


@use(real=256)
def windows_that_layers_replace(c: int) -> tuple[nn.Module, Step]:
    return TwoConvs(c), _x(1, c, 4)


# -- recurrent cells -------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, cell: nn.Module, n: int) -> None:
        super().__init__()
        self.cell = cell
        self.register_buffer("h", torch.zeros(1, n))
        self.register_buffer("c", noise(1, 1, n))


class Gru(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(self.cell(x, self.h))
        return self.h * 2.0


class Lstm(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        h, c = self.cell(x, (self.h, self.c))
        self.h.copy_(h)
        self.c.copy_(c)
        return h


class Rnn(Recurrent):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        old = self.h
        self.h = self.cell(x, self.h)
        return old, self.h


@use(real=256)
def gru_cell(n: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(1)
    return Gru(nn.GRUCell(n, n), n), _x(1, n)


@use(real=256)
def lstm_cell(n: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(1)
    return Lstm(nn.LSTMCell(n, n), n), _x(1, n)


@use(real=512)
def rnn_cell_whose_old_state_is_returned(n: int) -> tuple[nn.Module, Step]:
    torch.manual_seed(1)
    return Rnn(nn.RNNCell(n, n), n), _x(1, n)


# -- matrices as states -------------------------------------------------------------------------


@use(real=128)
def linear_attention_of_heads(d: int) -> tuple[nn.Module, Step]:
    def step(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s.a.copy_(s.a * s.decay + k.transpose(-1, -2) @ v)
        return q @ s.a

    buffers = {"a": torch.zeros(1, 8, d, d), "decay": torch.linspace(0.5, 0.9, 8).view(1, 8, 1, 1)}
    return Model(step, **buffers), lambda i: tuple(noise(7 * i + j, 1, 8, 1, d) for j in range(3))


@use(real=128)
def delta_rule(d: int) -> tuple[nn.Module, Step]:
    """The state is corrected by what it does not yet predict."""

    def step(s: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-2)
        s.a.add_(0.5 * k.transpose(-1, -2) @ (v - k @ s.a))
        return q @ s.a

    model = Model(step, a=noise(1, 1, 4, d, d) * 0.1)
    return model, lambda i: tuple(noise(7 * i + j, 1, 4, 1, d) for j in range(3))


@use(real=2048)
def state_space(n: int) -> tuple[nn.Module, Step]:
    """A selective scan of one step, as in Mamba."""

    def step(s: Any, x: Tensor, b: Tensor, c: Tensor) -> Tensor:
        dt = F.softplus(x).unsqueeze(-1) * 0.25
        s.h.mul_(torch.exp(-dt * s.a.abs())).add_(dt * b.unsqueeze(1) * x.unsqueeze(-1))
        return (s.h * c.unsqueeze(1)).sum(-1) + x

    model = Model(step, h=torch.zeros(1, n, 16), a=noise(1, n, 16))
    return model, lambda i: (noise(i, 1, n), noise(50 + i, 1, 16), noise(90 + i, 1, 16))


# -- caches, windows and rings --------------------------------------------------------------------


@use(real=2048)
def attention_over_a_cache(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor, at: Tensor) -> Tensor:
        s.k.index_copy_(2, at, x)
        s.v.index_copy_(2, at, torch.tanh(x))
        mask = torch.where(torch.arange(n) <= at, 0.0, -1e4)
        return torch.softmax(x @ s.k.transpose(2, 3) * 0.25 + mask, -1) @ s.v

    zeros = torch.zeros(1, 4, n, 64)
    model = Model(step, k=zeros, v=zeros)
    return model, lambda i: (noise(i, 1, 4, 1, 64), torch.tensor([i % n]))


@use(real=2048)
def ring_that_counts_itself(n: int) -> tuple[nn.Module, Step]:
    """Rows go to a counter modulo the length; readers see them oldest first."""

    def step(s: Any, x: Tensor) -> Tensor:
        s.ring.index_copy_(0, s.n % n, x)
        s.n.add_(1)
        return s.ring.index_select(0, (s.n + torch.arange(n)) % n) * 0.5

    buffers = {"ring": noise(1, n, 128), "n": torch.tensor([n - 2])}
    return Model(step, **buffers), _x(1, 128)


@use(real=4096)
def echo_with_a_delay_given_at_run_time(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor, delay: Tensor) -> Tensor:
        echo = s.line.index_select(0, (s.n - delay) % n)
        y = x + echo * 0.5
        s.line.index_copy_(0, s.n % n, y)
        s.n.add_(1)
        return y

    buffers = {"line": torch.zeros(n, 64), "n": torch.zeros(1, dtype=torch.int64)}
    return Model(step, **buffers), lambda i: (noise(i, 1, 64), torch.tensor([1 + i % 3]))


@use(real=1024)
def sliding_window(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.a.copy_(torch.cat([s.a[:, 2:], x], 1))
        return torch.softmax(s.a @ x.transpose(1, 2), 1).mean(-1)

    return Model(step, a=torch.zeros(1, n, 256)), lambda i: (noise(i, 1, 2, 256) * 0.2,)


@use(real=1024)
def rolled_window(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.a.copy_(torch.roll(s.a, -1, 1))
        s.a[:, -1:] = x
        return s.a.mean(1)

    return Model(step, a=noise(1, 1, n, 256)), _x(1, 1, 256)


@use(real=1024)
def beams_in_another_order(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor, beams: Tensor, at: Tensor) -> Tensor:
        s.k.copy_(s.k.index_select(0, beams))
        s.k.index_copy_(1, at, x)
        return s.k.sum(1)

    model = Model(step, k=noise(1, 4, n, 64) * 0.1)
    order = random.Random(0)
    beams = [[order.randrange(4) for _ in range(4)] for _ in range(64)]
    return model, lambda i: (noise(i, 4, 1, 64), torch.tensor(beams[i]), torch.tensor([i % n]))


@use(real=2048)
def chunks_overwrite_each_other(n: int) -> tuple[nn.Module, Step]:
    """Speculative decoding: four rows are written, some of them again from an earlier place."""

    def step(s: Any, x: Tensor, at: Tensor) -> Tensor:
        s.k.index_copy_(1, at, x)
        return x @ s.k.transpose(1, 2) * 0.1

    starts = [0, 2, 3, 7, 8, 1]
    model = Model(step, k=torch.zeros(1, n, 128))
    return model, lambda i: (noise(i, 1, 4, 128), (torch.arange(4) + starts[i % 6]) % n)


# -- numbers and flags ----------------------------------------------------------------------------


@use(real=49152)
def histogram_of_tokens(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, logits: Tensor, token: Tensor) -> Tensor:
        s.count.index_add_(0, token, torch.ones_like(token))
        s.seen.index_fill_(0, token, True)
        penalised = torch.where(s.seen, logits - 2.0, logits)
        return penalised - s.count.to(torch.float32) * 0.125

    buffers = {"count": torch.zeros(n, dtype=torch.int64), "seen": torch.zeros(n, dtype=torch.bool)}
    return Model(step, **buffers), lambda i: (noise(i, n), torch.tensor([i % 3, 3]))


@use(real=8192)
def history_of_tokens(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, token: Tensor) -> tuple[Tensor, Tensor]:
        s.tokens.copy_(torch.cat([s.tokens[1:], token]))
        s.last.copy_(token[0])
        return (s.tokens == token).sum(), s.last * 2

    buffers = {"tokens": torch.full((n,), -1), "last": torch.tensor(0, dtype=torch.int64)}
    return Model(step, **buffers), lambda i: (torch.tensor([i % 3]),)


@use(real=65536)
def counters_of_every_type(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor, on: Tensor) -> tuple[Tensor, ...]:
        s.i64.add_(1)
        s.i32.add_(on.to(torch.int32))
        s.flag.logical_not_()
        s.flags.logical_xor_(on)
        s.f.add_(torch.where(s.flag, 0.5, -0.25))
        return s.i64 + 0, s.i32 * 2, s.flag & on[0], x * s.f, s.flags.any()

    buffers = {
        "i64": torch.tensor(2**30),
        "i32": torch.arange(n, dtype=torch.int32),
        "flag": torch.tensor(True),
        "flags": torch.zeros(n, dtype=torch.bool),
        "f": torch.tensor(0.0),
    }
    return Model(step, **buffers), lambda i: (noise(i, 3), noise(i, n) > 0)


# -- many, crossed, and in any order --------------------------------------------------------------


@use(real=1 << 18)
def one_value_for_three(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        new = torch.tanh(s.a + x)
        s.a.copy_(new)
        s.b.copy_(new)
        s.c.copy_(s.a)
        return s.a + s.b - s.c

    return Model(step, a=noise(1, n), b=noise(2, n), c=noise(3, n)), _x(n)


@use(real=1 << 18)
def rotated_and_swapped(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> Tensor:
        s.a, s.b, s.c = s.b, s.c, s.a * 0.5 + x
        return s.a - s.b

    return Model(step, a=noise(1, n), b=noise(2, n), c=noise(3, n)), _x(n)


@use(real=1 << 18)
def an_input_stored_as_it_is(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor, flags: Tensor) -> tuple[Tensor, Tensor]:
        old = s.a.clone()
        s.a.copy_(x)
        s.m.copy_(flags)
        return old, s.a[:1]

    buffers = {"a": noise(1, n), "m": torch.zeros(n, dtype=torch.bool)}
    return Model(step, **buffers), lambda i: (noise(i, n), noise(i, n) > 0)


@use(real=512)
def parts_written_through_views(n: int) -> tuple[nn.Module, Step]:
    def step(s: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        s.a[0].mul_(0.5).add_(x[0])
        s.a.t()[:, 1].copy_(x[1])
        s.a.view(-1)[-2:].fill_(0.25)
        s.a[1:, ::2].sub_(0.125)
        s.a[-1].narrow(0, 1, 2).neg_()
        return s.a.t(), s.a[1]

    return Model(step, a=noise(1, n, n)), _x(2, n)


class Layers(nn.Module):
    """Thirty-two buffers of eight modules, updated in an order of their own."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Module() for _ in range(8))
        for i, layer in enumerate(self.layers):
            for j, name in enumerate(("k", "v", "h", "c")):
                layer.register_buffer(name, noise(4 * i + j, 4, n), persistent=j != 2)
        order = random.Random(3)
        self.order = [(i, name) for i in range(8) for name in "kvhc"]
        order.shuffle(self.order)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        for i, name in self.order:
            layer = self.layers[i]
            if name == "k":
                layer.k.index_copy_(0, at, x)
            elif name == "v":
                layer.v.mul_(0.5).add_(layer.h)
            elif name == "h":
                layer.h.copy_(torch.tanh(layer.k + layer.c))
            else:
                layer.c = self.layers[(i + 1) % 8].v * 0.5
            x = torch.tanh(x + layer.k.mean(0) - layer.c[:1] * 0.25)
        return x


@use(real=32768)
def thirty_two_buffers_in_any_order(n: int) -> tuple[nn.Module, Step]:
    return Layers(n), lambda i: (noise(i, 1, n), torch.tensor([i % 4]))


@dataclass(frozen=True)
class _Case:
    function: Use
    size: int
    calls: int


SMALL = 4
_CASES = [
    pytest.param(
        _Case(function, SMALL if small else real, 6 if small else 12),
        id=f"{name}, {'small' if small else 'real'}",
        marks=() if small else pytest.mark.long,
    )
    for name, (function, real) in USES.items()
    for small in (True, False)
]


@pytest.mark.parametrize("case", _CASES)
def test_state_follows_eager(case: _Case, tmp_path: Path, qnn_libraries: str) -> None:
    model, step = case.function(case.size)
    program = qnn.lower(
        model.eval(), step(0), target="SM8650", qnn_libraries=qnn_libraries, fallback="error"
    )
    path = tmp_path / "model.pte"
    program.save(path)
    assert all(s.owner == "delegate" for s in program.report.methods["forward"].state)
    session = qnn.load(path, qnn_libraries=qnn_libraries)
    eager = case.function(case.size)[0].eval()
    for call in range(case.calls):
        inputs = step(call)
        with torch.no_grad():
            want = pytree.tree_map(torch.clone, eager(*inputs))
        _compare(session(*inputs), want, f"call {call}")
    for name, value in eager.named_buffers():
        if name in session.state():
            _compare(session.read_state(name), value, name)


def _compare(got: Any, want: Any, where: str) -> None:
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want), where
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), f"{where}, {i}"
        if w.is_floating_point():
            worst = float(((g - w).abs() - 8e-3 * w.abs()).max())
            assert worst < 1.5e-2, f"{where}, output {i}: {worst}\n{g}\n{w}"
        else:
            assert torch.equal(g, w), f"{where}, output {i}:\n{g}\n{w}"
