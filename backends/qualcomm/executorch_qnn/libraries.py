# SPDX-License-Identifier: BSD-3-Clause
"""Where the QNN libraries are: the native search, told where the onnxruntime-qnn package is.

Imports no torch and loads no QNN library.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import NamedTuple

from .errors import LibraryNotFound


class Candidate(NamedTuple):
    """One folder that holds a QNN library, and the rule that found it.

    `how` is "argument", "QNN_SDK_ROOT", "package" or "system".
    """

    how: str
    folder: Path


def package_folder() -> Path | None:
    """The folder of the installed onnxruntime-qnn package, without importing it."""
    try:
        spec = importlib.util.find_spec("onnxruntime_qnn")
    except (ImportError, ValueError):
        return None
    for location in (spec.submodule_search_locations if spec else None) or ():
        return Path(location)
    return None


def candidates(path: str | os.PathLike[str] | None = None) -> list[Candidate]:
    """Every folder with a QNN library, best first; only `path` is looked at where one is given."""
    from . import _native

    found = _native.find_library(*_search(path))
    return [Candidate(how, Path(folder)) for how, folder in found]


def find(path: str | os.PathLike[str] | None = None) -> Path:
    """The folder to take the QNN libraries from.

    Args:
        path: a folder of libraries or the root of an SDK; None searches QNN_SDK_ROOT, the installed
            onnxruntime-qnn package and the system's library path, in this order.

    Raises:
        LibraryNotFound: nothing usable; the message lists the places and says how to get the
            libraries.
    """
    from . import _native

    try:
        _, folder = _native.locate_library(*_search(path))
    except _native.Error as error:
        raise LibraryNotFound(str(error)) from None
    return Path(folder)


def _search(path: str | os.PathLike[str] | None) -> tuple[str | None, list[str]]:
    package = package_folder()
    return None if path is None else os.fspath(path), [str(package)] if package else []
