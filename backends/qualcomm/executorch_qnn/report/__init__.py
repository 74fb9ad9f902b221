# SPDX-License-Identifier: BSD-3-Clause
"""What became of a model: delegates, CPU ops, state, costs."""

from .report import CpuOpReport, DelegateReport, MethodReport, Report, StateReport

__all__ = ["CpuOpReport", "DelegateReport", "MethodReport", "Report", "StateReport"]
