# SPDX-License-Identifier: BSD-3-Clause
"""Rewrites before annotation: attention as the products that it is, masks of finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Container
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx.node import map_arg

from .families import JOINS, MOVES, SOFTMAX, is_float, name_of

aten = torch.ops.aten
Node = torch.fx.Node

MASKED = {8: -100.0, 16: -1000.0}
"""What stands for minus infinity, by bits of activations: nothing is left of it in a softmax."""
_HUGE = -1e4
"""Numbers from here on are meant to be minus infinity."""
RAW = "qnn_raw"
"""Metadata key: a node whose operand is not to be quantized."""


class Writer:
    """Puts new nodes before another, with its metadata."""

    def __init__(self, at: Node) -> None:
        self.at = at
        value = at.meta.get("val")
        self.fake = detect_fake_mode([value[0] if isinstance(value, (list, tuple)) else value])

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        with self.at.graph.inserting_before(self.at):
            node = self.at.graph.call_function(target, args, kwargs)
        node.meta = {k: v for k, v in self.at.meta.items() if k not in ("val", "tensor_meta")}
        values = map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
        with torch.no_grad(), self.fake or nullcontext():
            node.meta["val"] = target(*values[0], **values[1])
        return node


def open_attention(module: torch.fx.GraphModule, wanted: Callable[[Node], bool]) -> None:
    """Writes attention as products and a softmax, which are quantized one by one.

    Args:
        wanted: whether a node is to be opened.
    """
    for node in module.graph.find_nodes(
        op="call_function", target=aten.scaled_dot_product_attention.default
    ):
        if wanted(node):
            node.replace_all_uses_with(_attention(Writer(node), *node.args, **node.kwargs))
            module.graph.erase_node(node)
    module.recompile()


def _attention(
    w: Writer,
    q: Node,
    k: Node,
    v: Node,
    attn_mask: Node | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Node:
    *_, length, width = q.meta["val"].shape
    if enable_gqa:
        k, v = (_repeated(w, n, q.meta["val"].shape[-3]) for n in (k, v))
    q = w(aten.mul.Tensor, q, 1 / math.sqrt(width) if scale is None else scale)
    scores = w(aten.matmul.default, q, w(aten.transpose.int, k, -2, -1))
    if is_causal:
        size = [length, k.meta["val"].shape[-2]]
        device = scores.meta["val"].device
        ones = w(aten.full.default, size, True, dtype=torch.bool, device=device)
        attn_mask = w(aten.tril.default, ones)
    if attn_mask is not None and attn_mask.meta["val"].dtype is torch.bool:
        scores = w(aten.where.ScalarOther, attn_mask, scores, -math.inf)
    elif attn_mask is not None:
        scores = w(aten.add.Tensor, scores, attn_mask)
    shares = w(aten.softmax.int, scores, -1)
    if dropout_p:
        shares = w(aten.dropout.default, shares, dropout_p, True)
    return w(aten.matmul.default, shares, v)


def _repeated(w: Writer, x: Node, heads: int) -> Node:
    """Each head of keys or values once for each of the queries' heads that share it."""
    *batch, own, length, width = x.meta["val"].shape
    if own == heads:
        return x
    x = w(aten.unsqueeze.default, x, -3)
    x = w(aten.expand.default, x, [*batch, own, heads // own, length, width])
    return w(aten.reshape.default, x, [*batch, heads, length, width])


def finite_masks(module: torch.fx.GraphModule, bits: Callable[[Node], int | None]) -> None:
    """Has masks add a finite number, `MASKED`, where they add minus infinity before a softmax.

    Observers would give all their steps to a range that ends in infinity.  Constants are changed;
    masks that are inputs of the model are clamped.

    Args:
        bits: of a softmax's activations; None if it is not quantized.
    """
    floor: dict[Node, float] = {}
    for node in module.graph.nodes:
        if name_of(node) in SOFTMAX and (n := bits(node)) is not None:
            _before(node, MASKED[n], floor)
    for node, low in floor.items():
        if node.op == "get_attr":
            _clamped_constant(module, node, low, floor)
        elif node.op == "call_function":
            node.args, node.kwargs = _finite((node.args, node.kwargs), low)
    for node, low in floor.items():
        users = [u for u in node.users if u in floor]
        added = any(name_of(u) in ("add", "sub") and len(u.all_input_nodes) > 1 for u in users)
        if node.op == "placeholder" and added and len(users) == len(node.users):
            first = next(n for n in module.graph.nodes if n.op not in ("placeholder", "get_attr"))
            write = Writer(first)
            write.fake = detect_fake_mode([node.meta["val"]])
            clamped = write(aten.clamp.default, node, low)
            clamped.meta[RAW] = True
            for user in users:
                user.replace_input_with(node, clamped)
    module.graph.eliminate_dead_code()
    module.recompile()


_FLOWS = (
    MOVES | JOINS | {"add", "sub", "mul", "maximum", "minimum", "full", "full_like", "new_full"}
)


def _before(softmax: Node, low: float, found: dict[Node, float]) -> None:
    """The nodes that a mask comes from on its way to a softmax."""
    pending = [softmax.args[0]]
    while pending:
        node = pending.pop()
        if not isinstance(node, Node) or node in found or not is_float(node):
            continue
        if node.op in ("get_attr", "placeholder") or name_of(node) in _FLOWS | {"scalar_tensor"}:
            found[node] = low
            pending += node.all_input_nodes


def _finite(args: Any, low: float) -> Any:
    """Arguments with numbers that are meant to be minus infinity replaced."""
    if isinstance(args, (list, tuple)):
        return type(args)(_finite(a, low) for a in args)
    if isinstance(args, dict):
        return {k: _finite(v, low) for k, v in args.items()}
    return low if isinstance(args, float) and args <= _HUGE else args


def _clamped_constant(
    module: torch.fx.GraphModule, node: Node, low: float, readers: Container[Node]
) -> None:
    from .functional import attribute

    value = attribute(module, str(node.target))
    written = any(name_of(u) == "copy" and u.args[0] is node for u in node.users)
    if not isinstance(value, torch.Tensor) or written or not bool((value <= _HUGE).any()):
        return
    name = f"{str(node.target).replace('.', '_')}_finite"
    module.register_buffer(name, value.detach().clamp(min=low), persistent=False)
    with module.graph.inserting_before(node):
        finite = module.graph.get_attr(name)
    finite.meta = dict(node.meta)
    node.replace_all_uses_with(finite, lambda u: u in readers or name_of(u) in SOFTMAX)
