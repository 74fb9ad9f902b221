# SPDX-License-Identifier: BSD-3-Clause
"""PEP 517 build backend: scikit-build-core, told where ExecuTorch's headers and library are.

The native build needs `include/`, `lib/libexecutorch.so` and the CMake package that ExecuTorch's
wheel ships, and none of that wheel's dependencies. Naming executorch in `build-system.requires`
would install all of them into every isolated build, so the wheel's folder is looked for instead, in
this order:

1. `EXECUTORCH_ROOT`, for cross builds and unpacked wheels;
2. the importable `executorch` package (`pip install --no-build-isolation`);
3. site-packages of the environment that pip installs into, which an isolated build can still see;
4. a download of that one wheel, without dependencies, kept in the user's cache folder.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scikit_build_core import build as _scikit_build

EXECUTORCH_VERSION = "1.5.1"
_CMAKE_PACKAGE = Path("lib", "cmake", "executorch")

Settings = dict[str, Any] | None


def _has_cmake_package(folder: Path) -> bool:
    return (folder / _CMAKE_PACKAGE / "executorch-config.cmake").is_file()


def _is_pinned(folder: Path) -> bool:
    installed = folder.parent.glob(f"executorch-{EXECUTORCH_VERSION}*.dist-info")
    return _has_cmake_package(folder) and any(installed)


def _installed() -> Iterator[Path]:
    """Folders where an installed ExecuTorch may be."""
    spec = importlib.util.find_spec("executorch")
    for location in (spec.submodule_search_locations if spec else None) or ():
        yield Path(location)
    for scheme_key in ("platlib", "purelib"):
        yield Path(sysconfig.get_path(scheme_key), "executorch")


def _downloaded() -> Path:
    """The unpacked ExecuTorch wheel in the cache, fetched first if it is not there yet."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    tag = f"{EXECUTORCH_VERSION}-{sys.implementation.cache_tag}-{sysconfig.get_platform()}"
    cache = caches / "executorch-qnn" / f"executorch-{tag}"
    if not _has_cmake_package(cache / "executorch"):
        print(f"-- downloading executorch {EXECUTORCH_VERSION} into {cache}", flush=True)
        cache.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as scratch:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
            options = ["--only-binary=:all:", "--dest", scratch]
            subprocess.check_call([*pip, *options, f"executorch=={EXECUTORCH_VERSION}"])
            (wheel,) = Path(scratch).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked := Path(scratch, "unpacked"))
            # In one step, so that an interrupted download leaves nothing half done.
            shutil.rmtree(cache, ignore_errors=True)
            unpacked.rename(cache)
    return cache / "executorch"


def find_executorch() -> Path:
    """The `executorch` package folder to build against."""
    if root := os.environ.get("EXECUTORCH_ROOT"):
        if not _has_cmake_package(Path(root)):
            raise SystemExit(f"EXECUTORCH_ROOT={root} holds no {_CMAKE_PACKAGE}")
        return Path(root)
    return next((folder for folder in _installed() if _is_pinned(folder)), None) or _downloaded()


def _with_executorch(settings: Settings) -> dict[str, Any]:
    executorch_dir = str(find_executorch() / _CMAKE_PACKAGE)
    return {"cmake.define.executorch_DIR": executorch_dir, **(settings or {})}


def build_wheel(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    settings = _with_executorch(config_settings)
    return _scikit_build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    settings = _with_executorch(config_settings)
    return _scikit_build.build_editable(wheel_directory, settings, metadata_directory)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_wheel(config_settings), "pip"]


def get_requires_for_build_editable(config_settings: Settings = None) -> list[str]:
    return [*_scikit_build.get_requires_for_build_editable(config_settings), "pip"]


build_sdist = _scikit_build.build_sdist
get_requires_for_build_sdist = _scikit_build.get_requires_for_build_sdist
prepare_metadata_for_build_wheel = _scikit_build.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = _scikit_build.prepare_metadata_for_build_editable
