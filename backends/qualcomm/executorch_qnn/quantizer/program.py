# SPDX-License-Identifier: BSD-3-Clause
"""From exported programs to quantized modules, for all methods of a program."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

from ..errors import LoweringError
from ..target import Target
from .batch_norm import fold_batch_norms
from .calibration import by_method, calibrate
from .encodings import Encodings, Place, Source, places_of
from .functional import mutated_buffers
from .quantizer import QnnQuantizer
from .recipe import QuantRecipe


def quantized_methods(
    exported: Mapping[str, torch.export.ExportedProgram],
    recipe: QuantRecipe | str,
    calibration: Any,
    target: Target | None = None,
    progress: bool | None = None,
    encodings: Source | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> tuple[dict[str, torch.fx.GraphModule], Encodings]:
    """Method to its quantized module: float ops between `quantize` and `dequantize`.

    Args:
        calibration: an iterable of input tuples; for several methods `{method: iterable}`.
        encodings: those of some or all values, as a file or document of AIMET's schema.
        cache: a folder for what calibration finds.

    Returns:
        The modules, and the encodings of all values.

    Raises:
        LoweringError: a method has no calibration data and needs some, the encodings do not fit, or
            a mutable buffer was lost on the way.
        RecipeError: there is no such recipe, or the target cannot run it.
    """
    quantizer = QnnQuantizer(recipe, target=target)
    modules = {name: ep.module() for name, ep in exported.items()}
    before = {name: mutated_buffers(module) for name, module in modules.items()}
    slots = _slots(modules, before)
    prepared, places = {}, []
    for name, module in modules.items():
        fold_batch_norms(module)
        quantizer.slots = slots[name]
        prepared[name] = prepare_pt2e(module, quantizer)
        method = name if len(modules) > 1 else ""
        places += places_of(prepared[name], quantizer.made, slots[name], method)
    missing = places
    if encodings is not None:
        missing = Encodings.read(encodings).give(places)
        if calibration is None:
            calibration = _without_data(exported, missing)
    if missing or encodings is None:
        batches = by_method(list(exported), calibration)
        calibrate(prepared, batches, progress=progress, cache=cache)
    quantized = {}
    for name, module in prepared.items():
        quantized[name] = convert_pt2e(module)
        if lost := before[name] - mutated_buffers(quantized[name]):
            raise LoweringError(
                f"quantization lost the update of the mutable buffer {', '.join(sorted(lost))} of "
                f"method {name!r}; leave the module that owns it out with a QuantRecipe"
            )
    return quantized, Encodings.of(places)


def _without_data(
    exported: Mapping[str, torch.export.ExportedProgram], missing: Sequence[Place]
) -> dict[str, list[Any]]:
    """Calls that only show constants to their observers.

    Raises:
        LoweringError: other values have no encoding.
    """
    if values := [p.name for p in missing if not p.constant]:
        few = f"{', '.join(values[:8])}{' and more' if len(values) > 8 else ''}"
        raise LoweringError(
            f"the encodings have none for {few}: ranges must be found with calibration="
        )
    return {name: [ep.example_inputs[0]] for name, ep in exported.items()}


class _Rewriter(QnnQuantizer):
    """Only the rewrites that come before annotation."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        return model


def rewritten_methods(
    exported: Mapping[str, torch.export.ExportedProgram],
    recipe: QuantRecipe | str,
    target: Target | None = None,
) -> dict[str, torch.fx.GraphModule]:
    """Method to its module of floats, whose nodes have the names of `quantized_methods`'s."""
    rewriter = _Rewriter(recipe, target=target)
    modules = {name: ep.module() for name, ep in exported.items()}
    for module in modules.values():
        fold_batch_norms(module)
    return {name: prepare_pt2e(module, rewriter) for name, module in modules.items()}


def _slots(
    modules: Mapping[str, torch.fx.GraphModule], written: Mapping[str, set[str]]
) -> dict[str, dict[str, str]]:
    """Method to its buffers that any method writes, and the slots that they are."""
    from ..aliasing.slots import identity

    slot_of_name: dict[str, str] = {}
    slot_of_tensor: dict[object, str] = {}
    members: dict[str, list[tuple[str, str]]] = {}
    for method, module in modules.items():
        for name, tensor in module.named_buffers(remove_duplicate=False):
            key = identity(tensor)
            slot = slot_of_name.get(name) or slot_of_tensor.get(key) or name
            slot_of_name.setdefault(name, slot)
            slot_of_tensor.setdefault(key, slot)
            members.setdefault(slot, []).append((method, name))
    slots: dict[str, dict[str, str]] = {method: {} for method in modules}
    for slot, names in members.items():
        if any(name in written[method] for method, name in names):
            for method, name in names:
                slots[method][name] = slot
    return slots
