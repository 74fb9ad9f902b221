# SPDX-License-Identifier: BSD-3-Clause
"""How long a state takes to save, load and fork, beside a plain write of as many bytes.

python benchmarks/state_files.py [--mib 100] [--folder .] [--repeat 5]
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

import executorch_qnn as qnn


class Rows(nn.Module):
    """A buffer of whole MiB in fp16, of which a call writes one row."""

    rows: Tensor

    def __init__(self, mib: int) -> None:
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 512 * mib, 1024))

    def forward(self, at: Tensor, row: Tensor) -> Tensor:
        self.rows.index_copy_(1, at, row)
        return row * 2


def milliseconds(calls: dict[str, Callable[[], object]], repeat: int) -> dict[str, float]:
    """The median for each of the calls, which take turns: a disk has better and worse times."""
    times: dict[str, list[float]] = {label: [] for label in calls}
    for _ in range(repeat):
        for label, call in calls.items():
            started = time.perf_counter()
            call()
            times[label].append(time.perf_counter() - started)
    return {label: statistics.median(taken) * 1000 for label, taken in times.items()}


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=100)
    parser.add_argument("--folder", default=".", help="on the disk to measure")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--qnn-libraries")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        inputs = (torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, 1024))
        program = qnn.lower(
            Rows(args.mib), inputs, target="SM8650", qnn_libraries=args.qnn_libraries
        )
        program.save(folder / "rows.pte")
        session = qnn.load(folder / "rows.pte", qnn_libraries=args.qnn_libraries)
        size = sum(info.nbytes for info in session.state().values())
        noise = os.urandom(size)

        def plain() -> None:
            with (folder / "plain").open("wb") as file:
                file.write(noise)
                file.flush()
                os.fsync(file.fileno())

        rows = {
            "write and fsync of as many bytes": plain,
            "save_state": lambda: session.save_state(folder / "state"),
            "load_state": lambda: session.load_state(folder / "state"),
            "fork": session.fork,
        }
        print(f"{size / (1 << 20):.0f} MiB of state, median of {args.repeat}")
        for label, took in milliseconds(rows, args.repeat).items():
            print(f"{label:34} {took:8.1f} ms  {size / took / 1e6:6.2f} GB/s")


if __name__ == "__main__":
    main()
