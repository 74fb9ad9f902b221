# SPDX-License-Identifier: BSD-3-Clause
"""Why an op that has no row in the op table runs on the CPU, and what to do about it.

The one place for these reasons: the report of a lowering and docs/op_coverage.md quote them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload

aten = torch.ops.aten

UNWRITTEN = "it is not in the op table; docs/adding_an_op.md shows how it gets there"

_SIZE = "it asks for a size that is not fixed, and QNN graphs are static; export with fixed sizes"
_TRAINING = "it is a step of training, and QNN only infers; lower the model in eval mode"
_STATISTICS = (
    "it normalises by the statistics of the batch, which is training; lower the model in eval mode"
)
_COMPLEX = (
    "HTP has no complex numbers; write the transform as products with matrices of sines and cosines"
)

_BY_OP: dict[Any, str] = {
    aten.sym_size.int: _SIZE,
    aten.sym_stride.int: _SIZE,
    aten.sym_numel.default: _SIZE,
    aten.sym_storage_offset.default: _SIZE,
    aten.sym_is_contiguous.default: _SIZE,
    aten._native_batch_norm_legit.default: _STATISTICS,
    aten._native_batch_norm_legit.no_stats: _STATISTICS,
    aten._fft_r2c.default: _COMPLEX,
    aten._fft_c2r.default: _COMPLEX,
    aten._fft_c2c.default: _COMPLEX,
    aten.as_strided.default: "it reads memory by address; write it with slices, unfold or permute",
    aten.resize_.default: "it changes the size of its argument; make a new tensor instead",
}
_BY_TAG = {
    torch.Tag.dynamic_output_shape: "the shape of its result depends on values, and QNN graphs are "
    "static; keep the shape and use a mask, as in torch.where(mask, x, 0)",
    torch.Tag.data_dependent_output: "it takes a number out of a tensor for the program to see; "
    "keep it a tensor, and choose with torch.where",
    torch.Tag.nondeterministic_seeded: "HTP has no random numbers; pass them as an input",
}


def why_on_cpu(target: Any) -> str:
    """Why a call of `target`, which has no row in the op table, runs on the CPU, and a way out."""
    if isinstance(target, HigherOrderOperator):
        return (
            "QNN graphs have no control flow; use torch.where for a choice, and write out a loop "
            "whose length is fixed"
        )
    if not isinstance(target, OpOverload):  # arithmetic of sizes
        return _SIZE
    if target in _BY_OP:
        return _BY_OP[target]
    for tag, why in _BY_TAG.items():
        if tag in target.tags:
            return why
    if target.namespace != "aten":
        return "it is a custom op, of which QNN knows nothing; write it with PyTorch's own"
    name = target._schema.name
    return _TRAINING if name.endswith("_backward") else UNWRITTEN
