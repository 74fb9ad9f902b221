# SPDX-License-Identifier: BSD-3-Clause
"""Random stateful models do on QNN what they do in eager.

Fifteen models normally, 200 with `--slow`; `benchmarks/random_models.py` runs thousands.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from .random_models import generate
from .replay import WrongValue, replay
from .search import search


@pytest.mark.parametrize(
    ("series", "models"),
    [(0, 15), *(pytest.param(n, 47, marks=pytest.mark.slow) for n in range(1, 5))],
)
def test_random_models_follow_eager(series: int, models: int, qnn_libraries: str) -> None:
    _, failure = search(models, series, qnn_libraries=qnn_libraries)
    assert failure is None, f"save this as FILE.py, run `python -m tests.state.replay`:\n{failure}"


class _Seeded:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def upto(self, n: int) -> int:
        return self.random.randint(0, n)


def test_models_differ_and_use_every_kind_of_update() -> None:
    sources = [generate(_Seeded(seed)) for seed in range(300)]
    assert len(set(sources)) > 290
    text = "\n".join(sources)
    for form in (
        "add_", "mul_", "copy_", "lerp_", "masked_fill_", "where", "roll", "cat", "flip", "zero_",
        "fill_", "index_put_", "index_copy_", "index_add_", "index_fill_", "scatter_(",
        "scatter_add_", "narrow", "select", "transpose", "view(-1)", "persistent=False",
        "inner.", "items[1]", "asinh", "bitwise_left_shift", "def third", "().clone()\n",
        "torch.int32", "torch.bool", "WRAPPED = True", "'delta'", "'scatter'",
    ):  # fmt: skip
        assert form in text, form


BROKEN = """\
import torch
from torch import nn

class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("n", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("a", torch.ones(3))

    def forward(self, x0):
        self.n.add_(1)
        self.a.mul_(0.5).add_(x0)
        return self.a + 1.0

WRAPPED = False
INPUTS = {"forward": [("float32", (3,))]}
"""


@pytest.mark.parametrize("name", ["n", "a"])
def test_a_lost_update_is_noticed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, qnn_libraries: str
) -> None:
    import executorch_qnn as qnn

    run = qnn.Session.run

    def forgetful(self: Any, method: str, *inputs: Any) -> Any:
        before = self.read_state(name)
        outputs = run(self, method, *inputs)
        self.write_state(name, before)
        return outputs

    replay(BROKEN, tmp_path, qnn_libraries=qnn_libraries)
    monkeypatch.setattr(qnn.Session, "run", forgetful)
    with pytest.raises(WrongValue, match=f"buffer {name}"):
        replay(BROKEN, tmp_path, qnn_libraries=qnn_libraries)


def test_the_smallest_failing_model_is_reported() -> None:
    def run(source: str, folder: Path) -> None:
        if "torch.float32" in source and "add_(" in source:
            raise WrongValue("of course")

    models, failure = search(200, 7, run=run)
    assert failure is not None
    assert models > 1
    assert isinstance(failure.error, WrongValue)
    assert failure.source.count("register_buffer") <= 2
    assert failure.source.count("\n        return ") == 1
    text: dict[str, Any] = {"__name__": "small"}
    exec(failure.source, text)
    assert isinstance(text["Core"](), torch.nn.Module)
