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
        RecipeError: there is no such recipe.
    """
    quantizer = QnnQuantizer(recipe)
    batches = _by_method(list(exported), calibration)
    prepared, before, written = {}, {}, []
    for name, ep in exported.items():
        module = ep.module()
        before[name] = mutated_buffers(module)
        prepared[name] = prepare_pt2e(module, quantizer)
        calibrate(prepared[name], batches[name], method=name, progress=progress)
        written += quantizer.written
    _agree(written)
    quantized = {}
    for name, module in prepared.items():
        quantized[name] = convert_pt2e(module)
        if lost := before[name] - mutated_buffers(quantized[name]):
            raise LoweringError(
                f"quantization lost the update of the mutable buffer {', '.join(sorted(lost))} of "
                f"method {name!r}; leave the module that owns it out with a QuantRecipe"
            )
    return quantized


def _agree(written: Iterable[tuple[str, Any]]) -> None:
    """Gives all that is written to a buffer one range, in all methods: it has one encoding."""
    by_buffer: dict[str, list[Any]] = {}
    for name, observer in written:
        if hasattr(observer, "min_val") and hasattr(observer, "max_val"):
            by_buffer.setdefault(name, []).append(observer)
    for observers in by_buffer.values():
        seen = [o for o in observers if o.min_val.numel() == 1]
        if not seen:
            continue
        low = torch.stack([o.min_val.reshape(()) for o in seen]).min()
        high = torch.stack([o.max_val.reshape(()) for o in seen]).max()
        for o in seen:
            o.min_val.copy_(low.reshape(o.min_val.shape))
            o.max_val.copy_(high.reshape(o.max_val.shape))


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
