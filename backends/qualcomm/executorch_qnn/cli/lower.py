# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn lower MODULE:FUNCTION`: a model of the user's, lowered into a `.pte`."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..target import Target
from .output import Output, UsageError, add_common_options, human_bytes

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
        "--fallback",
        choices=("cpu", "error"),
        default="cpu",
        help="what to do with an op that the NPU cannot run (default: %(default)s)",
    )
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


def _function(reference: str) -> Callable[[], Any]:
    """What `module:function` or `file.py:function` names."""
    module_name, _, function_name = reference.rpartition(":")
    if not module_name or not function_name:
        raise UsageError(f"{reference!r} is not of the form MODULE:FUNCTION")
    if module_name.endswith(".py"):
        path = Path(module_name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise UsageError(f"no such file: {path}")
        sys.path.insert(0, str(path.resolve().parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there; what it imports is not
            raise UsageError(f"no module named {error.name!r}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"{module_name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def _model_and_inputs(returned: Any) -> tuple[Any, Any]:
    """The first two arguments of `lower` for what the user's function returned."""
    if isinstance(returned, dict):
        return returned, None
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise UsageError(
        "the function must return (model, example_inputs) or {method: (model, example_inputs)}, "
        f"not {type(returned).__name__}"
    )


def _run(args: argparse.Namespace, out: Output) -> None:
    target = Target(args.target)
    output = Path(args.output)
    if not output.resolve().parent.is_dir():
        raise UsageError(f"no such folder: {output.resolve().parent}")

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("loading the model") as stage:
        model, inputs = _model_and_inputs(_function(args.function)())
        stage("importing")
        import executorch_qnn as qnn

        stage("lowering")
        program = qnn.lower(
            model,
            inputs,
            target=target,
            quantize=args.quantize,
            fallback=args.fallback,
            qnn_libraries=str(folder),
            progress=stage,
        )
        stage(f"writing {output}")
        program.save(str(output))

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
