# SPDX-License-Identifier: BSD-3-Clause
"""Delegates in a graph, as ExecuTorch's passes see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind


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


def _by_shape(original: ExportedProgram) -> Callable[[], Callable[..., list[Any]]]:
    returned: Any = original.graph.output_node().args[0]
    values = [
        arg.meta["val"]
        for arg, spec in zip(returned, original.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]

    def call(*args: Any) -> list[Any]:
        modes = [a.fake_mode for a in (*args, *values) if isinstance(a, FakeTensor)]
        with modes[0]:
            return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype) for v in values]

    return lambda: call
