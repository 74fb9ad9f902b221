# SPDX-License-Identifier: BSD-3-Clause
"""Runs thousands of random stateful models and compares each with eager.

    python benchmarks/random_models.py --models 2000 --out FOLDER [--seed 0] [--budget-s 3600]

Models come in series, each in a process of its own: a crash is a failure like any other.  FOLDER
holds what is done, and each failing model, made small, as a file to run again with
`python -m tests.state.replay`.  A run that was stopped, or whose budget is spent, is continued by
the same command.  Exit status 0 if all models ran and none failed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SERIES = 50
"""Models of a series."""


def run_series(number: int, models: int, out: Path, extra: list[str]) -> dict[str, Any]:
    """What became of one series: `models` that ran, and the file of a `failure`."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.state.search", str(number)]
    command += ["--models", str(models), "--out", str(out), *extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    try:
        result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        log = out / f"series-{number}.log"
        log.write_text(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        running = out / f"series-{number}-running.py"
        return {"models": 0, "failure": str(running if running.exists() else log)}
    return result


def main() -> int:
    """Runs the series that are not done yet."""
    parser = argparse.ArgumentParser(description="Random stateful models against eager.")
    parser.add_argument("--models", type=int, default=2000)
    parser.add_argument("--out", type=Path, required=True, help="folder of results")
    parser.add_argument("--seed", type=int, default=0, help="number of the first series")
    parser.add_argument("--budget-s", type=float, help="start no series after so many seconds")
    parser.add_argument("--shrink-s", type=float, default=120.0, help="time for a failure")
    parser.add_argument("--qnn-libraries", metavar="PATH")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    extra = ["--shrink-s", str(args.shrink_s)]
    extra += ["--qnn-libraries", args.qnn_libraries] if args.qnn_libraries else []
    record = args.out / "series.json"
    results: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    start, number = time.monotonic(), args.seed
    while (ran := sum(r["models"] for r in results.values())) < args.models:
        if args.budget_s is not None and time.monotonic() - start > args.budget_s:
            break
        if str(number) not in results:
            results[str(number)] = run_series(
                number, min(SERIES, args.models - ran), args.out, extra
            )
            record.write_text(json.dumps(results, indent=1))
            print(f"series {number}: {results[str(number)]}", file=sys.stderr, flush=True)
        number += 1
    failures = [r["failure"] for r in results.values() if r["failure"]]
    print(json.dumps({"models": ran, "failures": failures}, indent=1))
    return 1 if failures or ran < args.models else 0


if __name__ == "__main__":
    sys.exit(main())
