# SPDX-License-Identifier: BSD-3-Clause
"""What the delegate itself costs per execution, by the number of mutable buffers.

Runs a decode-like graph on a QNN provider that does nothing (tests/cpp/null), so that every
instruction but a few hundred of the provider's and the clock's is the delegate's.  valgrind counts
them: exact, and the same on every machine with the same compiler.

    python benchmarks/execute.py [--buffers 0,2,16,60] [--json]

Needs cmake, ninja and valgrind.  With `--program FILE.pte` also measures how long that program
takes to load on the real libraries.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build" / "benchmarks"


def build() -> Path:
    """The benchmark program, compiled as a release is."""
    import executorch

    folder = next(iter(executorch.__path__))
    configure = [
        "cmake",
        "-S",
        str(ROOT),
        "-B",
        str(BUILD),
        "-G",
        "Ninja",
        "-DCMAKE_BUILD_TYPE=Release",
    ]
    configure += ["-DETQNN_TESTS=ON", "-DETQNN_PYTHON=OFF"]
    subprocess.run(
        [*configure, f"-Dexecutorch_DIR={folder}/lib/cmake/executorch"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run(
        ["cmake", "--build", BUILD, "--target", "bench_execute"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    return BUILD / "tests" / "cpp" / "bench_execute"


def instructions(program: Path, buffers: int) -> float:
    """Per execution: the difference between 1,000 and 2,000 of them."""

    def total(executions: int) -> int:
        command = ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"]
        run = subprocess.run(
            [*command, program, str(buffers), str(executions)],
            capture_output=True,
            text=True,
            check=True,
        )
        found = re.search(r"Collected : (\d+)", run.stderr)
        if found is None:
            raise SystemExit(f"valgrind says nothing about instructions:\n{run.stderr}")
        return int(found[1])

    return (total(2000) - total(1000)) / 1000


def microseconds(program: Path, buffers: int) -> float:
    """Of the fastest of 100,000 executions."""
    run = subprocess.run(
        [program, str(buffers), "100000"], capture_output=True, text=True, check=True
    )
    return float(run.stdout)


def load(path: str, libraries: str | None) -> dict[str, float]:
    """Loading a program twice: what the first session costs, and a second one beside it."""
    import executorch_qnn as qnn

    _ = qnn.Session  # imports torch, which is not what is measured

    def cpu() -> float:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime + usage.ru_stime

    wall, used = time.perf_counter(), cpu()
    session = qnn.load(path, qnn_libraries=libraries)
    first, first_cpu = time.perf_counter() - wall, cpu() - used
    wall = time.perf_counter()
    twin = session.fork()
    return {
        "load_s": first,
        "load_cpu_s": first_cpu,
        "fork_s": time.perf_counter() - wall,
        "state_bytes": float(sum(info.nbytes for info in twin.state().values())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--buffers", default="0,2,16,60", metavar="N,N")
    parser.add_argument("--program", metavar="FILE.pte", help="also measure loading this program")
    parser.add_argument("--qnn-libraries", metavar="PATH")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    args = parser.parse_args()
    if shutil.which("valgrind") is None:
        print("valgrind is missing: apt-get install valgrind", file=sys.stderr)
        return 1

    program = build()
    rows = [
        {
            "buffers": buffers,
            "instructions": instructions(program, buffers),
            "microseconds": microseconds(program, buffers),
        }
        for buffers in map(int, args.buffers.split(","))
    ]
    document: dict[str, Any] = {"execute": rows}
    if args.program:
        document["load"] = load(args.program, args.qnn_libraries)
    if args.json:
        print(json.dumps(document))
        return 0
    print("buffers  instructions/execute  us/execute")
    for row in rows:
        print(f"{row['buffers']:7}  {row['instructions']:20,.0f}  {row['microseconds']:10.3f}")
    for name, value in document.get("load", {}).items():
        print(f"{name} {value:g}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
