# SPDX-License-Identifier: BSD-3-Clause
"""executorch-qnn: an ExecuTorch backend for Qualcomm's NPU, with mutable buffers in place.

Importing this package imports neither torch nor a QNN library: every public name is loaded when it
is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .errors import (
        DeviceError,
        IncompatiblePayload,
        LibraryNotFound,
        LoweringError,
        QnnError,
        RecipeError,
        StateError,
        UnsupportedOp,
    )

_EXPORTS = {
    "QnnError": "errors",
    "UnsupportedOp": "errors",
    "LoweringError": "errors",
    "RecipeError": "errors",
    "LibraryNotFound": "errors",
    "IncompatiblePayload": "errors",
    "StateError": "errors",
    "DeviceError": "errors",
    "Target": "target",
    "targets": "target",
    "lower": "lowering",
    "Program": "lowering",
    "Sizes": "lowering",
    "to_edge_transform_and_lower": "lowering",
    "QnnPartitioner": "partition",
    "QnnQuantizer": "quantizer",
    "QuantRecipe": "quantizer",
    "calibrate": "quantizer",
    "AliasAwareMemoryPlanning": "aliasing.planning",
    "load": "session",
    "Session": "session",
    "StateInfo": "session",
    "compare": "report.compare",
    "register": "runtime",
}

__all__ = list(_EXPORTS)


def __getattr__(name: str) -> Any:
    try:
        module = _EXPORTS[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    value = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
