# SPDX-License-Identifier: BSD-3-Clause
"""Tries the QNN libraries and the delegate in a process of its own, for `doctor`.

`python -m executorch_qnn.cli.probe FOLDER SOC_MODEL` prints one JSON object per line as it gets on,
so that a crash still tells what worked: {"library": ...}, {"device": ...}, {"delegate": ...}.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

from .output import standard_output

_STEPS = ("library", "device", "delegate")
_TIMEOUT_S = 120


def probe(folder: Path, soc_model: int) -> dict[str, dict[str, Any]]:
    """What became of each step in a child process: its facts, or {"error": text}."""
    command = [sys.executable, "-m", __name__, str(folder), str(soc_model)]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return {"library": {"error": f"no answer within {_TIMEOUT_S} s"}}
    facts: dict[str, dict[str, Any]] = {}
    for line in child.stdout.splitlines():
        facts.update(json.loads(line))
    missing = next((step for step in _STEPS if step not in facts), None)
    if child.returncode < 0 and missing:
        name = signal.Signals(-child.returncode).name
        facts[missing] = {"error": f"crashed with {name}"}
    elif child.returncode and missing:
        facts[missing] = {"error": (child.stderr.strip().splitlines() or ["failed"])[-1]}
    return facts


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "missing"


def _try_libraries(folder: str, soc_model: int, stdout: TextIO) -> None:
    from .. import _native

    try:
        library = _native.Library(folder)
    except _native.Error as error:
        _tell(stdout, "library", {"error": str(error)})
        return
    _tell(
        stdout,
        "library",
        {
            "folder": library.folder,
            "build_id": library.build_id,
            "provider": library.provider,
            "core_api": _dotted(library.core_api),
            "backend_api": _dotted(library.backend_api),
            "system_api": _dotted(library.system_api),
        },
    )
    try:
        _native.Backend(library, soc_model)
        _tell(stdout, "device", {"soc_model": soc_model})
    except _native.Error as error:
        _tell(stdout, "device", {"error": str(error)})


def _try_delegate(stdout: TextIO) -> None:
    try:
        from executorch.runtime import Runtime

        from ..runtime import register

        register()
        registered = Runtime.get().backend_registry.is_available("QnnDelegate")
    except Exception as error:
        _tell(stdout, "delegate", {"error": f"{type(error).__name__}: {error}"})
        return
    facts = {"id": "QnnDelegate"} if registered else {"error": "registered, but not to be seen"}
    _tell(stdout, "delegate", facts)


def _tell(stdout: TextIO, step: str, facts: dict[str, Any]) -> None:
    stdout.write(json.dumps({step: facts}) + "\n")
    stdout.flush()


if __name__ == "__main__":
    with standard_output() as results:
        _try_libraries(sys.argv[1], int(sys.argv[2]), results)
        _try_delegate(results)
