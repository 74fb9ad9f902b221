# SPDX-License-Identifier: BSD-3-Clause
"""Failures of the native half as the package's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .. import _native
from ..errors import DeviceError, IncompatiblePayload, LibraryNotFound, QnnError, StateError

_LOADING: dict[str, type[QnnError]] = {
    "library_not_found": LibraryNotFound,
    "incompatible": IncompatiblePayload,
    "invalid": IncompatiblePayload,
    "state": StateError,
    "qnn": DeviceError,
}
# What is invalid once a program is loaded are the arguments of a call.
_RUNNING = _LOADING | {"invalid": StateError}


@contextmanager
def loading() -> Iterator[None]:
    """Translates what fails while a program is loaded."""
    with _translated(_LOADING):
        yield


@contextmanager
def running() -> Iterator[None]:
    """Translates what fails while a loaded program is used."""
    with _translated(_RUNNING):
        yield


@contextmanager
def _translated(kinds: dict[str, type[QnnError]]) -> Iterator[None]:
    try:
        yield
    except _native.Error as error:
        raise kinds.get(error.kind, QnnError)(str(error)) from None
