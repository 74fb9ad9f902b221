# SPDX-License-Identifier: BSD-3-Clause
"""Recurrent layers, unrolled over a time axis of known length.

The products with the inputs depend on no step before: they are one matrix product for all steps.  A
step is the product with the state, one Tanh for all gates, and what combines them.  A sigmoid is
`tanh(x / 2) / 2 + 1 / 2`; the inner half of that is in the weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import torch

from .builder import Builder, Value
from .elementwise import minus, plus, relu, tanh, times
from .matmul import dense
from .registry import lowers

aten = torch.ops.aten

States: TypeAlias = tuple[Value, ...]
"""What a layer keeps from one step to the next, each (N, H); the first one is also its output."""
Activation: TypeAlias = Callable[[Builder, Value], Value]


class Weights(NamedTuple):
    """A layer's in one direction: (gates * H, in), biases (gates * H), the projection (P, H)."""

    input: Value
    hidden: Value
    input_bias: Value | None
    hidden_bias: Value | None
    projection: Value | None

    @staticmethod
    def each(params: Sequence[Value], biases: bool, projected: bool) -> Iterator[Weights]:
        n = 2 + 2 * biases + projected
        for i in range(0, len(params), n):
            mine = params[i : i + n]
            input_bias, hidden_bias = mine[2:4] if biases else (None, None)
            projection = mine[-1] if projected else None
            yield Weights(mine[0], mine[1], input_bias, hidden_bias, projection)

    def by_gate(self, b: Builder, factors: Sequence[float]) -> Weights:
        """With the rows of each gate multiplied by its factor."""
        if set(factors) == {1.0}:
            return self

        def rows(x: Value) -> Value:
            each = torch.tensor(factors).repeat_interleave(x.shape[0] // len(factors))
            each = each.reshape(-1, *(1,) * (x.rank - 1))
            if not x.is_const:
                return times(b, x, b.const(each))
            return b.derived(x, f"rows by {factors}", lambda t: t * each.to(t.dtype), x.shape)

        gates = self._replace(projection=None)._asdict()
        return self._replace(**{name: rows(x) for name, x in gates.items() if x is not None})


Step: TypeAlias = Callable[[Builder, Value, States, Weights], States]
"""From the products with a step's input (N, gates * H) and the states to the next states."""


def _cut(b: Builder, x: Value, n: int) -> list[Value]:
    """`x` (N, gates * n) by gates."""
    return [b.slice(x, 1, i, i + n) for i in range(0, x.shape[1], n)]


def _lstm_step(b: Builder, x: Value, states: States, w: Weights) -> States:
    hidden, cell = states
    n = cell.shape[1]
    gates = tanh(b, plus(b, x, dense(b, hidden, w.hidden, w.hidden_bias)))
    half = torch.tensor([0.5, 0.5, 0.0, 0.5]).repeat_interleave(n)[None]
    gates = plus(b, times(b, gates, b.const(half + (half == 0))), b.const(half))
    keep_in, keep, new, out = _cut(b, gates, n)
    cell = plus(b, times(b, keep, cell), times(b, keep_in, new))
    hidden = times(b, out, tanh(b, cell))
    if w.projection is not None:
        hidden = dense(b, hidden, w.projection, None)
    return hidden, cell


def _gru_step(b: Builder, x: Value, states: States, w: Weights) -> States:
    (hidden,) = states
    n = hidden.shape[1]
    y = dense(b, hidden, w.hidden, w.hidden_bias)
    both = plus(b, b.slice(x, 1, 0, 2 * n), b.slice(y, 1, 0, 2 * n))
    reset, keep = _cut(b, plus(b, times(b, tanh(b, both), 0.5), 0.5), n)
    new = plus(b, b.slice(x, 1, 2 * n, 3 * n), times(b, reset, b.slice(y, 1, 2 * n, 3 * n)))
    new = tanh(b, new)
    return (plus(b, new, times(b, keep, minus(b, hidden, new))),)


def _plain_step(activation: Activation) -> Step:
    def step(b: Builder, x: Value, states: States, w: Weights) -> States:
        y = dense(b, states[0], w.hidden, w.hidden_bias)
        return (activation(b, plus(b, x, y)),)

    return step


def _recurrent(
    b: Builder, step: Step, gates: Sequence[float], x: Value, hidden: Sequence[Value],
    params: Sequence[Value], biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, batch_first: bool,
) -> list[Value]:  # fmt: skip
    """All layers in all directions: the outputs, and of each state its last values.

    Args:
        gates: what the rows of each gate are multiplied by.
        x: (T, N, in), or (N, T, in) with `batch_first`.
        hidden: for each state its first values (layers * directions, N, H).
    """
    if train and dropout:
        b.refuse("dropout has no place in inference")
    along = 1 if batch_first else 0
    projected = len(hidden) == 2 and hidden[0].shape[2] != hidden[1].shape[2]
    weights = Weights.each(params, biases, projected)
    last: list[list[Value]] = [[] for _ in hidden]
    for layer in range(layers):
        sides = []
        for side in range(1 + bidirectional):
            w = next(weights).by_gate(b, gates)
            products = dense(b, x, w.input, w.input_bias)
            i = layer * (1 + bidirectional) + side
            states = tuple(b.reshape(b.slice(h, 0, i, i + 1), h.shape[1:]) for h in hidden)
            outputs: dict[int, Value] = {}
            order = range(x.shape[along])
            for t in order[::-1] if side else order:
                now = b.slice(products, along, t, t + 1)
                now = b.reshape(now, (now.numel // now.shape[2], now.shape[2]))
                states = step(b, now, states, w)
                n, h = states[0].shape
                outputs[t] = b.reshape(states[0], (n, 1, h) if batch_first else (1, n, h))
            sides.append(b.concat([outputs[t] for t in order], along))
            for values, state in zip(last, states, strict=True):
                values.append(b.reshape(state, (1, *state.shape)))
        x = b.concat(sides, 2)
    return [x, *(b.concat(values, 0) for values in last)]


@lowers(aten.lstm.input, keep=True)
def lstm(b: Builder, x: Value, hidden: Sequence[Value], *args: object) -> list[Value]:
    return _recurrent(b, _lstm_step, (0.5, 0.5, 1.0, 0.5), x, hidden, *args)  # type: ignore[arg-type]


@lowers(aten.gru.input, keep=True)
def gru(b: Builder, x: Value, hidden: Value, *args: object) -> list[Value]:
    return _recurrent(b, _gru_step, (0.5, 0.5, 1.0), x, [hidden], *args)  # type: ignore[arg-type]


def _plain(activation: Activation) -> Callable[..., list[Value]]:
    def rule(b: Builder, x: Value, hidden: Value, *args: object) -> list[Value]:
        return _recurrent(b, _plain_step(activation), (1.0,), x, [hidden], *args)  # type: ignore[arg-type]

    return rule


lowers(aten.rnn_tanh.input, keep=True)(_plain(tanh))
lowers(aten.rnn_relu.input, keep=True)(_plain(relu))
