# SPDX-License-Identifier: BSD-3-Clause
"""Errors that executorch-qnn raises: each names the node or file, the cause and a way out."""

from __future__ import annotations

from collections.abc import Sequence


class QnnError(Exception):
    """Base of every error that this package raises on purpose."""


class UnsupportedOp(QnnError):
    """Ops cannot run on the NPU and the caller asked for no CPU fallback.

    Attributes:
        nodes: each as `{"method", "node", "op", "reason", "source"}`.
    """

    def __init__(self, message: str, nodes: Sequence[dict[str, str]] = ()) -> None:
        super().__init__(message)
        self.nodes = list(nodes)


class LoweringError(QnnError):
    """A model could not be exported, partitioned or compiled."""


class RecipeError(LoweringError, ValueError):
    """A quantization recipe, or a part of one, that there is not."""


class LibraryNotFound(QnnError):
    """No usable QNN library was found; the message says where was looked and how to get one."""


class IncompatiblePayload(QnnError):
    """A program was made for another target, another model or a newer format, or it is damaged."""


class StateError(QnnError):
    """A mutable buffer or a call's inputs do not match what the program declares."""


class DeviceError(QnnError):
    """A device, its transport or the QNN runtime on it failed."""
