# SPDX-License-Identifier: BSD-3-Clause
"""Delegates in a graph, as ExecuTorch's passes see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind

from ..aliasing.updates import sort
from ..partition import Plan


@contextmanager
def called_by_shape(programs: Iterable[ExportedProgram]) -> Iterator[None]:
    """While this is active, calling a delegate on fake tensors gives results of the right shapes.

    Otherwise each of ExecuTorch's passes interprets the delegate's original program, node by node:
    for a decoder of 30 layers that is most of the time between partitioning and the `.pte`.
    """
    delegates = [
        m.original_module for ep in programs for m in get_lowered_backend_modules(ep.graph_module)
    ]
    for original in delegates:
        original.module = _by_shape(original)
    try:
        yield
    finally:
        for original in delegates:
            del original.module


def delegate_calls(ep: ExportedProgram) -> dict[str, torch.fx.Node]:
    """The calls of QNN delegates by the name of their graph, in the order of the calls."""
    calls = [n for n in ep.graph.nodes if n.target is executorch_call_delegate]
    modules = get_lowered_backend_modules(ep.graph_module)
    return {
        m.meta["_delegate_info_meta"].graph: call
        for m, call in zip(modules, calls, strict=True)
        if m.backend_id == "QnnDelegate"
    }


def order_calls(ep: ExportedProgram, plan: Plan) -> None:
    """Moves delegates that read a slot before the one that writes it."""
    calls = delegate_calls(ep)
    order: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for first, then in sorted(plan.order):
        order.setdefault(calls[first], []).append(calls[then])
    sort(ep.graph, order)
    ep.graph_module.recompile()


def check_calls(ep: ExportedProgram, plan: Plan) -> None:
    """Raises AssertionError if some pass has dropped a delegate or undone `order_calls`."""
    place = {graph: i for i, graph in enumerate(delegate_calls(ep))}
    assert place.keys() == plan.partitions.keys(), "a delegate was lost"
    assert all(place[first] < place[then] for first, then in plan.order), "delegates are reordered"


def dense_boundaries(ep: ExportedProgram) -> None:
    """Makes every value that enters or leaves a delegate dense and in row-major order.

    In ATen dialect the result of `permute` is a strided view; a delegate writes all of its outputs
    dense, and ExecuTorch takes the order of a tensor's dimensions from its strides.
    """
    for node in ep.graph.nodes:
        tag = node.meta.get("delegation_tag")
        crosses = any(u.meta.get("delegation_tag") != tag for u in node.users)
        value = node.meta.get("val")
        if crosses and isinstance(value, FakeTensor) and (tag or node.op == "placeholder"):
            node.meta["val"] = _dense(value)
        elif crosses and tag and isinstance(value, (list, tuple)):
            dense = [_dense(v) if isinstance(v, FakeTensor) else v for v in value]
            node.meta["val"] = type(value)(dense)


def _dense(value: FakeTensor) -> torch.Tensor:
    if value.is_contiguous():
        return value
    with value.fake_mode:
        return torch.empty(value.shape, dtype=value.dtype)


def _by_shape(original: ExportedProgram) -> Callable[[], Callable[..., list[Any]]]:
    returned: Any = original.graph.output_node().args[0]
    values = [
        arg.meta["val"]
        for arg, spec in zip(returned, original.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]

    def call(*args: Any) -> list[Any]:
        mode = detect_fake_mode(args) or detect_fake_mode(values)
        with mode or nullcontext():
            return [torch.empty(v.shape, dtype=v.dtype) for v in values]

    return lambda: call
