# SPDX-License-Identifier: BSD-3-Clause
"""Looks for random models that QNN gets wrong, and makes them small.

    python -m tests.state.search SERIES --models N --out FOLDER

runs one series in this process; `benchmarks/random_models.py` runs many.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, assume, given, seed, settings
from torch.export import exported_program

import executorch_qnn as qnn
from executorch_qnn import LoweringError
from executorch_qnn.compile.compiler import CompileWorker

from .random_models import models
from .replay import Invalid, replay

REFUSALS: tuple[tuple[str, str], ...] = ()
"""Texts of refusals that are no failures, and the reasons why nothing better is possible."""


@dataclass(frozen=True)
class Failure:
    """A model that fails, as small as it was made, and how it fails."""

    source: str
    error: Exception

    def __str__(self) -> str:
        kind = type(self.error).__name__
        return f"{self.source}\n\n# {kind}: " + str(self.error).replace("\n", "\n# ")


def search(
    count: int,
    number: int,
    *,
    shrink_s: float = 120.0,
    before: Callable[[str], None] = lambda source: None,
    run: Callable[..., Any] = replay,
    **options: Any,
) -> tuple[int, Failure | None]:
    """Runs up to `count` random models.

    Args:
        number: of the series of models; the same number gives the same series.
        shrink_s: how long a failing model is made smaller.
        before: called with each model before it runs.
        options: for `lower`.

    Returns:
        How many different models ran, and the failure, if there is one.
    """
    seen: dict[str, Exception | None] = {}
    first: float | None = None
    smallest: dict[type[Exception], str] = {}

    @seed(number)
    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
    )
    @given(models())
    def follows_eager(source: str) -> None:
        nonlocal first
        if source not in seen:
            if first is not None and time.monotonic() - first > shrink_s:
                return  # small enough
            before(source)
            seen[source] = _outcome(source, run, options)
        error = seen[source]
        if isinstance(error, Invalid):
            assume(False)
        if error is not None:
            first = time.monotonic() if first is None else first
            smallest[type(error)] = source
            raise error

    try:
        follows_eager()
    except Exception as e:
        if type(e) not in smallest:
            raise
        source = smallest[type(e)]
        error = e
        for shorter in _without_lines(source):
            if time.monotonic() - (first or 0.0) > 2 * shrink_s:
                break
            found = _outcome(shorter(source), run, options)
            if type(found) is type(e):
                source, error = shorter(source), found
        return len(seen), Failure(source, error)
    return sum(not isinstance(e, Invalid) for e in seen.values()), None


def _without_lines(source: str) -> Iterator[Callable[[str], str]]:
    """Ways to leave out one line after the other: statements first, then buffers."""
    lines = [line for line in source.splitlines(True) if line.startswith("        ")]
    for line in reversed(lines):
        if not line.strip().startswith(("return", "super")):
            yield lambda text, line=line: text.replace(line, "", 1)


def _outcome(source: str, run: Callable[..., Any], options: dict[str, Any]) -> Exception | None:
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(source, Path(folder), **options)
        except LoweringError as e:
            return None if any(text in str(e) for text, _ in REFUSALS) else e
        except Exception as e:
            return e
    return None


def main() -> None:
    """Runs one series; prints one line of JSON, and writes a failure to a file."""
    parser = argparse.ArgumentParser(description="Runs one series of random models.")
    parser.add_argument("series", type=int)
    parser.add_argument("--models", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shrink-s", type=float, default=120.0)
    parser.add_argument("--qnn-libraries")
    args = parser.parse_args()
    with _fast_lowering(args.qnn_libraries):
        _run_series(args)


@contextlib.contextmanager
def _fast_lowering(qnn_libraries: str | None) -> Iterator[None]:
    """Half of the time for a small model goes into what is the same for each."""
    # torch collects thousands of ops anew for each retrace.
    exported_program._collect_all_valid_cia_ops = functools.cache(
        exported_program._collect_all_valid_cia_ops
    )
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    lowering = sys.modules[qnn.lower.__module__]
    with CompileWorker(qnn.Target("SM8650"), qnn_libraries) as worker:
        lowering.CompileWorker = lambda *_: contextlib.nullcontext(worker)  # type: ignore[attr-defined]
        yield


def _run_series(args: argparse.Namespace) -> None:
    running = args.out / f"series-{args.series}-running.py"
    models, failure = search(
        args.models,
        args.series,
        shrink_s=args.shrink_s,
        before=running.write_text,  # what is left of a crash
        qnn_libraries=args.qnn_libraries,
    )
    running.unlink(missing_ok=True)
    file = None
    if failure is not None:
        file = args.out / f"series-{args.series}.py"
        file.write_text(f"{failure}\n")
    print(json.dumps({"models": models, "failure": file and str(file)}))


if __name__ == "__main__":
    main()
