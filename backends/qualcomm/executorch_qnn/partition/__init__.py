# SPDX-License-Identifier: BSD-3-Clause
"""What is delegated, what stays on the CPU and why, and who owns each mutable buffer."""

from .partitioner import CpuOp, Ownership, Plan, QnnPartitioner

__all__ = ["CpuOp", "Ownership", "Plan", "QnnPartitioner"]
