# SPDX-License-Identifier: BSD-3-Clause
"""Batch norms in weights, and training with fake-quantizers."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchao.quantization.pt2e import allow_exported_model_train_eval, disable_observer
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

import executorch_qnn as qnn
from executorch_qnn.quantizer.batch_norm import fold_batch_norms
from executorch_qnn.quantizer.recipe import Bits

from .test_quantize import TARGET, noise, quantize, sqnr


def norm(channels: int, kind: type = nn.BatchNorm2d, **options: object) -> nn.Module:
    made = kind(channels, **options)
    made.running_mean.normal_()
    made.running_var.uniform_(0.1, 2)
    if made.affine:
        made.weight.data.uniform_(0.5, 2)
        made.bias.data.normal_()
    return made


class Shared(nn.Module):
    """A convolution's weights before two norms, before none, and a result that others read."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.a, self.b = nn.Conv2d(4, 8, 3), norm(8), norm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x * 3)
        return self.a(self.conv(x)) + self.b(self.conv(x * 2)) + self.conv(-x) + self.a(y) + y


def test_batch_norms_are_folded_where_that_is_right() -> None:
    torch.manual_seed(0)
    x = noise(0, 2, 4, 8, 8)
    layers: dict[nn.Module, int] = {
        nn.Sequential(nn.Conv2d(4, 8, 3, bias=False), norm(8, eps=0.1)): 0,
        nn.Sequential(nn.Conv2d(4, 8, 3, padding="same", groups=4), norm(8, affine=False)): 0,
        nn.Sequential(nn.ConvTranspose2d(4, 8, 3, groups=2), norm(8)): 0,
        nn.Sequential(nn.Flatten(), nn.Linear(256, 8), norm(8, nn.BatchNorm1d)): 0,
        nn.Sequential(nn.Flatten(2), nn.Linear(64, 8), norm(4, nn.BatchNorm1d)): 1,
        Shared(): 1,
    }
    for layer, left in layers.items():
        with torch.no_grad():
            want = layer.eval()(x)
            module = torch.export.export(layer, (x,), strict=False).module()
            fold_batch_norms(module)
            module.graph.lint()
            assert sqnr([module(x)], [want]) > 120, layer
        norms = module.graph.find_nodes(
            op="call_function", target=torch.ops.aten.batch_norm.default
        )
        assert len(norms) == left, layer


class Tiny(nn.Module):
    """Norms after a plain, a depthwise and a grouped transposed convolution, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(2, 8, 3, padding=1, bias=False), norm(8, eps=1e-2), nn.ReLU6(),
            nn.Conv2d(8, 8, 3, groups=8), norm(8), nn.ReLU(),
            nn.ConvTranspose2d(8, 8, 2, 2, groups=2), norm(8), nn.MaxPool2d(4), nn.Flatten(),
            nn.Linear(72, 16), norm(16, nn.BatchNorm1d),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_training_gives_back_what_four_bits_take(tmp_path: Path, qnn_libraries: str) -> None:
    torch.set_num_threads(1)
    model, recipe = Tiny(), qnn.QuantRecipe(Bits(8, 4))
    batches = [(noise(i, 16, 2, 8, 8),) for i in range(8)]
    with torch.no_grad():
        for b in batches * 8:  # statistics that are the data's
            model.train()(*b)
        want = [model.eval()(*b) for b in batches]
        copied = copy.deepcopy(model)
        ptq, _ = quantize(model, batches, recipe, tmp_path, qnn_libraries)
        before = sqnr([ptq.fake_quantized["forward"](*b) for b in batches], want)

    exported = torch.export.export(copied.train(), batches[0], strict=False).module()
    prepared = prepare_qat_pt2e(exported, qnn.QnnQuantizer(recipe, qat=True))
    allow_exported_model_train_eval(prepared)
    optimizer = torch.optim.Adam(prepared.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 200)
    for step in range(200):
        if step == 60:
            prepared.eval()  # the statistics stay as they are from here on
        optimizer.zero_grad()
        (prepared(*batches[step % 8]) - want[step % 8]).square().mean().backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        prepared.apply(disable_observer)
        trained = [prepared(*b) for b in batches]
        quantized = convert_pt2e(prepared)
        folded = [quantized(*b) for b in batches]
    assert not [n for n in quantized.graph.nodes if "batch_norm" in str(n.target)]
    assert sqnr(folded, trained) > 30
    assert sqnr(folded, want) > before

    program = qnn.lower(quantized, batches[0], target=TARGET, qnn_libraries=qnn_libraries)
    report = program.report.methods["forward"]
    assert len(report.delegates) == 1
    assert not report.cpu_ops
    program.save(tmp_path / "trained.pte")
    session = qnn.load(tmp_path / "trained.pte", qnn_libraries=qnn_libraries)
    got = [session(*b) for b in batches]
    assert sqnr(got, want) > before
    assert sqnr(got, folded) > 30
