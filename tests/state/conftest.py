# SPDX-License-Identifier: BSD-3-Clause
"""What these tests run on the CPU."""

from cpu_ops import cosh_and_asinh_stay_on_the_cpu

__all__ = ["cosh_and_asinh_stay_on_the_cpu"]
