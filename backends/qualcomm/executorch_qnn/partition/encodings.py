# SPDX-License-Identifier: BSD-3-Clause
"""How state is stored in a quantized program.

A buffer is stored quantized if everything that is ever written to it was quantized in one encoding
and then only moved: rows of a cache, a window of samples.  What is kept then never changes by a
bit, and what is written is what the quantized model writes.  A buffer that takes part in arithmetic
(counters, sums, averages) stays what it was: a float.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.export import ExportedProgram

from ..aliasing.updates import updates
from ..compile.ir import QuantType
from ..ops.quantized import is_dequantize, is_quantize, type_of
from ..ops.registry import aten_op, is_getitem

_MOVES = frozenset(
    ("alias", "as_strided", "cat", "chunk", "clone", "constant_pad_nd", "detach", "diagonal",
     "diagonal_scatter", "expand", "flip", "gather", "index", "index_copy", "index_put",
     "index_select", "masked_fill", "movedim", "narrow", "permute", "repeat", "reshape", "roll",
     "scatter", "select", "select_scatter", "slice", "slice_scatter", "split", "split_with_sizes",
     "squeeze", "stack", "t", "transpose", "unbind", "unsqueeze", "unsafe_split", "view", "where")
)  # fmt: skip
"""ATen ops that put out elements of their operands."""


def slot_types(
    programs: Mapping[str, ExportedProgram], slots: Mapping[str, Mapping[str, str]]
) -> dict[str, QuantType]:
    """Slot to its type, for all slots that are stored quantized in all methods.

    Args:
        programs: method to functional program.
        slots: method to its state buffers and their slots.
    """
    found: dict[str, set[QuantType | None]] = {}
    for method, ep in programs.items():
        for u in updates(ep, slots[method]):
            if u.new is not None:
                found.setdefault(slots[method][u.fqn], set()).update(_written(u.new, u.old))
    agreed = {}
    for slot, kinds in found.items():
        if len(kinds) == 1 and (kind := kinds.pop()) is not None:
            agreed[slot] = kind
    return agreed


def _written(new: torch.fx.Node, old: torch.fx.Node) -> set[QuantType | None]:
    """The types of all values of which `new` is put together; None for an unquantized one."""
    found: set[QuantType | None] = set()
    pending, seen = [new], set()
    while pending:
        node = pending.pop()
        if node in seen or node is old:
            continue
        seen.add(node)
        if is_dequantize(node):
            found.add(type_of(node))
        elif node.op == "call_function" and _moves(node):
            pending += [n for n in node.all_input_nodes if _is_float(n)]
        else:
            found.add(None)
    return found


def _moves(node: torch.fx.Node) -> bool:
    op = aten_op(node.target)
    if op is None:
        return is_getitem(node)
    name = op._schema.name.partition("::")[2].removesuffix("_copy").removesuffix("_dim_order")
    if name == "index_put" and (
        node.kwargs.get("accumulate") or (len(node.args) > 3 and node.args[3])
    ):
        return False
    return name.removeprefix("_") in _MOVES and not is_quantize(node)


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, torch.Tensor) and v.is_floating_point() for v in values)
