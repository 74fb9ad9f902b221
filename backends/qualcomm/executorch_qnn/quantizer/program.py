# SPDX-License-Identifier: BSD-3-Clause
"""From modules to quantized modules, for all methods of a program."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from ..errors import LoweringError
from .calibration import calibrate
from .functional import mutated_buffers
from .quantizer import QnnQuantizer
from .recipe import QuantRecipe


def quantized_methods(
    exported: Mapping[str, torch.export.ExportedProgram],
    recipe: QuantRecipe | str,
    calibration: Any,
    progress: bool = False,
) -> dict[str, torch.fx.GraphModule]:
    """Method to its quantized module: float ops between `quantize` and `dequantize`.

    Args:
        calibration: an iterable of input tuples; for several methods `{method: iterable}`.

    Raises:
        LoweringError: a method has no calibration data, or lost a mutable buffer on the way.
        ValueError: there is no such recipe.
    """
    quantizer = QnnQuantizer(recipe)
    batches = _by_method(list(exported), calibration)
    quantized = {}
    for name, ep in exported.items():
        module = ep.module()
        before = mutated_buffers(module)
        prepared = prepare_pt2e(module, quantizer)
        calibrate(prepared, batches[name], method=name, progress=progress)
        quantized[name] = convert_pt2e(prepared)
        if lost := before - mutated_buffers(quantized[name]):
            raise LoweringError(
                f"quantization lost the update of the mutable buffer {', '.join(sorted(lost))} of "
                f"method {name!r}; leave the module that owns it out with a QuantRecipe"
            )
    return quantized


def _by_method(methods: list[str], calibration: Any) -> Mapping[str, Iterable[Any]]:
    if calibration is None:
        raise LoweringError(
            "quantize= needs calibration=: an iterable of input tuples, or {method: iterable}"
        )
    if not isinstance(calibration, Mapping):
        if len(methods) > 1:
            raise LoweringError(
                f"each of the methods {', '.join(methods)} needs calibration data of its own: "
                "calibration={method: iterable of input tuples}"
            )
        return {methods[0]: calibration}
    if missing := [m for m in methods if m not in calibration]:
        raise LoweringError(f"there is no calibration data for method {', '.join(missing)}")
    return calibration
