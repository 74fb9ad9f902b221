# SPDX-License-Identifier: BSD-3-Clause
"""From PyTorch modules to ExecuTorch programs with QNN delegates."""

from .lower import lower, to_edge_transform_and_lower
from .program import Program
from .sizes import Sizes

__all__ = ["Program", "Sizes", "lower", "to_edge_transform_and_lower"]
