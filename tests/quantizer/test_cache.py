# SPDX-License-Identifier: BSD-3-Clause
"""A model that is calibrated again unchanged is not run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import executorch_qnn as qnn

from .test_quantize import Attention, Batch, noise

BATCHES = [(noise(i, 1, 32), torch.tensor([i])) for i in range(3)]


def calibrated(
    folder: Path, recipe: Any = "16a4w", batches: Sequence[Batch] = BATCHES, change: float = 0
) -> tuple[bool, str, dict[str, Tensor]]:
    """Whether the model was run, and the converted graph with its tensors."""
    model = Attention().eval()
    with torch.no_grad():
        model.o.bias[0] += change
    module = torch.export.export(model, batches[0], strict=False).module()
    prepared = prepare_pt2e(module, qnn.QnnQuantizer(recipe))
    calls = []
    prepared.register_forward_pre_hook(lambda *_: calls.append(1))
    assert qnn.calibrate(prepared, iter(batches), cache=folder) == 3
    converted = convert_pt2e(prepared)
    tensors = {n: t.clone() for n, t in converted.state_dict().items()}
    return bool(calls), str(converted.graph), tensors


def test_the_second_time_gives_the_same_without_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    first, graph, tensors = calibrated(folder)
    second, same, equal = calibrated(folder)
    assert (first, second) == (True, False)
    assert graph == same
    assert tensors.keys() == equal.keys()
    assert all(torch.equal(t, equal[n]) for n, t in tensors.items())
    assert len(list(folder.iterdir())) == 1


def test_what_is_not_the_same_is_run(tmp_path: Path) -> None:
    calibrated(tmp_path)
    other = [*BATCHES[:2], (noise(9, 1, 32), torch.tensor([2]))]
    changes: list[dict[str, Any]] = [
        {"batches": other},
        {"change": 1e-3},
        {"recipe": "16a8w"},
        {"recipe": qnn.QuantRecipe("16a4w", observer="mse")},
        {"recipe": qnn.QuantRecipe("16a4w", seq_mse=True)},
    ]
    for change in changes:
        assert calibrated(tmp_path, **change)[0], change
    assert len(list(tmp_path.iterdir())) == len(changes) + 1


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-7], lambda b: b[:900] + b"?" + b[901:], lambda b: b""]
)
def test_a_damaged_file_is_written_again(damage: Any, tmp_path: Path) -> None:
    _, graph, _ = calibrated(tmp_path)
    (file,) = tmp_path.iterdir()
    good = file.read_bytes()
    file.write_bytes(damage(good))
    with pytest.warns(UserWarning, match="is damaged"):
        again, same, _ = calibrated(tmp_path)
    assert again
    assert graph == same
    assert calibrated(tmp_path)[0] is False
