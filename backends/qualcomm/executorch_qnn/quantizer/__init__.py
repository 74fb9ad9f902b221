# SPDX-License-Identifier: BSD-3-Clause
"""Quantization with torchao's PT2E flow: recipes, annotation, calibration."""

from .batch_norm import fold_batch_norms
from .calibration import calibrate
from .program import quantized_methods
from .quantizer import QnnQuantizer
from .recipe import RECIPES, QuantRecipe

__all__ = [
    "RECIPES",
    "QnnQuantizer",
    "QuantRecipe",
    "calibrate",
    "fold_batch_norms",
    "quantized_methods",
]
