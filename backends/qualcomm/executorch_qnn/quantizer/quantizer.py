# SPDX-License-Identifier: BSD-3-Clause
"""Annotates a graph for torchao's PT2E flow, with HTP's rules.

A value is quantized once, where it is made: the outputs of ops that compute are annotated, and the
inputs of the model.  What only moves values needs no annotation, because the lowering passes
quantized values through; nor does a mutable buffer that is only moved into and out of, which is
then held in the encoding of what is written to it, bit by bit (see `partition.encodings`).  A
buffer that takes part in sums and products of its own (a counter, an average) stays a float, and so
does the arithmetic on it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload
from torchao.quantization.pt2e import ObserverOrFakeQuantize
from torchao.quantization.pt2e.quantizer import (
    EdgeOrNode,
    QuantizationAnnotation,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from .functional import functional, mutated_buffers
from .recipe import Bits, QuantRecipe

MOVES = frozenset(
    ("alias", "as_strided", "chunk", "clone", "contiguous", "copy", "detach", "diagonal",
     "dropout", "expand", "expand_as", "feature_dropout", "flatten", "flip", "gather", "getitem",
     "index", "index_copy", "index_put", "index_select", "max_pool1d", "max_pool2d", "max_pool3d",
     "movedim", "narrow", "permute", "pixel_shuffle", "pixel_unshuffle", "repeat",
     "repeat_interleave", "reshape", "roll", "scatter", "select", "select_scatter", "slice",
     "slice_scatter", "split", "split_with_sizes", "squeeze", "t", "take_along_dim", "tile", "to",
     "transpose", "unbind", "unflatten", "unfold", "unsqueeze", "upsample_nearest1d",
     "upsample_nearest2d", "view", "view_as")
)  # fmt: skip
"""Ops whose results have the values of their (first) operand."""

_ARITHMETIC = frozenset(
    ("add", "addcmul", "clamp", "cumsum", "div", "lerp", "mul", "neg", "rsub", "sub", "where")
)
"""What sums, averages and counters are made of."""

_WEIGHT_AXES = {
    "conv1d": 0, "conv2d": 0, "conv3d": 0, "convolution": 0, "linear": 0,
    "conv_transpose1d": 1, "conv_transpose2d": 1, "conv_transpose3d": 1,
}  # fmt: skip
"""Ops with a weight as their second operand, and the axis of its output channels."""

_NOT_QUANTIZED = frozenset(("batch_norm", "lift_fresh_copy", "scaled_dot_product_attention"))


def name_of(node: torch.fx.Node) -> str:
    """The name of an ATen op without namespace, overload and the underscore of in-place ops."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return getattr(node.target, "__name__", "")
    return str(schema.name).partition("::")[2].removesuffix("_copy").rstrip("_")


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


