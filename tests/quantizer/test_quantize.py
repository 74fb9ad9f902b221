# SPDX-License-Identifier: BSD-3-Clause
"""`lower(quantize=...)`: state keeps its bits, and the rest loses no more than its bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import executorch_qnn as qnn
from executorch_qnn.errors import LoweringError

TARGET = "SM8650"
Batch = tuple[Tensor, ...]


def noise(i: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(i))


def sqnr(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    g, w = (torch.cat([t.reshape(-1).double() for t in ts]) for ts in (got, want))
    return float(10 * torch.log10(w.square().sum() / (g - w).square().sum().clamp(min=1e-30)))


class Stateful(nn.Module):
    """A function of itself and its inputs, with buffers."""

    def __init__(self, fn: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fn = fn
        self.linear = nn.Linear(16, 16)
        for name, value in buffers.items():
            self.register_buffer(name, value.clone())

    def forward(self, *inputs: Tensor) -> Any:
        return self.fn(self, *inputs)


class Attention(nn.Module):
    """One layer over a cache, with a mask, a norm, a counter and a running average."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.RMSNorm(32)
        self.q, self.k, self.v, self.o = (nn.Linear(32, 32) for _ in range(4))
        self.register_buffer("k_cache", torch.zeros(64, 32))
        self.register_buffer("v_cache", torch.full((64, 32), 0.1))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.full((32,), 2.0))

    def forward(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
        h = self.norm(x)
        self.k_cache.index_copy_(0, at, self.k(h))
        self.v_cache[at] = self.v(h)
        self.steps.add_(1)
        self.mean.mul_(0.9).add_(x[0], alpha=0.1)
        scores = self.q(h) @ self.k_cache.t() * 0.17
        scores = torch.where(torch.arange(64) <= at, scores, -20.0)
        return self.o(torch.softmax(scores, -1) @ self.v_cache) + x, self.steps + 0


class Vision(nn.Module):
    """Convolutions with batch norm, in-place activations, pools, a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU6(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 24, 1), nn.Hardswish(), nn.AdaptiveAvgPool2d(1),
        )  # fmt: skip
        self.head = nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).flatten(1))


def quantize(
    model: nn.Module, batches: Sequence[Batch], recipe: Any, folder: Path, libraries: str
) -> tuple[Any, Any]:
    """The program, and a session on it."""
    torch.set_num_threads(1)
    program = qnn.lower(
        copy.deepcopy(model),
        batches[0],
        target=TARGET,
        quantize=recipe,
        calibration=batches,
        qnn_libraries=libraries,
    )
    path = folder / "quantized.pte"
    program.save(path)
    return program, qnn.load(path, qnn_libraries=libraries)


def run(model: Any, batches: Sequence[Batch]) -> list[Tensor]:
    with torch.no_grad():
        return [t for b in batches for t in pytree.tree_leaves(model(*b))]


@pytest.mark.parametrize(("recipe", "floor"), [("8a8w", 30.0), ("16a8w", 50.0), ("16a4w", 28.0)])
def test_a_cache_keeps_its_encoding_and_its_start(
    recipe: str, floor: float, tmp_path: Path, qnn_libraries: str
) -> None:
    model = Attention().eval()
    batches = [(noise(i, 1, 32), torch.tensor([i])) for i in range(12)]
    program, session = quantize(model, batches, recipe, tmp_path, qnn_libraries)
    report = program.report.methods["forward"]
    assert len(report.delegates) == 1
    assert not report.cpu_ops
    stored = {s.fqn: s.stored for s in report.state}
    fixed = "ufixed8" if recipe.startswith("8") else "ufixed16"
    assert stored == {
        "k_cache": fixed, "v_cache": fixed, "steps": "int32", "mean": stored["mean"]
    }  # fmt: skip
    assert stored["mean"] in ("float16", "float32")
    start = session.read_state("v_cache")
    step = session.state()["v_cache"].encoding[0]
    assert float((start - 0.1).abs().max()) <= step / 2 + 1e-6
    assert not session.read_state("k_cache").any()
    bits = copy.deepcopy(program.fake_quantized["forward"])
    got = run(session, batches)
    want, eager = run(bits, batches), copy.deepcopy(model)
    assert [int(t) for t in got[1::2]] == list(range(1, 13))
    exact = run(eager, batches)
    assert sqnr(got[::2], exact[::2]) > min(floor, sqnr(want[::2], exact[::2]) - 4)
    assert sqnr(got[::2], exact[::2]) > floor
    assert sqnr([session.read_state("mean")], [eager.mean]) > 45


def test_rows_that_nobody_writes_keep_every_bit(tmp_path: Path, qnn_libraries: str) -> None:
    model = Attention().eval()
    batches = [(noise(i, 1, 32), torch.tensor([i])) for i in range(4)]
    _, session = quantize(model, batches, "16a8w", tmp_path, qnn_libraries)
    session(*batches[0])
    kept = [session.read_state(n)[0].clone() for n in ("k_cache", "v_cache")]
    for i in range(1, 60):
        session(noise(i, 1, 32) * 3, torch.tensor([i]))
    after = [session.read_state(n)[0] for n in ("k_cache", "v_cache")]
    assert all(torch.equal(a, b) for a, b in zip(kept, after, strict=True))


@pytest.mark.parametrize(("recipe", "floor"), [("8a8w", 30.0), ("16a8w", 40.0), ("16a4w", 15.0)])
def test_a_vision_model_is_one_delegate(
    recipe: str, floor: float, tmp_path: Path, qnn_libraries: str
) -> None:
    model = Vision().eval()
    batches = [(noise(i, 1, 3, 16, 16),) for i in range(6)]
    program, session = quantize(model, batches, recipe, tmp_path, qnn_libraries)
    report = program.report.methods["forward"]
    assert len(report.delegates) == 1
    assert not report.cpu_ops
    bits = run(program.fake_quantized["forward"], batches)
    got, want = run(session, batches), run(model, batches)
    assert sqnr(got, want) > floor
    assert sqnr(got, want) > sqnr(bits, want) - 1


STATE: dict[str, tuple[Callable[..., Any], dict[str, Tensor]]] = {
    "read before and after": (
        lambda s, x: (s.linear(s.a), s.a.add_(x) * 1.0),
        {"a": torch.full((1, 16), 0.5)},
    ),
    "written twice": (
        lambda s, x: s.linear(s.a.add_(s.linear(x)).mul_(0.5)),
        {"a": torch.zeros(1, 16)},
    ),
    "counter": (
        lambda s, x: s.linear(x) + s.n.add_(1),
        {"n": torch.zeros((), dtype=torch.int64)},
    ),
    "window": (
        lambda s, x: s.linear(s.a.copy_(torch.cat([s.a[1:], s.linear(x)]))).sum(0),
        {"a": torch.zeros(8, 16)},
    ),
    "rnn": (
        lambda s, x: s.h.copy_(torch.tanh(s.linear(s.h) + x)) * 1.0,
        {"h": torch.full((1, 16), -0.25)},
    ),
    "slice": (lambda s, x: _slice(s, x), {"a": torch.zeros(4, 16)}),
}


def _slice(s: Any, x: Tensor) -> Tensor:
    s.a[1:2] = s.linear(x)
    return F.relu(s.linear(s.a)).sum(0)


@pytest.mark.parametrize("name", STATE)
def test_state_follows_eager(name: str, tmp_path: Path, qnn_libraries: str) -> None:
    fn, buffers = STATE[name]
    model = Stateful(fn, **buffers).eval()
    batches = [(noise(i, 1, 16),) for i in range(8)]
    program, session = quantize(model, batches, "16a8w", tmp_path, qnn_libraries)
    assert len(program.report.methods["forward"].delegates) == 1
    eager = copy.deepcopy(model)
    for i, batch in enumerate(batches):
        assert sqnr(run(session, [batch]), run(eager, [batch])) > 35, f"call {i}"


def test_calibration_leaves_the_model_as_it_was(tmp_path: Path, qnn_libraries: str) -> None:
    model = Attention().eval()
    before = {n: b.clone() for n, b in model.named_buffers()}
    batches = [(noise(i, 1, 32), torch.tensor([i])) for i in range(3)]
    qnn.lower(model, batches[0], target=TARGET, quantize="8a8w", calibration=batches,
              qnn_libraries=qnn_libraries)  # fmt: skip
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())


def test_the_same_data_gives_the_same_encodings() -> None:
    batches = [(noise(i, 1, 32), torch.tensor([i])) for i in range(3)]
    codes = []
    for _ in range(2):
        module = torch.export.export(Attention().eval(), batches[0], strict=False).module()
        prepared = prepare_pt2e(module, qnn.QnnQuantizer("16a8w"))
        assert qnn.calibrate(prepared, batches) == 3
        codes.append(str(convert_pt2e(prepared).graph))
    assert codes[0] == codes[1]


def test_parts_of_a_model_stay_in_fp16(tmp_path: Path, qnn_libraries: str) -> None:
    model = Vision().eval()
    batches = [(noise(i, 1, 3, 16, 16),) for i in range(3)]
    recipe = qnn.QuantRecipe("8a8w", {"head": None})
    program, _ = quantize(model, batches, recipe, tmp_path, qnn_libraries)
    code = str(program.fake_quantized["forward"].graph)
    assert code.count("dequantize_per_channel.default]") == 3
    assert len(program.report.methods["forward"].delegates) == 1


def _lower(**options: Any) -> None:
    qnn.lower(nn.Linear(4, 4).eval(), (torch.ones(1, 4),), target=TARGET, **options)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"quantize": "7a3w", "calibration": [(torch.ones(1, 4),)]}, ValueError, "8a8w, 16a8w"),
        ({"quantize": "8a8w"}, LoweringError, "needs calibration="),
        ({"quantize": "8a8w", "calibration": []}, LoweringError, "'forward' is empty"),
        ({"quantize": "8a8w", "calibration": [(torch.full((1, 4), torch.nan),)]}, LoweringError,
         "batch 0 of method 'forward' has NaN"),
        ({"quantize": "8a8w", "calibration": {"decode": []}}, LoweringError, "method forward"),
        ({"calibration": [(torch.ones(1, 4),)]}, ValueError, "quantize="),
    ],
)  # fmt: skip
def test_bad_input_is_named(options: dict[str, Any], kind: type, text: str) -> None:
    with pytest.raises(kind, match=text):
        _lower(**options)
