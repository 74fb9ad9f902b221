# SPDX-License-Identifier: BSD-3-Clause
"""A checkpoint lowered into a program that follows ExecuTorch's convention for language models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LoweringError
from ..target import Target
from . import rotation, smoothing
from .decoder import Decoder
from .tokenizer import Tokenizer
from .weights import load_model

if TYPE_CHECKING:
    from ..lowering import Program


def example_inputs(tokens: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs of a `Decoder` for so many tokens at a time."""
    return torch.zeros(1, tokens, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)


def prefill_method(tokens: int) -> str:
    """The name of the method that reads so many tokens at once."""
    return f"prefill_{tokens}"


def constant_methods(decoder: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """What a runner asks a program before it runs it, by ExecuTorch's names."""
    constants = {
        "get_max_seq_len": decoder.max_seq_len,
        "get_max_context_len": decoder.max_seq_len,
        "get_vocab_size": decoder.config.vocab_size,
        "get_eos_ids": sorted(tokenizer.eos_ids),
        "use_kv_cache": True,
        # One token at a time: the graph's shapes are fixed.
        "enable_dynamic_shape": False,
    }
    if tokenizer.bos_id is not None:
        constants["get_bos_id"] = tokenizer.bos_id
    return constants


CALIBRATION_TEXT = """\
The harbour wakes before the town does. At five the first boats come in past the lighthouse, and
the men on the quay sort the catch: cod, mackerel, a few crabs that nobody asked for. "Cold enough
for you?" they say to each other, as they have said every winter for 30 years. By half past seven
the market is full, prices are chalked on a board (1.50, 2.75, 4.00), and the gulls have learned
which stalls look away. What is left at noon goes to the kitchen of the school on the hill.

def total(prices):
    return sum(p for p in prices if p > 0)

Question: What is the capital of France? Answer: The capital of France is Paris.
"""


def calibration(
    decoder: Decoder, tokenizer: Tokenizer, prefill: Sequence[int], text: str
) -> dict[str, list[tuple[torch.Tensor, torch.Tensor]]]:
    """Calibration data of each method: `text`, as far as it fits into the context.

    Raises:
        LoweringError: the text has no tokens, or fewer than a prefill method reads at once.
    """
    tokens = tokenizer.encode(text)[: decoder.max_seq_len]
    if len(tokens) < max(1, *prefill, 1):
        raise LoweringError(f"the calibration text has {len(tokens)} tokens only")

    def chunks(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            (torch.tensor([tokens[i : i + size]]), torch.tensor([i]))
            for i in range(0, len(tokens) - size + 1, size)
        ]

    return {"forward": chunks(1)} | {prefill_method(n): chunks(n) for n in prefill}


@dataclass(frozen=True)
class LanguageModel:
    """A lowered decoder and its tokenizer."""

    program: Program
    tokenizer: Tokenizer

    def save(self, file: Path) -> list[Path]:
        """Writes `NAME.pte` and its tokenizer beside it; returns all paths, the program first."""
        self.program.save(str(file))
        return [file, *self.tokenizer.save(file)]


def export(
    model: str | Path,
    *,
    target: Target,
    max_seq_len: int = 512,
    layers: int | None = None,
    prefill: Sequence[int] = (),
    quantize: str | None = None,
    rotate: bool = False,
    smooth: bool = False,
    text: str = CALIBRATION_TEXT,
    qnn_libraries: str | None = None,
    progress: Callable[[str], None] | None = None,
) -> LanguageModel:
    """Lowers a decoder with its key/value cache kept in place on the NPU.

    Args:
        model: a folder in Hugging Face's layout, a `.gguf` file, or the name of a packaged model
            (`smollm2-135m`).
        target: the chip to compile for.
        max_seq_len: positions of the cache, so the longest prompt and answer together.
        layers: keep the first so many layers only.
        prefill: sizes of extra methods `prefill_<n>` over the same cache, which read n tokens of a
            prompt at once. Each adds a copy of the weights to the file.
        quantize: name of a recipe, such as `16a8w`; weights and cache are float16 when None.
        rotate: turn hidden states and values so that they have no outliers; see `rotation`.
        smooth: move outliers of activations into weights; see `smoothing`.
        text: what the ranges of a quantized model are found with; the more like what it will read
            and write, the better.
        qnn_libraries: folder of the QNN libraries; searched for if None.
        progress: called with the name of each stage as it starts.

    Raises:
        LoweringError: the checkpoint is not usable, an option is not supported, or QNN refuses the
            model.
    """
    if any(not 1 < size <= max_seq_len for size in prefill):
        raise LoweringError(f"prefill sizes must lie between 2 and {max_seq_len}: {[*prefill]}")
    if (rotate or smooth) and quantize is None:
        raise LoweringError("rotation and smoothing are for quantized models: give a recipe, too")
    import executorch_qnn as qnn

    if quantize is not None:
        qnn.QuantRecipe(quantize)
    stage = progress or (lambda name: None)
    stage("loading the checkpoint")
    dtype = torch.float16 if quantize is None else torch.float32  # eager is slow in float16
    decoder, tokenizer = load_model(model, max_seq_len=max_seq_len, layers=layers, dtype=dtype)
    data = None if quantize is None else calibration(decoder, tokenizer, prefill, text)
    if rotate:
        stage("rotating")
        rotation.rotate(decoder)
    if smooth and data is not None:
        stage("smoothing")
        smoothing.smooth(decoder, data["forward"])
    methods = {"forward": (decoder, example_inputs())}
    methods |= {prefill_method(size): (decoder, example_inputs(size)) for size in prefill}
    program = qnn.lower(
        methods,
        target=target,
        quantize=quantize,
        calibration=data,
        constant_methods=constant_methods(decoder, tokenizer),
        qnn_libraries=qnn_libraries,
        progress=progress,
    )
    return LanguageModel(program, tokenizer)
