# SPDX-License-Identifier: BSD-3-Clause
"""The delegate in this process: registered with ExecuTorch's runtime, told where QNN may be."""

from __future__ import annotations

import functools
import os

from . import _native
from .errors import DeviceError
from .libraries import package_folder

BACKEND_ID = "QnnDelegate"


@functools.cache
def ensure_registered() -> None:
    """Checks the registration, which loading the native module did; searches for QNN by default.

    Raises:
        DeviceError: ExecuTorch's runtime refused the backend.
    """
    error = _native.registration_error()
    if error != 0:
        raise DeviceError(
            f"ExecuTorch's runtime refused the backend {BACKEND_ID} (error {error}): "
            "is another library registered under this name?"
        )
    configure(None)


def configure(qnn_libraries: str | os.PathLike[str] | None) -> None:
    """Sets where delegates look for QNN when a load does not say; None searches."""
    folder = "" if qnn_libraries is None else os.fspath(qnn_libraries)
    _native.configure_delegate(folder, str(package_folder() or ""))
