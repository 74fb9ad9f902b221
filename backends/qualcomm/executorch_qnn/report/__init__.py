# SPDX-License-Identifier: BSD-3-Clause
"""What became of a model: delegates, CPU ops, state, costs."""

from .report import DelegateReport, MethodReport, OpReport, Report, StateReport

__all__ = ["DelegateReport", "MethodReport", "OpReport", "Report", "StateReport"]
