# SPDX-License-Identifier: BSD-3-Clause
"""Small graphs for the tests of the native module."""

from __future__ import annotations

from typing import Any

from executorch_qnn import _native
from executorch_qnn.compile.ir import DType, Kind

SM8650 = 57


def relu_node(rows_out: int = 64) -> tuple[Any, ...]:
    """A Relu of [1, 64] to [1, rows_out], as `Backend.validate` takes it."""
    x = ("x", Kind.INPUT, DType.FLOAT16, [1, 64], None, None)
    y = ("y", Kind.OUTPUT, DType.FLOAT16, [1, rows_out], None, None)
    return ("relu", "Relu", [x], [y], [])


def relu_graph(
    context: _native.Context,
    name: str = "relu",
    encoding: tuple[float, int] | None = None,
    options: Any = None,
) -> _native.Graph:
    """A graph of one Relu, not finalized; quantized to 8 bits if an encoding is given."""
    graph = context.graph(name, options) if options else context.graph(name)
    dtype = DType.UFIXED8 if encoding else DType.FLOAT16
    x = graph.add_tensor("x", Kind.INPUT, dtype, [1, 64], encoding)
    y = graph.add_tensor("y", Kind.OUTPUT, dtype, [1, 64], encoding)
    graph.add_node("relu", "Relu", [x], [y])
    return graph
