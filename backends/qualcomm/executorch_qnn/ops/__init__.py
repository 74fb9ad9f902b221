# SPDX-License-Identifier: BSD-3-Clause
"""The op table: ATen ops to QNN ops, by family."""

from .builder import Builder, Refused, Value
from .registry import TABLE, lower_node, lowers, table

__all__ = ["TABLE", "Builder", "Refused", "Value", "lower_node", "lowers", "table"]
