# SPDX-License-Identifier: BSD-3-Clause
"""ATen ops by what becomes of their values, and of their weights.

The names are those of ops without namespace, overload, `_copy` and the underscore of in-place ops.
What is in none of the families computes: its results are other numbers than its operands.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

Node = torch.fx.Node

MOVES = frozenset(
    ("_adaptive_max_pool2d", "_reshape_alias", "_to", "_unsafe_view", "adaptive_max_pool1d",
     "adaptive_max_pool2d", "alias", "alpha_dropout", "amax", "amin", "as_strided",
     "broadcast_to", "channel_shuffle", "chunk", "clone", "constant_pad_nd", "contiguous", "detach",
     "diagonal", "dropout", "expand", "expand_as", "feature_dropout", "flatten", "flip", "fliplr",
     "flipud", "gather", "index", "index_select", "lift_fresh", "masked_select", "max_pool1d",
     "max_pool2d", "max_pool3d", "moveaxis", "movedim", "mT", "narrow", "native_channel_shuffle",
     "numpy_T", "pad", "permute", "pixel_shuffle", "pixel_unshuffle", "ravel", "reflection_pad1d",
     "reflection_pad2d", "reflection_pad3d", "repeat", "repeat_interleave", "replication_pad1d",
     "replication_pad2d", "replication_pad3d", "reshape", "reshape_as", "roll", "rot90", "select",
     "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "take",
     "take_along_dim", "tensor_split", "tile", "to", "transpose", "tril", "triu", "type_as",
     "unbind", "unflatten", "unfold", "unsafe_chunk", "unsafe_split", "unsafe_split_with_sizes",
     "unsqueeze", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "view",
     "view_as")
)  # fmt: skip
"""The results are elements of the first operand, and zeros."""

JOINS = frozenset(
    ("as_strided_scatter", "atleast_1d", "cat", "column_stack", "concat", "concatenate", "copy",
     "diagonal_scatter", "dstack", "hstack", "index_copy", "index_fill", "index_put",
     "masked_fill", "masked_scatter", "scatter", "select_scatter", "slice_scatter", "stack",
     "vstack", "where")
)  # fmt: skip
"""The results are elements of all operands that are floats."""

PICKS = frozenset(
    ("aminmax", "cummax", "cummin", "embedding", "fmax", "fmin", "kthvalue", "max",
     "max_pool2d_with_indices", "max_pool3d_with_indices", "median", "min", "mode", "msort",
     "nanmedian", "sort", "topk")
)  # fmt: skip
"""Like `MOVES`, but HTP may do them in fp16: the results are quantized, again, as the operand."""

ARITHMETIC = frozenset(
    ("_scaled_sum", "abs", "add", "addcdiv", "addcmul", "baddbmm", "addmm", "addbmm", "addmv",
     "addr", "clamp", "clamp_max", "clamp_min", "clip", "cumsum", "div", "divide", "fmod",
     "hardtanh", "index_add", "lerp", "max", "maximum", "min", "minimum", "mul", "multiply", "neg",
     "relu", "relu6", "remainder", "rsub", "scatter_add", "scatter_reduce", "sub", "subtract",
     "true_divide")
)  # fmt: skip
"""What sums, averages, decays and counters are made of, element by element."""

CLIPS = frozenset(("clamp", "clamp_max", "clamp_min", "clip", "hardtanh", "relu", "relu6"))
"""Activations that clip: what they read needs no range of its own."""

SOFTMAX = frozenset(("_log_softmax", "_safe_softmax", "_softmax", "log_softmax", "softmax"))

KNOWN = {
    "softmax": (0.0, 1.0), "_softmax": (0.0, 1.0), "_safe_softmax": (0.0, 1.0),
    "sigmoid": (0.0, 1.0), "hardsigmoid": (0.0, 1.0),
}  # fmt: skip
"""Ranges that results have on other data than was seen, too."""

FLOATS = frozenset(
    ("gru", "lstm", "lstm_cell", "gru_cell", "rnn_relu", "rnn_relu_cell", "rnn_tanh",
     "rnn_tanh_cell", "scaled_dot_product_attention")
)  # fmt: skip
"""Composite ops that are computed whole, in fp16."""

PLAIN_PARAMETERS = frozenset(
    ("batch_norm", "group_norm", "instance_norm", "native_batch_norm", "native_group_norm",
     "_native_batch_norm_legit_no_training", "_native_batch_norm_legit")
)  # fmt: skip
"""Ops whose constants stay floats: they become factors and summands."""

PRODUCTS = {"matmul": 1, "mm": 1, "bmm": 1, "addmm": 2, "baddbmm": 2, "addbmm": 2, "mv": 1}
"""Products, and the place of their second operand."""


def name_of(node: Node) -> str:
    """The name of a node's op as the families have it; empty if it is no op."""
    if node.op != "call_function":
        return ""
    if node.target is operator.getitem:
        return "getitem"
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", "")
    name = str(schema.name).partition("::")[2].rstrip("_")
    return name if name == "index_copy" else name.removesuffix("_copy")


