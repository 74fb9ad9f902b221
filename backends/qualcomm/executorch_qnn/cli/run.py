# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn run FILE.pte`: one call of a method, its inputs and outputs in .npz files."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import QnnError
from .model import load_arrays
from .output import Output, UsageError, add_common_options, human_bytes, table

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from .output import Commands

_SHOWN_VALUES = 8


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "run",
        help="run a method of a .pte",
        description="Runs one method once. The arrays of the .npz file are its inputs, in the "
        "order of the file.",
    )
    parser.add_argument("file", metavar="FILE.pte")
    parser.add_argument("--inputs", metavar="FILE.npz", help="default: no inputs")
    parser.add_argument("--outputs", metavar="FILE.npz", help="write the outputs to this file")
    parser.add_argument("--method", default="forward", metavar="NAME", help="default: %(default)s")
    parser.add_argument("--state-in", metavar="FILE", help="load the mutable buffers first")
    parser.add_argument(
        "--state-out",
        metavar="FILE",
        help="save the mutable buffers afterwards; may be the file of --state-in",
    )
    add_where(parser)
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


def add_where(parser: argparse.ArgumentParser) -> None:
    """Adds `--on`, the place where the program runs."""
    parser.add_argument(
        "--on",
        default="host",
        metavar="WHERE",
        help="host: this machine, on its NPU or on the simulator (default)",
    )


def check_where(where: str) -> None:
    """Raises unless `where`, the value of `--on`, is a place that can be used."""
    if where == "host":
        return
    if where.split(":")[0] in ("adb", "ssh"):
        raise QnnError(f"--on {where}: running on a device is not supported yet; use --on host")
    raise UsageError(f"--on {where}: not a place to run on; use --on host")


def _summary(array: npt.NDArray[np.generic]) -> dict[str, Any]:
    import numpy as np

    flat = array.reshape(-1)
    facts: dict[str, Any] = {
        "shape": list(array.shape),
        "dtype": str(array.dtype),
        "first": flat[:_SHOWN_VALUES].tolist(),
    }
    finite = flat[np.isfinite(flat)] if flat.dtype.kind == "f" else flat
    if flat.dtype.kind in "fiu" and finite.size:
        facts["min"], facts["max"] = finite.min().item(), finite.max().item()
        facts["not_finite"] = int(flat.size - finite.size)
    # NaN and infinity are not JSON.
    facts["first"] = [
        str(value) if isinstance(value, float) and not np.isfinite(value) else value
        for value in facts["first"]
    ]
    return facts


def _run(args: argparse.Namespace, out: Output) -> None:
    check_where(args.on)
    program = Path(args.file)
    if not program.is_file():
        raise QnnError(f"no such file: {program}")
    arrays = [] if args.inputs is None else load_arrays(args.inputs)

    from .. import libraries

    folder = libraries.find(args.qnn_libraries)
    with out.stage("importing") as stage:
        import numpy as np
        import torch

        import executorch_qnn as qnn

        stage(f"loading {program.name}")
        session = qnn.load(str(program), qnn_libraries=str(folder))
        if args.state_in:
            session.load_state(args.state_in)
        inputs = [torch.from_numpy(array) for array in arrays]
        stage(f"running {args.method}")
        started = time.perf_counter()
        returned = session.run(args.method, *inputs)
        seconds = time.perf_counter() - started
        tensors = returned if isinstance(returned, (list, tuple)) else [returned]
        outputs = [tensor.detach().numpy() for tensor in tensors]
        if args.outputs:
            with Path(args.outputs).open("wb") as file:  # savez would extend the name
                np.savez(file, **{f"output_{i}": array for i, array in enumerate(outputs)})
        # Last, so that a step that is repeated because its outputs are lost starts from the old
        # state.
        if args.state_out:
            session.save_state(args.state_out)

    facts = [_summary(array) for array in outputs]
    state = session.state()
    rows = [
        (f"output_{i}", fact["dtype"], fact["shape"], ", ".join(map(_short, fact["first"])))
        for i, fact in enumerate(facts)
    ]
    state_bytes = sum(info.nbytes for info in state.values())
    notes = [f"{args.method}: {seconds * 1000:.1f} ms"]
    if state:
        notes.append(f"{len(state)} state buffers, {human_bytes(state_bytes)}")
    out.result(
        {
            "file": str(program),
            "method": args.method,
            "seconds": seconds,
            "outputs": facts,
            "state": sorted(state),
            "outputs_file": args.outputs,
            "state_file": args.state_out,
        },
        "\n".join(part for part in (table(rows), ", ".join(notes)) if part),
    )


def _short(value: object) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
