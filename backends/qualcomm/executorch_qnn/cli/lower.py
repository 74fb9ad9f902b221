# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn lower MODULE:FUNCTION`: a model of the user's, lowered into a `.pte`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from ..target import Target
from .model import CALLS, function_of, load_calibration, model_and_inputs
from .output import Output, UsageError, add_common_options, check_folder, human_bytes

if TYPE_CHECKING:
    from .output import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "lower",
        help="lower a PyTorch model into a .pte",
        description="Calls FUNCTION, which returns (model, example_inputs) or, for several methods "
        "that share state and weights, {method: (model, example_inputs)}, and lowers the result.",
    )
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="an importable module (the current folder counts) or a .py file, and a function in it",
    )
    parser.add_argument("-o", "--output", metavar="FILE.pte", required=True)
    parser.add_argument("--target", default="SM8650", metavar="SOC", help="default: %(default)s")
    parser.add_argument("--quantize", metavar="NAME", help="for example 16a4w; default: fp16")
    parser.add_argument(
        "--calibration",
        metavar=CALLS,
        nargs="+",
        help="what the ranges are found with: the inputs of consecutive calls, a file for each",
    )
    parser.add_argument(
        "--encodings",
        metavar="FILE",
        help="of some or all values, in AIMET's JSON, which are then not found with --calibration",
    )
    parser.add_argument(
        "--save-encodings", metavar="FILE", help="write those of the quantized program"
    )
    parser.add_argument(
        "--fallback",
        choices=("cpu", "error"),
        default="cpu",
        help="what to do with an op that the NPU cannot run (default: %(default)s)",
    )
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, out: Output) -> None:
    target = Target(args.target)
    if args.quantize is None and (args.encodings or args.save_encodings):
        raise UsageError("--encodings and --save-encodings are for --quantize, which is not given")
    output = Path(args.output)
    for file in (output, Path(args.save_encodings or output)):
        check_folder(file)

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("loading the model") as stage:
        model, inputs = model_and_inputs(function_of(args.function)())
        stage("importing")
        import executorch_qnn as qnn

        calibration = load_calibration(args.calibration, model, inputs)
        stage("lowering")
        program = qnn.lower(
            model,
            inputs,
            target=target,
            quantize=args.quantize,
            calibration=calibration,
            encodings=args.encodings,
            fallback=args.fallback,
            qnn_libraries=str(folder),
            progress=stage,
        )
        stage(f"writing {output}")
        program.save(str(output))
        if args.save_encodings:
            program.save_encodings(args.save_encodings)

    size = output.stat().st_size
    out.result(
        {
            "file": str(output),
            "bytes": size,
            "target": target.name,
            "report": json.loads(program.report.to_json()),
        },
        f"{program.report.to_text()}\nwrote {output}, {human_bytes(size)}",
    )
