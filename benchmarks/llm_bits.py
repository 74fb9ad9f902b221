# SPDX-License-Identifier: BSD-3-Clause
"""What bits cost a language model, and what rotation, smoothing and sequential MSE give back.

The fake-quantized decoder against the one in floats, on the CPU, after each 24 tokens of a text
that was not calibrated with: SQNR of the logits, and how far the predicted distribution is off
(Kullback-Leibler divergence, nats).

    python benchmarks/llm_bits.py [--model smollm2-135m] [--layers 3]

Takes about 10 s of CPU for each row and 3 layers, and a minute with sequential MSE.
"""

from __future__ import annotations

import argparse
import copy
import sys

import torch
from torch import Tensor
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import executorch_qnn as qnn
from executorch_qnn.llm.export import CALIBRATION_TEXT
from executorch_qnn.llm.rotation import rotate
from executorch_qnn.llm.smoothing import smooth
from executorch_qnn.llm.weights import load_model

TOKENS = 24
CALLS = 5
TEXT = """\
The old ship sailed into the bay at dawn. Nobody on the shore had seen a vessel like it for many \
years, and the children ran down to the water to look at her black sails. In 1912, the company \
sold 3,400 machines; by 1920 it had sold ten times as many. def add(a, b): return a + b. Snow fell \
all night and in the morning the roads were closed."""

Calls = list[tuple[Tensor, Tensor]]


def logits(model: torch.nn.Module, calls: Calls) -> Tensor:
    """Logits after each call, the first of which starts with an empty cache."""
    with torch.no_grad():
        return torch.cat([model(*call) for call in calls])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    decoder, tokenizer = load_model(args.model, max_seq_len=128, layers=args.layers)

    def calls(text: str) -> Calls:
        tokens = tokenizer.encode(text)
        starts = range(0, min(len(tokens), TOKENS * CALLS) - TOKENS + 1, TOKENS)
        return [(torch.tensor([tokens[i : i + TOKENS]]), torch.tensor([i])) for i in starts]

    known, other = calls(CALIBRATION_TEXT), calls(TEXT)
    want = logits(decoder, other)
    decoder.reset_state()
    print("| recipe | | SQNR | divergence |\n|---|---|---|---|")
    for base, how in [
        ("8a8w", ""), ("8a8w", "rotated"), ("8a8w", "smoothed"),
        ("16a4w", ""), ("16a4w", "rotated"), ("16a4w", "sequential MSE"),
    ]:  # fmt: skip
        model = copy.deepcopy(decoder)
        if how == "rotated":
            rotate(model)
        if how == "smoothed":
            smooth(model, known)
        recipe = qnn.QuantRecipe(base, seq_mse=how == "sequential MSE")
        module = torch.export.export(model, known[0], strict=False).module()
        prepared = prepare_pt2e(module, qnn.QnnQuantizer(recipe))
        qnn.calibrate(prepared, known)
        got = logits(convert_pt2e(prepared), other)
        sqnr = 10 * torch.log10(want.square().sum() / (got - want).square().sum())
        p, q = want.log_softmax(-1), got.log_softmax(-1)
        divergence = (p.exp() * (p - q)).sum(-1).mean()
        print(f"| {base} | {how} | {sqnr:.1f} dB | {divergence:.3f} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
