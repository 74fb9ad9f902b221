# SPDX-License-Identifier: BSD-3-Clause
"""What is delegated, what stays on the CPU and why, and who owns each mutable buffer."""

from .listed import ListedOp
from .ownership import Ownership
from .partitioner import Plan, QnnPartitioner

__all__ = ["ListedOp", "Ownership", "Plan", "QnnPartitioner"]
