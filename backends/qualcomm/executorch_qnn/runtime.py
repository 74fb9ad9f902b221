# SPDX-License-Identifier: BSD-3-Clause
"""Importing this module makes programs of this backend loadable by `executorch.runtime.Runtime`."""

from __future__ import annotations

import os

from ._delegate import BACKEND_ID, configure, ensure_registered
from .errors import DeviceError


def register(qnn_libraries: str | os.PathLike[str] | None = None) -> None:
    """Makes the backend available to ExecuTorch's own runtime.  May be called again.

    Args:
        qnn_libraries: folder of the QNN libraries or root of an SDK for programs that are loaded
            from now on; None searches `QNN_SDK_ROOT`, the installed onnxruntime-qnn package and the
            system's library path.

    Raises:
        DeviceError: the backend does not appear in the runtime that Python uses.
    """
    from executorch.extension.pybindings import portable_lib

    ensure_registered()
    configure(qnn_libraries)
    if not portable_lib._is_available(BACKEND_ID):
        raise DeviceError(
            f"{BACKEND_ID} is registered with another copy of ExecuTorch's runtime than the one "
            "that Python uses: reinstall executorch and executorch-qnn into one environment"
        )


register()
