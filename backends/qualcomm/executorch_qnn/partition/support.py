# SPDX-License-Identifier: BSD-3-Clause
"""Which nodes can be delegated: the op table is asked, then QNN itself, about this very node."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram

from ..compile.build import (
    INTEGERS,
    STORED,
    Environment,
    boundary_dtype,
    constant_nodes,
    constant_tensors,
)
from ..compile.compiler import CompileWorker
from ..compile.ir import DType, LazyData, Node, QuantType, Scalar, Tensor
from ..ops.builder import Builder, Refused, Value
from ..ops.quantized import is_dequantize, is_quantize, type_of, wanted_of
from ..ops.registry import Integers, find_row, is_getitem, lower_node, metadata, read_outputs

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
        stored: how state buffers are stored, by their placeholders.
    """

    def __init__(
        self,
        graph: torch.fx.Graph,
        known: dict[str, torch.Tensor],
        worker: CompileWorker,
        stored: Mapping[torch.fx.Node, QuantType] | None = None,
    ) -> None:
        self.graph = graph
        self.worker = worker
        self.tensors = known
        self.constants = constant_nodes(graph, set(known))
        self.types: dict[torch.fx.Node, list[QuantType | None]] = {}
        """How the outputs of a node are stored, where that is quantized."""
        self.integers: dict[torch.fx.Node, Integers] = {}
        """The nodes that are computed in integers."""
        self.in_fp16: dict[torch.fx.Node, str] = {}
        """The nodes between quantized ones that are computed in fp16 all the same, and why."""
        self._stored = dict(stored or {})

    def verdicts(self, nodes: Sequence[torch.fx.Node]) -> dict[torch.fx.Node, str | None]:
        """For each node `None` if it can be delegated, else the reason why not.

        Args:
            nodes: in the order of the graph; nodes with quantized operands are computed in
                integers if that can be, else in fp16.
        """
        self.types = {n: [q] for n, q in self._stored.items()}
        self.integers, self.in_fp16 = {}, {}
        answers: dict[object, str | None] = {}
        emitted: dict[object, tuple[list[Node], list[QuantType | None]]] = {}
        while True:
            verdicts: dict[torch.fx.Node, str | None] = {}
            questions: dict[object, Node] = {}
            asked: list[tuple[torch.fx.Node, list[object]]] = []
            for node in nodes:
                try:
                    ops = self._emit(node, emitted)
                except Refused as e:
                    verdicts[node] = str(e)
                    continue
                keys = [_signature(op) for op in ops]
                questions.update(
                    (k, op) for k, op in zip(keys, ops, strict=True) if k not in answers
                )
                asked.append((node, keys))
            told = self.worker.validate(list(questions.values()))
            answers.update(
                (k, a and f"QNN refuses {op.type}: {a}")
                for (k, op), a in zip(questions.items(), told, strict=True)
            )
            again = False
            for node, keys in asked:
                verdicts[node] = next((a for k in keys if (a := answers[k])), None)
                if verdicts[node] and self.integers.pop(node, None) is not None:
                    self.in_fp16[node] = str(verdicts[node])
                    again = True
            if not again:
                return verdicts

    def mark(self) -> None:
        """Leaves in the nodes' metadata how they are stored and computed, for `compile.build`."""
        for node in self.graph.nodes:
            node.meta.pop(STORED, None)
            node.meta.pop(INTEGERS, None)
        for node, types in self.types.items():
            node.meta[STORED] = types[0] if len(types) == 1 else None
        for node, how in self.integers.items():
            node.meta[INTEGERS] = how

    def _emit(
        self,
        node: torch.fx.Node,
        known: dict[object, tuple[list[Node], list[QuantType | None]]],
    ) -> list[Node]:
        """The QNN ops of `node`, in integers if that is possible; remembers how it is stored."""
        self.types.pop(node, None)
        sources = tuple(tuple(self._types(n)) for n in node.all_input_nodes)
        ways: list[Integers | None] = [None]
        if node not in self.in_fp16 and (how := self._in_integers(node)) is not None:
            ways.insert(0, how)
        for how in ways:
            key = (node, how, sources)
            try:
                if key not in known:
                    known[key] = self._lowered(node, how)
            except Refused as e:
                if how is None:
                    raise
                self.in_fp16[node] = str(e)
                continue
            ops, types = known[key]
            if any(types):
                self.types[node] = types
            if how is not None:
                self.integers[node] = how
            return ops
        raise AssertionError(node)

    def _in_integers(self, node: torch.fx.Node) -> Integers | None:
        """How `node` may be computed in integers; None if nothing of it is quantized."""
        if is_quantize(node) or is_dequantize(node):
            return None
        if any(any(self._types(n)) for n in node.all_input_nodes):
            return Integers(wanted_of(node))
        wanted = wanted_of(node)
        table = any(n in self.constants and is_dequantize(n) for n in node.all_input_nodes)
        return Integers(wanted) if wanted is not None and table else None

    def _types(self, node: torch.fx.Node) -> list[QuantType | None]:
        """How the outputs of a node are stored."""
        if node in self.constants:
            return [None]
        if is_getitem(node):
            source, i = node.args
            types = self._types(source)  # type: ignore[arg-type]
            return [types[i] if i < len(types) else None]  # type: ignore[index,operator]
        if node not in self.types and (is_quantize(node) or is_dequantize(node)):
            return [type_of(node)]
        if node not in self.types and node.op == "placeholder" and _is_float(node):
            return [wanted_of(node)]
        return self.types.get(node, [None])

    def emit(self, node: torch.fx.Node) -> list[Node]:
        """The QNN ops that `node` alone becomes, in fp16."""
        return self._lowered(node, None)[0]

    def _lowered(
        self, node: torch.fx.Node, how: Integers | None
    ) -> tuple[list[Node], list[QuantType | None]]:
        """The QNN ops that `node` alone becomes, and how its outputs are then stored."""
        b = Builder("ask")
        env = Environment(b, self.tensors)
        if not (is_quantize(node) or is_dequantize(node)):
            find_row(node)  # why there is no row says more than what is wrong with the result
        results = metadata(node)
        if any(0 in results[i].shape for i in read_outputs(node)):
            raise Refused("its result has no elements")

        def value(source: torch.fx.Node) -> Any:
            if source in self.constants:
                return env.constant(source)
            types = self._types(source)
            results = metadata(source)
            if types == [None] and is_dequantize(node):
                types = [type_of(node)]
            types = types if len(types) == len(results) else [None] * len(results)
            made = [
                b.input(f"{source.name}_{i}", r.shape, r.dtype if q is None else DType.FLOAT16, q)
                for i, (r, q) in enumerate(zip(results, types, strict=True))
            ]
            many = isinstance(source.meta["val"], (list, tuple))
            return made if many else made[0]

        values: dict[torch.fx.Node, Any] = {}
        for source in node.all_input_nodes:
            values[source] = value(source)
        lowered = lower_node(b, node, values.__getitem__, how)
        for v in lowered:
            if v is not None and v.tensor is None and not v.is_const:
                raise AssertionError(f"{node} lowers to a value without a tensor")
        for op in b.graph.nodes:
            for t in (*op.inputs, *(p for p in op.params.values() if isinstance(p, Tensor))):
                _settle(t)
        return b.graph.nodes, [None if v is None else v.quant for v in lowered]

    def crosses_boundary(self, node: torch.fx.Node) -> str | None:
        """Why a value cannot be passed between a delegate and the CPU; `None` if it can."""
        try:
            for r in metadata(node):
                if not is_quantize(node):
                    boundary_dtype(r.torch_dtype)
                if 0 in r.shape:
                    return f"{list(r.shape)} has no elements"
        except Refused as e:
            return str(e)
        return None


def _is_float(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


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
