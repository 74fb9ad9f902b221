# SPDX-License-Identifier: BSD-3-Clause
"""Few bits after training and while training: a small CNN for handwritten digits.

The data are scikit-learn's 1,797 digits of 8 x 8 pixels, which are in its wheel; every second is
for the test.  The network is depthwise-separable, which is hard on 4-bit weights.

    python benchmarks/qat.py [--bits 4] [--activations 8] [--epochs 30] [--qat-epochs 12] [--json]

Needs scikit-learn, and takes about half a minute.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchao.quantization.pt2e import allow_exported_model_train_eval
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e

import executorch_qnn as qnn
from executorch_qnn.quantizer.recipe import Bits

BATCH = 60


def digits() -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
    """Batches for training and for the test."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(data.target)
    test = torch.arange(len(y)) % 2 == 0

    def batches(which: Tensor) -> list[tuple[Tensor, Tensor]]:
        parts = zip(x[which].split(BATCH), y[which].split(BATCH), strict=True)
        return [(a, b) for a, b in parts if len(b) == BATCH]

    return batches(~test), batches(test)


def network() -> nn.Module:
    """Two depthwise-separable blocks after a convolution."""

    def block(inputs: int, outputs: int, groups: int, size: int) -> list[nn.Module]:
        layer = nn.Conv2d(inputs, outputs, size, padding=size // 2, groups=groups, bias=False)
        return [layer, nn.BatchNorm2d(outputs), nn.ReLU6()]

    return nn.Sequential(
        *block(1, 16, 1, 3), *block(16, 16, 16, 3), *block(16, 32, 1, 1), nn.MaxPool2d(2),
        *block(32, 32, 32, 3), *block(32, 32, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, 10),
    )  # fmt: skip


def train(model: nn.Module, data: list[tuple[Tensor, Tensor]], epochs: int, rate: float) -> None:
    """Adam, with a rate that falls to zero."""
    optimizer = torch.optim.Adam(model.parameters(), rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=epochs * len(data))
    generator = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for i in torch.randperm(len(data), generator=generator).tolist():
            x, y = data[i]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            schedule.step()


def accuracy(model: Callable[[Tensor], Any], data: list[tuple[Tensor, Tensor]]) -> float:
    """Percent of the digits that are told right."""
    with torch.no_grad():
        right = sum(int((model(x).argmax(1) == y).sum()) for x, y in data)
    return 100 * right / (len(data) * BATCH)


def simulated(program: qnn.Program, data: list[tuple[Tensor, Tensor]]) -> float:
    """Percent that the delegate tells right on HTP's simulator."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "digits.pte"
        program.save(path)
        return accuracy(qnn.load(path), data)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--activations", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--qat-epochs", type=int, default=12)
    parser.add_argument("--target", default="SM8650")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    train_data, test_data = digits()
    model = network()
    train(model, train_data, args.epochs, 0.01)
    found = {"float": {"CPU": accuracy(model.eval(), test_data)}}

    recipe = qnn.QuantRecipe(Bits(args.activations, args.bits))
    inputs = (test_data[0][0],)
    ptq = qnn.lower(
        copy.deepcopy(model),
        inputs,
        target=args.target,
        quantize=recipe,
        calibration=[(x,) for x, _ in train_data],
    )
    assert ptq.fake_quantized is not None
    found["PTQ"] = {
        "CPU": accuracy(ptq.fake_quantized["forward"], test_data),
        "HTP": simulated(ptq, test_data),
    }

    exported = torch.export.export(model.train(), inputs, strict=False).module()
    prepared = prepare_qat_pt2e(exported, qnn.QnnQuantizer(recipe, qat=True))
    allow_exported_model_train_eval(prepared)
    train(prepared, train_data, args.qat_epochs, 0.005)
    prepared.eval()
    quantized = convert_pt2e(prepared)
    program = qnn.lower(quantized, inputs, target=args.target)
    found["QAT"] = {"CPU": accuracy(quantized, test_data), "HTP": simulated(program, test_data)}

    if args.json:
        print(
            json.dumps({"activations": args.activations, "weights": args.bits, "accuracy": found})
        )
        return 0
    bits = f"{args.activations}-bit activations, {args.bits}-bit weights"
    print(f"{bits}, {BATCH * len(test_data)} digits")
    print("| | fake-quantized, on the CPU | on HTP's simulator |\n|---|---|---|")
    for name, at in found.items():
        simulator = f"{at['HTP']:.1f} %" if "HTP" in at else ""
        print(f"| {name} | {at['CPU']:.1f} % | {simulator} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
