# SPDX-License-Identifier: BSD-3-Clause
"""Which nodes can be delegated: the op table is asked, then QNN itself, about this very node."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..compile.build import Environment, boundary_dtype, constant_nodes, constant_tensors
from ..compile.compiler import CompileWorker
from ..compile.ir import LazyData, Node, Scalar, Tensor
from ..ops.builder import Builder, Refused, Value
from ..ops.registry import is_getitem, lower_node, metadata, read_outputs

_SMALL = 4096


def known_tensors(
    ep: ExportedProgram,
    states: Container[str],
    data: Mapping[str, torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    """Placeholder name to tensor, for all that is known when a program is lowered.

    Args:
        states: names of the buffers that any method of the program writes.
        data: real tensors of the state dict by name, when `ep` holds fake ones.
    """
    known = constant_tensors(ep, states)
    for spec in ep.graph_signature.input_specs:
        if data and spec.arg.name in known and spec.target in data:
            known[spec.arg.name] = data[spec.target]
    return known


class Support:
    """Asks about the nodes of one graph.

    Args:
        graph: of functional ATen or edge ops.
        known: placeholder name to tensor; see `known_tensors`.
        worker: QNN, for one target.
    """

    def __init__(
        self, graph: torch.fx.Graph, known: dict[str, torch.Tensor], worker: CompileWorker
    ) -> None:
        self.worker = worker
        self.tensors = known
        self.constants = constant_nodes(graph, set(known))

    def verdicts(self, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, str | None]:
        """For each node `None` if it can be delegated, else the reason why not."""
        verdicts: dict[torch.fx.Node, str | None] = {}
        questions: dict[object, Node] = {}
        asked: list[tuple[torch.fx.Node, list[object]]] = []
        for node in nodes:
            try:
                emitted = self.emit(node)
            except Refused as e:
                verdicts[node] = str(e)
                continue
            keys = []
            for op in emitted:
                key = _signature(op)
                questions.setdefault(key, op)
                keys.append(key)
            asked.append((node, keys))
        answers = dict(zip(questions, self.worker.validate(list(questions.values())), strict=True))
        for node, keys in asked:
            reasons = [f"QNN refuses {questions[k].type}: {answers[k]}" for k in keys if answers[k]]
            verdicts[node] = reasons[0] if reasons else None
        return verdicts

    def emit(self, node: torch.fx.Node) -> list[Node]:
        """The QNN ops that `node` alone becomes."""
        b = Builder("ask")
        env = Environment(b, self.tensors)
        results = metadata(node)
        if any(0 in results[i].shape for i in read_outputs(node)):
            raise Refused("its result has no elements")

        def value(source: torch.fx.Node) -> Any:
            if source in self.constants:
                return env.constant(source)
            made = [
                b.input(f"{source.name}_{i}", r.shape, r.dtype)
                for i, r in enumerate(metadata(source))
            ]
            many = isinstance(source.meta["val"], (list, tuple))
            return made if many else made[0]

        values: dict[torch.fx.Node, Any] = {}
        for source in node.all_input_nodes:
            values[source] = value(source)
        for v in lower_node(b, node, values.__getitem__):
            if v is not None and v.tensor is None and not v.is_const:
                raise AssertionError(f"{node} lowers to a value without a tensor")
        for op in b.graph.nodes:
            for t in (*op.inputs, *(p for p in op.params.values() if isinstance(p, Tensor))):
                _settle(t)
        return b.graph.nodes

    def crosses_boundary(self, node: torch.fx.Node) -> str | None:
        """Why a value cannot be passed between a delegate and the CPU; `None` if it can."""
        try:
            for r in metadata(node):
                boundary_dtype(r.torch_dtype)
                if 0 in r.shape:
                    return f"{list(r.shape)} has no elements"
        except Refused as e:
            return str(e)
        return None


def _settle(tensor: Tensor) -> None:
    """Makes small static data, and drops large data, which no verdict depends on."""
    if isinstance(tensor.data, LazyData):
        if tensor.nbytes > _SMALL:
            tensor.data = None
            return
        try:
            tensor.data = tensor.data.make()
        except Refused:
            raise
        except Exception:  # a fake tensor has no data
            tensor.data = None


def _signature(node: Node) -> object:
    """Equal for nodes that QNN must answer alike."""

    def tensor(t: Tensor) -> object:
        data = t.data.tobytes() if isinstance(t.data, np.ndarray) else None
        return (t.dtype, t.shape, t.kind, t.encoding, data)

    return (
        node.type,
        tuple(tensor(t) for t in node.inputs),
        tuple(tensor(t) for t in node.outputs),
        tuple((k, p if isinstance(p, Scalar) else tensor(p)) for k, p in node.params.items()),
    )


__all__ = ["Support", "Value", "is_getitem"]
