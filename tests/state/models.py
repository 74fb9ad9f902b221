# SPDX-License-Identifier: BSD-3-Clause
"""Small models, each with one way of using mutable buffers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

F = nn.functional


@dataclass(frozen=True)
class Case:
    """A model and what it is called with.

    Attributes:
        make: gives equal models each time.
        step: the inputs of call `i`.
        binding: what the report must say of the (first) buffer, `None` for no matter.
    """

    name: str
    make: Callable[[], nn.Module]
    step: Callable[[int], tuple[Any, ...]]
    binding: str | None = None
    steps: int = 4

    def __str__(self) -> str:
        return self.name


class Model(nn.Module):
    """`Model(update, a=tensor, ...)`: buffers, and `update(self, *inputs)` as forward."""

    def __init__(self, update: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.update = update
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, *inputs: Tensor) -> Any:
        return self.update(self, *inputs)


def _noise(i: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(100 + i))


def _x(*shape: int) -> Callable[[int], tuple[Tensor]]:
    return lambda i: (_noise(i, *shape),)


def _row_at(
    *shape: int, dtype: torch.dtype = torch.int64
) -> Callable[[int], tuple[Tensor, Tensor]]:
    return lambda i: (torch.tensor([(3 * i + 1) % 5], dtype=dtype), _noise(i, *shape))


def accumulate(s: Model, x: Tensor) -> Tensor:
    s.a.add_(x)
    return s.a * 1.0


def old_and_new(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    before = s.a * 1.0
    s.a.add_(x)
    return before, s.a * 2.0


def decay(s: Model, x: Tensor) -> Tensor:
    s.a.mul_(0.5).add_(x)
    return s.a * 1.0


def old_and_decayed(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    before = s.a * 1.0
    s.a.mul_(0.5).add_(x)
    return before, s.a * 2.0


def returned_itself(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    new = s.a * 0.5 + x
    s.a.copy_(new)
    return new, new.sum(1)


def old_value_returned(s: Model, x: Tensor) -> Tensor:
    old = s.a.clone()
    s.a.copy_(x * 2.0)
    return old


def view_returned(s: Model, x: Tensor) -> Tensor:
    s.a.add_(x)
    return s.a.view(-1)


def written_twice(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    s.a.add_(x)
    middle = s.a * 2.0
    s.a.mul_(0.5)
    return middle, s.a + 0.0


def never_read(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(x + 1.0)
    return x * 2.0


def delay_line(s: Model, x: Tensor) -> Tensor:
    out = s.b * 1.0
    s.b.copy_(s.a)
    s.a.copy_(x)
    return out


def swapped(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    a = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(a)
    return s.a + x, s.b - x


def shifted(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    s.a.copy_(torch.cat([s.a[:, 1:], x], 1))
    return s.a.mean(1), s.a * 1.0


def rolled(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(torch.roll(s.a, 1, 1) + x)
    return s.a * 1.0


def index_put(s: Model, at: Tensor, row: Tensor) -> Tensor:
    return torch.ops.aten.index_put_(s.a, [None, at], row) + 0.0


def index_copy(s: Model, at: Tensor, row: Tensor) -> Tensor:
    s.a.index_copy_(1, at, row)
    return s.a * 0.5


def sliced(s: Model, at: Tensor, row: Tensor) -> Tensor:
    s.a[:, at] = row
    return s.a * 0.5


def constant_slice(s: Model, x: Tensor) -> Tensor:
    s.a[:, 1:3] = x
    return s.a * 1.0


def masked(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(torch.where(x > 0, x, s.a))
    return s.a * 1.0


def counted(s: Model, row: Tensor) -> tuple[Tensor, Tensor]:
    s.a.index_copy_(0, s.n, row)
    s.n.add_(1)
    return s.a.sum(0), s.n + 0


def scalar_counter(s: Model, x: Tensor) -> Tensor:
    s.n.add_(1)
    return x * s.n


def seen(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.a.index_fill_(0, at, True)
    return torch.where(s.a, x - 5.0, x)


def rnn(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(torch.tanh(F.linear(s.a, s.w) + x))
    return s.a * 2.0


def linear_attention(s: Model, x: Tensor) -> Tensor:
    q, k, v = x[:1], x[1:2], x[2:]
    s.a.copy_(s.a * 0.9 + k.t() @ v)
    return q @ s.a


def streamed_conv(s: Model, x: Tensor) -> Tensor:
    window = torch.cat([s.a, x], -1)
    y = F.conv1d(window, s.w)
    s.a.copy_(window[..., -3:])
    return y


def streamed_conv2d(s: Model, x: Tensor) -> Tensor:
    window = torch.cat([s.a, x], 2)
    y = F.conv2d(window, s.w)
    s.a.copy_(window[:, :, -2:])
    return y


def _many(s: Model, x: Tensor) -> Tensor:
    for i in range(12):
        a, b = getattr(s, f"s{i}"), getattr(s, f"c{i}")
        y = x + a * (0.1 * (i + 1)) - b * 0.05
        b.copy_(a * 1.0)
        a.copy_(y * 0.5)
        x = torch.tanh(y)
    return x


class Layered(nn.Module):
    """Nested modules, one buffer not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Model(accumulate, a=torch.ones(2, 3))
        self.second = nn.Module()
        self.second.register_buffer("a", torch.full((2, 3), 2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        self.second.a.add_(y)
        return self.second.a * 1.0


RAMP = torch.arange(12.0).reshape(3, 4) / 4
CASES = [
    Case("accumulated", lambda: Model(accumulate, a=torch.zeros(3, 4)), _x(3, 4), "accumulate"),
    Case("starts where it was registered", lambda: Model(accumulate, a=RAMP), _x(3, 4)),
    Case("old and new", lambda: Model(old_and_new, a=RAMP), _x(3, 4), "accumulate"),
    Case("decayed", lambda: Model(decay, a=RAMP), _x(3, 4), "in_place"),
    Case("old and decayed", lambda: Model(old_and_decayed, a=RAMP), _x(3, 4), "double_buffer"),
    Case("returned itself", lambda: Model(returned_itself, a=RAMP), _x(3, 4)),
    Case("old value returned", lambda: Model(old_value_returned, a=RAMP), _x(3, 4)),
    Case("view returned", lambda: Model(view_returned, a=RAMP), _x(3, 4)),
    Case("written twice", lambda: Model(written_twice, a=RAMP), _x(3, 4)),
    Case("never read", lambda: Model(never_read, a=RAMP), _x(3, 4), "write_only"),
    Case("delay line", lambda: Model(delay_line, b=RAMP, a=RAMP * 2), _x(3, 4)),
    Case("swapped", lambda: Model(swapped, a=RAMP, b=-RAMP), _x(3, 4)),
    Case("shifted", lambda: Model(shifted, a=torch.zeros(1, 5, 6)), _x(1, 1, 6), "double_buffer"),
    Case("rolled", lambda: Model(rolled, a=torch.zeros(1, 5, 6)), _x(1, 5, 6), "double_buffer"),
    Case("index_put", lambda: Model(index_put, a=torch.zeros(1, 8, 2, 16)), _row_at(1, 1, 2, 16),
         "in_place"),
    Case("index_put int32", lambda: Model(index_put, a=torch.zeros(1, 8, 2, 16)),
         _row_at(1, 1, 2, 16, dtype=torch.int32), "in_place"),
    Case("index_copy", lambda: Model(index_copy, a=torch.ones(2, 6, 4)), _row_at(2, 1, 4),
         "in_place"),
    Case("slice at a position", lambda: Model(sliced, a=torch.ones(2, 6, 4)), _row_at(2, 1, 4),
         "in_place"),
    Case("constant slice", lambda: Model(constant_slice, a=torch.ones(2, 6, 4)), _x(2, 2, 4)),
    Case("masked", lambda: Model(masked, a=RAMP), _x(3, 4)),
    Case("counter drives a cache",
         lambda: Model(counted, a=torch.zeros(6, 4), n=torch.zeros(1, dtype=torch.int64)),
         _x(1, 4)),
    Case("0-d int32 counter", lambda: Model(scalar_counter, n=torch.tensor(0, dtype=torch.int32)),
         _x(3)),
    Case("bool", lambda: Model(seen, a=torch.zeros(12, dtype=torch.bool)),
         lambda i: (_noise(i, 12), torch.tensor([(5 * i) % 12]))),
    Case("rnn", lambda: Model(rnn, a=torch.zeros(1, 8), w=_noise(0, 8, 8) * 0.3), _x(1, 8)),
    Case("linear attention", lambda: Model(linear_attention, a=torch.zeros(4, 4)), _x(3, 4)),
    Case("streamed conv1d",
         lambda: Model(streamed_conv, a=torch.zeros(1, 6, 3), w=_noise(1, 6, 6, 4) * 0.3),
         _x(1, 6, 2)),
    Case("streamed conv2d",
         lambda: Model(streamed_conv2d, a=torch.zeros(1, 4, 2, 5), w=_noise(1, 4, 4, 3, 1) * 0.3),
         _x(1, 4, 2, 5)),
    Case("many",
         lambda: Model(_many, **{f"{n}{i}": torch.zeros(1, 4) for i in range(12) for n in "sc"}),
         _x(1, 4)),
    Case("nested", Layered, _x(2, 3)),
]  # fmt: skip
