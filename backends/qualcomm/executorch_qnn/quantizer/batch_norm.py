# SPDX-License-Identifier: BSD-3-Clause
"""Batch norms in the weights of the layer before: at once, or while they are trained.

torchao has passes of its own for both.  They also fold into a layer that others read, too, or that
two norms share the weights of, without a word; they fail on grouped transposed convolutions, and
their training form has one epsilon for all.  Here they are left nothing to do.

The training form is that of `torch.ao.nn.intrinsic.qat.ConvBn2d` (Jacob et al., 2017,
arXiv 1712.05877, section 3.2): the layer computes with weights that the running statistics have
scaled, which is what is quantized in the end; its result is scaled back, and normalized with the
statistics of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.node import map_arg

from .families import Weight, argument, name_of, weight_of
from .functional import attribute
from .transforms import RAW, Writer

aten = torch.ops.aten
Node = torch.fx.Node

STEP = "qnn_step"
"""Metadata key: a node whose result is only a step to another's, and not quantized."""
ORIGIN = "qnn_origin"
"""Metadata key: the name of the parameter that a folded weight is made of."""
_SCALED = "qnn_scaled"
_EPS = 1e-5  # the one that torchao's `model.train()` and `model.eval()` put in


def fold_batch_norms(module: torch.fx.GraphModule) -> None:
    """Puts the batch norms of a module in eval mode into the weights of the layers before them."""
    open_batch_norms(module)
    for node in list(module.graph.nodes):
        fold(module, node)
    module.recompile()


def open_batch_norms(
    module: torch.fx.GraphModule, wanted: Callable[[Node], bool] = lambda _: True
) -> None:
    """Writes layers with a batch norm in the training form; see above.

    Args:
        wanted: whether a node is quantized; others stay as they are.
    """
    for node in list(module.graph.find_nodes(op="call_function", target=aten.add_.Tensor)):
        if "num_batches_tracked" in str(node.args[0]) and not node.users:
            module.graph.erase_node(node)  # only a momentum of None reads it
    for norm in module.graph.find_nodes(op="call_function", target=aten.batch_norm.default):
        layer = norm.args[0]
        weight = _weight(layer)
        if weight is None:
            continue
        alone = len(layer.users) == 1 and norm.args[3] is not None
        if alone and wanted(layer) and wanted(norm):
            _open(module, layer, norm, weight)
        else:  # torchao looks at what a norm reads
            norm.replace_input_with(layer, Writer(norm)(aten.alias.default, layer))
    module.recompile()


def _weight(layer: Any) -> Weight | None:
    """The weight of a convolution or of a matrix product of rows."""
    if not isinstance(layer, Node) or not name_of(layer).startswith(("conv", "linear")):
        return None
    rows = len(layer.meta["val"].shape) == 2
    return weight_of(layer) if rows or name_of(layer) != "linear" else None