def is_float(node: Any) -> bool:
    """Whether a node's value, or the first of its values, is a float that PT2E can quantize."""
    value = node.meta.get("val") if isinstance(node, Node) else None
    value = value[0] if isinstance(value, (list, tuple)) and value else value
    return isinstance(value, torch.Tensor) and value.dtype in (
        torch.float32,
        torch.float16,
        torch.bfloat16,
    )


def argument(node: Node, name: str, default: Any = None) -> Any:
    """An argument of an op, by its name in the schema."""
    schema = getattr(node.target, "_schema", None)
    for i, a in enumerate(schema.arguments if schema is not None else ()):
        if a.name == name:
            return node.args[i] if i < len(node.args) else node.kwargs.get(name, a.default_value)
    return default


@dataclass(frozen=True)
class Weight:
    """An operand of an op that is a weight.

    Attributes:
        place: among the arguments.
        axis: of its output channels.
        bias: place of the bias, which takes the scale of the sums that it is added to.
        wide: 8 bits at least: QNN has no 4-bit form.
    """

    place: int
    axis: int
    bias: int | None = None
    wide: bool = False


def weight_of(node: Node) -> Weight | None:
    """The weight that an op has; of a product, if it is a constant matrix."""
    name = name_of(node)
    if name == "linear":
        return Weight(1, 0, 2)
    if name in ("conv1d", "conv2d", "conv3d"):
        return Weight(1, 0, 2, wide=name == "conv3d")
    if name in ("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"):
        return Weight(1, 1, 2, wide=name == "conv_transpose3d")
    if name == "convolution":
        axes = len(node.meta["val"].shape) - 2
        return Weight(1, 1 if argument(node, "transposed") else 0, 2, wide=axes == 3)
    if name in PRODUCTS and _rank(node.args[PRODUCTS[name]]) == 2:
        return Weight(PRODUCTS[name], 1, 0 if name.startswith("add") else None)
    return None


def _rank(node: Any) -> int:
    return len(node.meta["val"].shape) if isinstance(node, Node) else 0


def axis_before(node: Node, axis: int) -> tuple[Node, int] | None:
    """The parameter that a weight is a permutation of, and where its axis is there."""
    while node.op != "get_attr":
        name, rank = name_of(node), _rank(node)
        if not node.args or not isinstance(node.args[0], Node):
            return None
        if name in ("t", "mT", "numpy_T") and rank == 2:
            axis = 1 - axis
        elif name in ("transpose", "swapaxes", "swapdims"):
            ends: Any = node.args[1:3]
            a, b = (d % rank for d in ends)
            axis = {a: b, b: a}.get(axis, axis)
        elif name == "permute":
            dims: Sequence[int] = node.args[1]  # type: ignore[assignment]
            axis = dims[axis] % rank
        elif name not in ("clone", "contiguous", "detach", "alias", "to"):
            return None
        node = node.args[0]
    return node, axis
