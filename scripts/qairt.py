# SPDX-License-Identifier: BSD-3-Clause
"""`python scripts/qairt.py RELEASE`: the folder of an onnxruntime-qnn release's QNN libraries.

The wheel is downloaded with pip and unpacked under `.cache/qairt` once; nothing is installed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[1] / ".cache" / "qairt"


def folder_of(release: str) -> Path:
    """The folder with the libraries of onnxruntime-qnn `release`, for example 2.5.0."""
    unpacked = CACHE / release
    libraries = unpacked / "onnxruntime_qnn"
    if libraries.is_dir():
        return libraries
    CACHE.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:"]
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        subprocess.run(
            [*pip, "--dest", scratch, f"onnxruntime-qnn=={release}"], check=True, stdout=sys.stderr
        )
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(Path(scratch) / "unpacked")
        (Path(scratch) / "unpacked").rename(unpacked)  # complete, or not there
    return libraries


if __name__ == "__main__":
    print(folder_of(sys.argv[1]))