def _open(module: torch.fx.GraphModule, layer: Node, norm: Node, place: Weight) -> None:
    write = Writer(layer)
    x, weight, bias, *rest = (*layer.args, None)[: max(3, len(layer.args))]
    _, gain, _, _, variance, *_, eps, _ = norm.args
    # A norm of another epsilon is one of this epsilon and of values that are `k` times as great.
    k = math.sqrt(_EPS / eps)  # type: ignore[arg-type,operator]
    if k != 1:
        for place_, power in ((3, 1), (4, 2)):
            _scale(module, norm, place_, k**power)
        variance = norm.args[4]
        norm.update_arg(7, _EPS)
    factor = write(aten.rsqrt.default, write(aten.add.Tensor, variance, _EPS))
    if gain is not None:
        factor = write(aten.mul.Tensor, factor, gain)
    channels = factor if k == 1 else write(aten.mul.Tensor, factor, k)
    shape = weight.meta["val"].shape  # type: ignore[union-attr]
    if place.axis == 0:
        channels = write(aten.reshape.default, channels, [-1, *[1] * (len(shape) - 1)])
    else:  # inputs of all groups, outputs of one
        groups = argument(layer, "groups", 1)
        inside, outside = shape[0] // groups, shape[1]
        channels = write(aten.reshape.default, channels, [groups, 1, outside])
        channels = write(aten.expand.default, channels, [groups, inside, outside])
        channels = write(aten.reshape.default, channels, [*shape[:2], *[1] * (len(shape) - 2)])
    scaled = write(aten.mul.Tensor, weight, channels)
    scaled.meta[_SCALED] = True
    layer.args = (x, scaled, None, *rest)

    write = Writer(norm)
    line = [1, -1, *[1] * (len(layer.meta["val"].shape) - 2)]
    y = write(aten.div.Tensor, layer, write(aten.reshape.default, factor, line))
    layer.meta[STEP] = y.meta[STEP] = y.meta[RAW] = True
    if bias is not None:
        plain = bias if k == 1 else write(aten.mul.Tensor, bias, k)
        y = write(aten.add.Tensor, y, write(aten.reshape.default, plain, line))
        y.meta[STEP] = y.meta[RAW] = True
    norm.replace_input_with(layer, y)
    norm.meta["nn_module_stack"] = layer.meta.get("nn_module_stack", {})


def _scale(module: torch.fx.GraphModule, norm: Node, place: int, factor: float) -> None:
    """Has a norm use a statistic of its own, times a factor."""
    old: Any = norm.args[place]
    name = f"{norm.name}_{str(old.target).rpartition('.')[2]}"
    module.register_buffer(name, attribute(module, old.target).detach() * factor)
    with module.graph.inserting_before(old):
        new = module.graph.get_attr(name)
    new.meta = dict(old.meta)
    norm.update_arg(place, new)


def fold(module: torch.fx.GraphModule, scaled: Node) -> None:
    """Closes the training form again, if `scaled` is the weight of one, to a layer with a bias."""
    if not scaled.meta.pop(_SCALED, False):
        return
    layer = _reader(scaled)
    if layer.op == "call_module":  # a fake-quantizer
        layer = _reader(layer)
    divided = _reader(layer)
    norm, summand = _reader(divided), None
    if name_of(norm) == "add":
        norm, summand = _reader(norm), norm.args[1]
    _, _, shift, mean, *_ = norm.args
    with torch.no_grad():
        factor = value_of(module, divided.args[1]).flatten()
        bias = -value_of(module, mean) * factor
        if summand is not None:
            bias = bias + value_of(module, summand).flatten() * factor
        if shift is not None:
            bias = bias + value_of(module, shift)
        weight = value_of(module, scaled).contiguous()
    norm.replace_all_uses_with(layer)
    layer.meta.pop(STEP, None)
    layer.update_arg(2, _parameter(module, f"{layer.name}_folded_bias", bias, mean))
    folded = _parameter(module, f"{layer.name}_folded_weight", weight, scaled)
    if scaled.args[0].op == "get_attr":  # type: ignore[union-attr]
        folded.meta[ORIGIN] = str(scaled.args[0].target)  # type: ignore[union-attr]
    scaled.replace_all_uses_with(folded)
    unused = [norm, scaled]
    while unused:
        node = unused.pop()
        if node._erased or node.users:
            continue
        unused += node.all_input_nodes
        module.graph.erase_node(node)


def _parameter(module: torch.fx.GraphModule, name: str, value: torch.Tensor, like: Any) -> Node:
    module.register_parameter(name, torch.nn.Parameter(value, requires_grad=False))
    with module.graph.inserting_before(like):
        node = module.graph.get_attr(name)
    node.meta = dict(like.meta)
    return node


def _reader(node: Node) -> Node:
    (reader,) = node.users
    return reader


def value_of(module: torch.fx.GraphModule, node: Any) -> torch.Tensor:
    """What a node is that depends on parameters only."""
    if node.op == "get_attr":
        return attribute(module, node.target)  # type: ignore[no-any-return]
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: value_of(module, n))
    return node.target(*args, **kwargs)  # type: ignore[no-any-return]
