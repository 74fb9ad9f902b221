# SPDX-License-Identifier: BSD-3-Clause
"""Runs `executorch.backends.test.suite` with flows of ours and of the in-tree backend.

    python -m tests.suite operators --flows executorch_qnn,qnn --out docs/suite_operators.md
    python -m tests.suite operators --flows executorch_qnn_8a8w,qnn_8a8w
    scripts/suite models --flows executorch_qnn -k static_shapes --out docs/suite_models.md

Each file of operators and each model runs in a process of its own, so that one that aborts takes no
other with it.  The models need torchvision, which `scripts/suite` installs beside the rest.
The in-tree flows (`qnn`, `qnn_8a8w`, ...) work with the libraries of onnxruntime-qnn 2.5.0 only,
which are downloaded for them.  Results are kept in `--folder`; what is there is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .report import document, read

ROOT = Path(__file__).resolve().parents[2]
PEER_RELEASE = "2.5.0"


def libraries_of(release: str) -> str:
    command = [sys.executable, str(ROOT / "scripts" / "qairt.py"), release]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


def sdk_of(libraries: Path, folder: Path) -> Path:
    """A folder laid out as the in-tree backend expects an SDK, with links to `libraries`."""
    link = folder / "lib" / "x86_64-linux-clang"
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to(libraries, target_is_directory=True)
    return folder


def environment(flow: str, libraries: str | None, folder: Path) -> dict[str, str]:
    """Variables for a process that runs `flow`."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = dict(os.environ, OMP_NUM_THREADS="1", PYTHONPATH=path)
    if flow == "qnn" or flow.startswith("qnn_"):
        peer = libraries_of(PEER_RELEASE)
        found["LD_LIBRARY_PATH"] = peer
        found["QNN_SDK_ROOT"] = str(sdk_of(Path(peer), folder / "sdk"))
    elif libraries is not None:
        found["QNN_SDK_ROOT"] = str(Path(libraries).resolve())
    return found


def suite_folder() -> Path:
    import executorch.backends.test.suite as suite

    return Path(next(iter(suite.__path__)))


def units(suite: str) -> dict[str, str]:
    """What runs in a process each, as pytest names it: the files of operators, the models."""
    if suite == "operators":
        paths = sorted((suite_folder() / suite).glob("test_*.py"))
        return {path.stem.removeprefix("test_"): str(path) for path in paths}
    path = suite_folder() / suite / "test_torchvision.py"
    names = re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    return {name: f"{path}::test_{name}" for name in names}


def run_unit(
    tests: str, flow: str, results: Path, variables: Mapping[str, str], pattern: str, limit: float
) -> None:
    """Runs some tests; `results` is there afterwards, whatever happened."""
    partial = results.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    suite = suite_folder()
    command = [sys.executable, "-W", "ignore", "-m", "pytest", "-q", "-p", "tests.suite.plugin"]
    command += ["-p", "no:cacheprovider", "-p", "no:randomly", "-c", os.devnull]
    command += ["--rootdir", str(suite), "--confcutdir", str(suite)]
    command += ["--flow", flow, "--results", str(partial), tests]
    command += ["-k", pattern] if pattern else []
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=limit
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as e:
        status, output = -1, f"ended after {limit:.0f} s\n{e.stdout!r}"
    results.with_suffix(".log").write_text(output)
    with partial.open("a") as file:
        end = {"kind": "end", "status": status, "seconds": time.monotonic() - start}
        file.write(json.dumps(end) + "\n")
    partial.rename(results)
    print(f"{flow}: {results.stem}, exit status {status}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", choices=["operators", "models"])
    parser.add_argument("--flows", default="executorch_qnn,qnn", help="comma separated")
    parser.add_argument("--files", default="", help="only these: add,avgpool1d or resnet50")
    parser.add_argument("-k", dest="pattern", default="", help="pytest's choice of tests")
    parser.add_argument("--folder", type=Path, default=ROOT / ".cache" / "suite")
    parser.add_argument("--fresh", action="store_true", help="run again what was run before")
    parser.add_argument("--out", type=Path, help="file for the report; default: print")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--limit-s", type=float, default=3600.0, help="for one process")
    parser.add_argument("--qnn-libraries", metavar="PATH", help="for our flows")
    args = parser.parse_args()
    flows = args.flows.split(",")
    some = set(filter(None, args.files.split(",")))
    known = units(args.suite)
    if some - known.keys():
        parser.error(f"the suite has no {', '.join(sorted(some - known.keys()))}")
    chosen = {name: tests for name, tests in known.items() if not some or name in some}
    jobs = []
    with ThreadPoolExecutor(args.jobs) as pool:
        for flow in flows:
            folder = args.folder / args.suite / flow
            folder.mkdir(parents=True, exist_ok=True)
            variables = environment(flow, args.qnn_libraries, args.folder)
            for name, tests in chosen.items():
                results = folder / f"test_{name}.jsonl"
                if args.fresh or not results.exists():
                    job = (tests, flow, results, variables, args.pattern, args.limit_s)
                    jobs.append(pool.submit(run_unit, *job))
    for job in jobs:
        job.result()
    names = [f"test_{name}" for name in chosen]
    found = {flow: read(args.folder / args.suite / flow, names) for flow in flows}
    page = document(args.suite, found)
    if args.out:
        args.out.write_text(page)
    else:
        print(page)
    return 0


if __name__ == "__main__":
    sys.exit(main())
