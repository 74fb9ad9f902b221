# SPDX-License-Identifier: BSD-3-Clause
"""Running a program from Python: load, call, and reach into its state."""

from __future__ import annotations

from .session import Session, StateInfo, load

__all__ = ["Session", "StateInfo", "load"]
