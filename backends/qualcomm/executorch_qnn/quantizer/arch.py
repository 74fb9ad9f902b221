# SPDX-License-Identifier: BSD-3-Clause
"""What each HTP architecture computes in integers."""

from __future__ import annotations

import torch

from ..target import Target
from .recipe import Bits


def refused(target: Target, node: torch.fx.Node, bits: Bits) -> str | None:
    """Why a target does not compute a node with so many bits; None if it does."""
    return None