class QnnQuantizer(Quantizer):  # type: ignore[misc]
    """For `torchao.quantization.pt2e.quantize_pt2e.prepare_pt2e` and `prepare_qat_pt2e`.

    Args:
        recipe: name of a recipe (`8a8w`, `16a8w`, `16a4w`, `16a16w`), or a `QuantRecipe`.

    Raises:
        RecipeError: there is no such recipe.
    """

    def __init__(self, recipe: QuantRecipe | str) -> None:
        super().__init__()
        self.recipe = QuantRecipe.of(recipe)
        self.written: list[tuple[str, ObserverOrFakeQuantize]] = []
        """Buffers of the module that was prepared last, and the observers of what is written."""

    def transform_for_annotation(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        """Rewrites in-place updates of buffers; see `functional`."""
        return functional(model)

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        states = mutated_buffers(model)
        kept = _float_state(model.graph, states)
        for node in model.graph.nodes:
            if node.op == "placeholder" and _is_float(node):
                self._annotate_input(node, kept)
            elif node.op == "call_function" and node not in kept and _is_float(node):
                self._annotate(node, states)
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        """Nothing is annotated that HTP does not have: the lowering knows fp16 for all else."""

    def prepare_obs_or_fq_callback(
        self,
        model: torch.fx.GraphModule,
        edge_or_node_to_obs_or_fq: dict[EdgeOrNode, ObserverOrFakeQuantize],
    ) -> None:
        """Shows what is written to a buffer the buffer's registered value, so that it fits in."""
        self.written = []
        for node in model.graph.nodes:
            if node.op != "call_function" or name_of(node) != "copy":
                continue
            buffer, written = node.args[:2]
            if buffer.op != "get_attr":
                continue
            value = _attribute(model, str(buffer.target))
            for source in _written(written):
                observer = edge_or_node_to_obs_or_fq.get(source)
                if observer is None or not value.is_floating_point():
                    continue
                self.written.append((str(buffer.target), observer))
                if bool(value.any()):
                    observer(value.detach())

    def _bits(self, node: torch.fx.Node) -> Bits | None:
        if not isinstance(node.target, OpOverload):
            return None
        stack = node.meta.get("nn_module_stack") or {}
        paths = [str(path).removeprefix("L['self'].") for path, _ in stack.values()]
        return self.recipe.bits(node.target, paths)

    def _annotate_input(self, node: torch.fx.Node, kept: set[torch.fx.Node]) -> None:
        """An input is quantized as its first reader that is."""
        pending, seen = list(node.users), set()
        while pending:
            user = pending.pop(0)
            if user in seen or user in kept or user.op != "call_function":
                continue
            seen.add(user)
            if name_of(user) in MOVES:
                pending += user.users
            elif (bits := self._bits(user)) is not None and _computes(user):
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    output_qspec=self.recipe.activation(bits.activations), _annotated=True
                )
                return

    def _annotate(self, node: torch.fx.Node, states: set[str]) -> None:
        bits = self._bits(node)
        if bits is None or not _computes(node):
            return
        act = self.recipe.activation(bits.activations)
        name = name_of(node)
        inputs: dict[torch.fx.Node, Any] = {}
        for i, source in enumerate(node.all_input_nodes):
            if source.op != "get_attr" or str(source.target) in states or not _is_float(source):
                continue
            if name in _WEIGHT_AXES and i == 1:
                inputs[source] = self.recipe.weight(bits.weights, _WEIGHT_AXES[name])
            elif name in _WEIGHT_AXES:
                continue  # a bias takes the scale of the sums that it is added to
            elif name == "layer_norm":
                if i == 1:  # HTP's has 8 bits
                    inputs[source] = self.recipe.activation(8)
            else:
                inputs[source] = act
        node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(inputs, act, _annotated=True)


def _computes(node: torch.fx.Node) -> bool:
    return name_of(node) not in MOVES | _NOT_QUANTIZED


def _attribute(module: torch.nn.Module, name: str) -> torch.Tensor:
    path, _, leaf = name.rpartition(".")
    value = getattr(module.get_submodule(path), leaf)
    assert isinstance(value, torch.Tensor)
    return value


def _written(node: torch.fx.Node) -> set[torch.fx.Node]:
    """What a buffer's new value is put together of."""
    found, pending, seen = set(), [node], set()
    while pending:
        n = pending.pop()
        if n in seen or n.op != "call_function":
            continue
        seen.add(n)
        if name_of(n) in MOVES | {"cat", "where"}:
            pending += [i for i in n.all_input_nodes if _is_float(i)]
        else:
            found.add(n)
    return found


def _float_state(graph: torch.fx.Graph, states: set[str]) -> set[torch.fx.Node]:
    """The nodes that make a buffer's new value from its old one by arithmetic alone."""
    kept: set[torch.fx.Node] = set()
    for write in graph.nodes:
        if write.op != "call_function" or name_of(write) != "copy":
            continue
        buffer = write.args[0]
        if buffer.op != "get_attr" or str(buffer.target) not in states:
            continue
        between = _between(buffer, write.args[1])
        names = {name_of(n) for n in between}
        if names <= _ARITHMETIC | MOVES | {"cat"} and names & _ARITHMETIC - {"where"}:
            kept |= between
    return kept


def _between(start: torch.fx.Node, end: torch.fx.Node) -> set[torch.fx.Node]:
    """The nodes on all paths from one to the other, `end` included."""
    after: set[torch.fx.Node] = set()
    pending = [start]
    while pending:
        for user in pending.pop().users:
            if user not in after:
                after.add(user)
                pending.append(user)
    if end not in after:
        return set()
    found, pending = {end}, [end]
    while pending:
        for source in pending.pop().all_input_nodes:
            if source in after and source not in found:
                found.add(source)
                pending.append(source)
    return found
