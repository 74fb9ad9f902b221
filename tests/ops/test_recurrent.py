# SPDX-License-Identifier: BSD-3-Clause
"""LSTM, GRU and RNN layers and cells on the simulator against PyTorch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from harness import Case, check_all, check_samples, lowered, op_types, refusal, sqnr
from hypothesis import strategies as st
from torch import Tensor, nn

import executorch_qnn as qnn


def seeded(layer: nn.Module, seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.data.uniform_(-0.4, 0.4, generator=generator)
    return layer.eval()


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def layers(draw: st.DrawFn) -> Case:
    """A layer of any form, with a given first state or without, or a cell."""
    steps, batch, width, hidden = (draw(st.integers(1, n)) for n in (6, 3, 9, 8))
    biased, kind = (
        draw(st.booleans()),
        draw(st.sampled_from(["LSTM", "GRU", "RNN", "relu", "cell"])),
    )
    if kind == "cell":
        cell = draw(st.sampled_from([nn.LSTMCell, nn.GRUCell, nn.RNNCell]))
        layer = seeded(cell(width, hidden, bias=biased))
        return Case(f"{layer}", layer, (normal(batch, width),), 52)
    options = {
        "num_layers": draw(st.integers(1, 2)),
        "bias": biased,
        "batch_first": draw(st.booleans()),
        "bidirectional": draw(st.booleans()),
    }
    if kind == "LSTM" and hidden > 1 and draw(st.booleans()):
        options["proj_size"] = draw(st.integers(1, hidden - 1))
    if kind == "relu":
        layer = seeded(nn.RNN(width, hidden, nonlinearity="relu", **options))
    else:
        layer = seeded(getattr(nn, kind)(width, hidden, **options))
    count = options["num_layers"] * (1 + options["bidirectional"])
    unbatched = draw(st.sampled_from([False, False, True]))
    x = normal(batch, steps, width) if options["batch_first"] else normal(steps, batch, width)
    first = [normal(count, batch, options.get("proj_size", hidden), seed=1)]
    if kind == "LSTM":
        first.append(normal(count, batch, hidden, seed=2))
    if unbatched:
        x = x[0] if options["batch_first"] else x[:, 0]
        first = [h[:, 0] for h in first]
    if not draw(st.booleans()):
        return Case(f"{layer} {tuple(x.shape)}", layer, (x,), 52)
    given = Given(layer)
    return Case(f"{layer} {tuple(x.shape)} given", given, (x, *first), 52)


class Given(nn.Module):
    """A layer with its first states as inputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *first: Tensor) -> tuple[Tensor, ...]:
        return self.layer(x, first if len(first) > 1 else first[0])


@pytest.mark.usefixtures("qnn_libraries")
def test_layers_of_any_form_follow_pytorch() -> None:
    check_samples(layers(), 12, 3)


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_long_sequences_and_megabytes_of_weights() -> None:
    cases = [
        Case("LSTM", seeded(nn.LSTM(64, 128)), (normal(96, 1, 64),), 55),
        Case("GRU", seeded(nn.GRU(64, 128, bidirectional=True)), (normal(48, 2, 64),), 55),
        Case("wide LSTM", seeded(nn.LSTM(256, 512)), (normal(4, 2, 256),), 55),
    ]
    for case in cases:
        check_all([case])


class Streaming(nn.Module):
    """A layer that remembers its state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = seeded(nn.GRU(6, 8, batch_first=True))
        self.register_buffer("state", torch.zeros(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        y, state = self.layer(x, self.state)
        self.state.copy_(state)
        return y


@pytest.mark.usefixtures("qnn_libraries")
def test_a_state_may_be_a_buffer(tmp_path: Path) -> None:
    program = qnn.lower(Streaming(), (normal(1, 4, 6),), target="SM8650", fallback="error")
    program.save(tmp_path / "streaming.pte")
    session, model = qnn.load(tmp_path / "streaming.pte"), Streaming()
    for seed in range(3):
        x = normal(1, 4, 6, seed=seed)
        assert sqnr(session(x), model(x)) > 52


def test_a_step_is_one_product_and_a_few_ops() -> None:
    ops = [
        Counter(op_types(seeded(nn.LSTM(4, 5)), normal(steps, 2, 4)))["FullyConnected"]
        for steps in (3, 4)
    ]
    assert ops == [4, 5]
    nodes = [len(lowered(nn.LSTM(4, 5), normal(steps, 2, 4)).graph.nodes) for steps in (3, 4)]
    assert nodes[1] - nodes[0] <= 20


def test_dropout_is_refused_in_training() -> None:
    def trained(x: Tensor) -> Tensor:
        weights = [torch.zeros(20, 5), torch.zeros(20, 5)] * 2
        hidden = [torch.zeros(2, 2, 5)] * 2
        return torch.ops.aten.lstm.input(x, hidden, weights, False, 2, 0.5, True, False, False)[0]

    assert "dropout has no place" in refusal(trained, normal(3, 2, 5))
