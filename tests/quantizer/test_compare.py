# SPDX-License-Identifier: BSD-3-Clause
"""`compare`: the figures are those of the three models, and name the layer that loses most."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn
from executorch_qnn.errors import IncompatiblePayload, StateError
from executorch_qnn.report.figures import Sums

TARGET = "SM8650"


def noise(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def sqnr(got: Tensor, want: Tensor) -> float:
    error = (got.double() - want.double()).square().sum()
    return float(10 * torch.log10(want.double().square().sum() / error))


class Net(nn.Module):
    """Layers, an activation that clips, a cache, a counter and an average."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(width, 16)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.LayerNorm(16))
        self.head = nn.Linear(16, 4)
        self.register_buffer("cache", torch.full((8, 16), 0.25))
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(1, 16))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(self.stem(x))
        self.cache.index_copy_(0, self.steps, h)
        self.mean.mul_(0.5).add_(h, alpha=0.5)
        self.steps.add_(1)
        return self.head(torch.relu(self.cache).sum(0, keepdim=True)), self.steps + 0


def lower(model: Any, inputs: Any, recipe: Any, calibration: Any, libraries: str) -> qnn.Program:
    torch.set_num_threads(1)
    return qnn.lower(
        model,
        inputs,
        target=TARGET,
        quantize=recipe,
        calibration=None if recipe is None else calibration,
        qnn_libraries=libraries,
    )


@pytest.mark.parametrize(("recipe", "floor"), [(None, 55.0), ("8a8w", 28.0), ("16a8w", 38.0)])
def test_figures_are_those_of_the_models(
    recipe: str | None, floor: float, tmp_path: Path, qnn_libraries: str
) -> None:
    model = Net().eval()
    batches = [(noise(i, 1, 16),) for i in range(5)]
    program = lower(model, batches[0], recipe, batches, qnn_libraries)
    eager, bits = copy.deepcopy(model), copy.deepcopy(program.fake_quantized)
    model(*batches[0])  # what the model does later changes nothing
    before = {n: b.clone() for n, b in model.named_buffers()}
    compared = qnn.compare(program, batches)
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())

    program.save(tmp_path / "net.pte")
    session = qnn.load(tmp_path / "net.pte", qnn_libraries=qnn_libraries)
    with torch.no_grad():
        want = torch.cat([eager(*b)[0] for b in batches])
    got = torch.cat([session(*b)[0] for b in batches])
    out, count = compared.outputs[:2]
    assert out.name == "forward: output 0"
    assert out.delegate_vs_eager.sqnr_db == pytest.approx(sqnr(got, want), abs=0.1)
    assert out.delegate_vs_eager.sqnr_db > floor
    assert out.delegate_vs_eager.max_error == pytest.approx(float((got - want).abs().max()), 1e-3)
    assert len(out.sqnr_db_by_call) == 5
    assert count.delegate_vs_eager.sqnr_db == float("inf")
    state = {v.name: v for v in compared.outputs[2:]}
    assert list(state) == [f"state {n}" for n in session.state()]
    for fqn in ("cache", "mean"):
        expected = sqnr(session.read_state(fqn), getattr(eager, fqn))
        assert state[f"state {fqn}"].delegate_vs_eager.sqnr_db == pytest.approx(expected, abs=0.1)
    assert state["state steps"].delegate_vs_eager.max_error == 0
    assert abs(out.tapped_vs_eager.sqnr_db - out.delegate_vs_eager.sqnr_db) < 3

    layers = {v.layer: v for v in compared.layers}
    if recipe is None:
        assert list(layers) == ["stem", "body.0", "body.1", "body.2", "", "head"]
        assert out.fake_vs_eager is None
        assert all(v.fake_vs_eager is None for v in compared.layers)
    else:
        with torch.no_grad():
            fake = torch.cat([bits["forward"](*b)[0] for b in batches])
        assert list(layers) == ["stem", "body.0 + body.1", "body.2", "", "head"]
        assert layers["body.0 + body.1"].op == "linear + relu"
        assert out.fake_vs_eager.sqnr_db == pytest.approx(sqnr(fake, want), abs=0.1)
        assert out.delegate_vs_fake.sqnr_db == pytest.approx(sqnr(got, fake), abs=0.1)
        assert out.delegate_vs_fake.sqnr_db > floor
    assert layers["head"].delegate_vs_eager.sqnr_db == pytest.approx(
        out.tapped_vs_eager.sqnr_db, abs=0.1
    )
    assert all(v.delegate_vs_eager.sqnr_db > floor - 3 for v in compared.layers)
    assert not compared.notes


