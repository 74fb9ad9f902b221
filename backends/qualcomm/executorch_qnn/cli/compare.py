# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn compare FILE.pte`: what the bits and the NPU cost, layer by layer."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..target import Target
from .model import CALLS, function_of, load_calibration, load_calls, model_and_inputs
from .output import Output, UsageError, add_common_options, check_folder
from .pte import PteFile

if TYPE_CHECKING:
    from .output import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "compare",
        help="eager, fake-quant and delegate, layer by layer",
        description="Runs consecutive calls on FILE.pte and on the model that it was lowered from, "
        "in floats and fake-quantized. The values of layers come from the model, lowered again "
        "with the same options and the layers as further outputs.",
    )
    parser.add_argument("file", metavar="FILE.pte")
    parser.add_argument(
        "--model", metavar="MODULE:FUNCTION", required=True, help="what `lower` was given"
    )
    parser.add_argument(
        "--inputs",
        metavar=CALLS,
        nargs="+",
        required=True,
        help="the inputs of consecutive calls, a file for each",
    )
    parser.add_argument("--target", metavar="SOC", help="default: that of the file")
    parser.add_argument("--quantize", metavar="NAME", help="default: that of the file")
    parser.add_argument(
        "--calibration", metavar=CALLS, nargs="+", help="what `lower` was given, if it quantized"
    )
    parser.add_argument(
        "--layers",
        choices=("modules", "nodes"),
        default="modules",
        help="the last value of each module, or of each node (default: %(default)s)",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with plots to this file")
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


def _lowered_with(path: Path) -> dict[str, Any]:
    """What the program in a file says of its own lowering."""
    with PteFile(path) as pte:
        named = pte.named_data()
        try:
            about: dict[str, Any] = json.loads(bytes(named["executorch_qnn.meta"]))
            return about
        except (KeyError, ValueError):
            return {}


def _run(args: argparse.Namespace, out: Output) -> None:
    path = Path(args.file)
    about = _lowered_with(path)
    recipe = args.quantize or about.get("quantize")
    if recipe == "recipe":
        raise UsageError(
            f"{path} was quantized with a QuantRecipe: use executorch_qnn.compare in Python"
        )
    if recipe is not None and args.calibration is None:
        raise UsageError(f"{path} is quantized ({recipe}): give the --calibration that it had")
    if not (name := args.target or about.get("target")):
        raise UsageError(f"{path} does not say for which target it is: give --target")
    target = Target(name)
    if args.html:
        check_folder(Path(args.html))

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("loading the model") as stage:
        model, examples = model_and_inputs(function_of(args.model)())
        stage("importing")
        import executorch_qnn as qnn

        calls = load_calls(args.inputs, model, examples)
        program = qnn.lower(
            model,
            examples,
            target=target,
            quantize=recipe,
            calibration=load_calibration(args.calibration, model, examples),
            qnn_libraries=str(folder),
            progress=stage,
        )
        compared = qnn.compare(program, calls, file=path, layers=args.layers, progress=stage)
        if args.html:
            Path(args.html).write_text(compared.to_html(), encoding="utf-8")
    note = f"\nwrote {args.html}" if args.html else ""
    out.result(
        {"file": str(path), "html_file": args.html, **compared.to_dict()},
        compared.to_text() + note,
    )