class Spoilt(nn.Module):
    """The weights of `bad` have one outlier in each row, for a channel that is always zero."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.bad, self.mid, self.last = (nn.Linear(16, 16) for _ in range(4))
        with torch.no_grad():
            self.first.bias[0] = -100.0
            self.bad.weight[:, 0] = 20.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        return self.last(torch.tanh(self.mid(torch.tanh(self.bad(h)))))


def test_the_worst_layer_is_named(qnn_libraries: str) -> None:
    batches = [(noise(i, 4, 16),) for i in range(3)]
    program = lower(Spoilt().eval(), batches[0], "8a8w", batches, qnn_libraries)
    compared = qnn.compare(program, batches)
    assert compared.worst.layer == "bad"
    nodes = qnn.compare(program, batches, layers="nodes")
    assert nodes.worst.layer == "bad"
    assert [v.op for v in nodes.layers] == [
        "linear + relu", "linear", "tanh", "linear", "tanh", "linear"
    ]  # fmt: skip

    document = json.loads(compared.to_json())
    assert document["worst"] == {"method": "forward", "node": "linear_1"}
    assert (document["quantize"], document["calls"], document["target"]) == ("8a8w", 3, TARGET)
    (layer,) = (v for v in document["layers"] if v["layer"] == "bad")
    assert layer["shape"] == [4, 16]
    assert layer["fake_vs_eager"].keys() == {"sqnr_db", "cosine", "max_error"}
    assert re.search(r"^bad +linear_1 +linear ", compared.to_text(), re.M)
    assert "most is lost in bad (linear, forward)" in compared.to_text()
    page = compared.to_html()
    assert page.count("<svg") == page.count("</svg>") == 2
    assert "http" not in page


def test_figures_of_values_without_noise_signal_or_end() -> None:
    def figures(got: list[float], want: list[float]) -> tuple[float, float, float]:
        sums = Sums()
        sums.add(torch.tensor(got), torch.tensor(want))
        of = sums.accuracy()
        return of.sqnr_db, of.cosine, of.max_error

    inf = float("inf")
    assert figures([1.0, -65504.0], [1.0, -inf]) == (inf, 1.0, 0.0)  # a mask
    assert figures([0.0, 0.0], [0.0, 0.0]) == (inf, 1.0, 0.0)
    assert figures([0.5, 0.0], [0.0, 0.0]) == (-inf, 0.0, 0.5)
    assert figures([float("nan"), 1.0], [1.0, 1.0]) == (-inf, 0.0, inf)
    sums = Sums()
    assert sums.add(torch.tensor(11), torch.tensor(10)) == pytest.approx(20.0)
    assert sums.add(torch.tensor([True]), torch.tensor([True])) == inf


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.key = nn.Linear(8, 8)
        self.register_buffer("cache", torch.zeros(4, 8))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        self.cache.index_copy_(0, at, self.key(x))
        return x * 2


class Reader(nn.Module):
    def __init__(self, writer: Writer) -> None:
        super().__init__()
        self.writer, self.query = writer, nn.Linear(8, 8)  # the cache has another name here

    def forward(self, x: Tensor) -> Tensor:
        return self.query(x) @ self.writer.cache.t()


def test_methods_share_state_and_bad_input_is_named(qnn_libraries: str) -> None:
    writer = Writer().eval()
    write = [(noise(i, 1, 8), torch.tensor([i])) for i in range(4)]
    read = [(noise(9 + i, 1, 8),) for i in range(4)]
    program = lower(
        {"write": (writer, write[0]), "read": (Reader(writer).eval(), read[0])},
        None,
        None,
        None,
        qnn_libraries,
    )
    calls = [c for w, r in zip(write, read, strict=True) for c in (("write", w), ("read", r))]
    compared = qnn.compare(program, calls)
    assert compared.calls == 8
    assert {v.method for v in compared.layers} == {"write", "read"}
    assert all(v.delegate_vs_eager.sqnr_db > 50 for v in (*compared.layers, *compared.outputs))

    x = torch.ones(1, 8)
    for bad, kind, text in (
        ([("wriite", (x,))], StateError, "call 0: there is no method 'wriite'; .* write, read"),
        ([(x,)], StateError, "call 0: there is no method 'forward'.*\\(method, inputs\\)"),
        ([calls[0], ("write", (x,))], StateError, "call 1 of write: it takes 2 inputs, not 1"),
        ([("read", (x.double(),))], StateError, "must be torch.float32.*not torch.float64"),
        ([("read", (1.0,))], StateError, "input 0 must be a tensor, not float"),
        ([], ValueError, "no call to compare"),
    ):
        with pytest.raises(kind, match=text):
            qnn.compare(program, bad)
    with pytest.raises(ValueError, match="'modules' or 'nodes'"):
        qnn.compare(program, calls, layers="all")


def test_a_file_of_another_model_is_refused(tmp_path: Path, qnn_libraries: str) -> None:
    class Sum(nn.Module):
        def __init__(self, width: int, factor: float = 1.0) -> None:
            super().__init__()
            self.factor = factor
            self.register_buffer("total", torch.zeros(1, width))

        def forward(self, x: Tensor) -> Tensor:
            self.total.add_(x)
            return torch.sigmoid(self.total[:, :4] * self.factor)

    class Wide(Sum):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x[:, :8])

    x = noise(0, 1, 8)
    program = lower(Sum(8), (x,), None, None, qnn_libraries)
    others = {"state": Sum(16), "inputs": Wide(8), "weights": Sum(8, 1.5)}
    for name, model in others.items():
        given = noise(0, 1, 16 if name in ("state", "inputs") else 8)
        lower(model, (given,), None, None, qnn_libraries).save(tmp_path / f"{name}.pte")
    with pytest.raises(IncompatiblePayload, match=r"state.pte is no program.*buffer total"):
        qnn.compare(program, [(x,)], file=tmp_path / "state.pte")
    with pytest.raises(IncompatiblePayload, match=r"inputs.pte is no program of this model"):
        qnn.compare(program, [(x,)], file=tmp_path / "inputs.pte")
    compared = qnn.compare(program, [(x,), (x,)], file=tmp_path / "weights.pte")
    assert "weights.pte has other weights" in compared.notes[0]
    assert pytree.tree_all(lambda v: v.tapped_vs_eager.sqnr_db > 50, list(compared.outputs))
