# SPDX-License-Identifier: BSD-3-Clause
"""The compile worker: the only process that loads a QNN library ahead of time.

Run as `python -m executorch_qnn.compile.worker IN OUT`, with two inherited file descriptors.
QNN's compiler can crash; then this process
dies, and its parent reports the last lines that it logged to stderr.  It imports no torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from .. import _native
from .ir import Encoding, FileSlice, Graph, Node, Scalar, Tensor
from .messages import Compile, Compiled, Failed, GraphStats, Open, Opened, Validate, receive, send

TensorArgs: TypeAlias = tuple[str, int, int, list[int], Encoding | None, memoryview | None]


class Compiler:
    """Handles requests; one library and one device."""

    def __init__(self) -> None:
        self.backend: _native.Backend | None = None
        self.maps: dict[str, mmap.mmap] = {}

    def handle(self, request: object) -> object:
        if isinstance(request, Open):
            library = _native.Library(request.folder)
            _native.log_to("/dev/stderr")
            self.backend = _native.Backend(library, request.soc_model)
            return Opened(library.build_id, library.core_api)
        if isinstance(request, Validate):
            return self._validate(request.nodes)
        if isinstance(request, Compile):
            return self._compile(request)
        raise TypeError(f"unknown request {type(request).__name__}")

    def _tensor(self, tensor: Tensor) -> TensorArgs:
        """A tensor as the native module takes it; static data is handed over, not copied."""
        data: memoryview | None = None
        if isinstance(tensor.data, FileSlice):
            path, start, size = tensor.data
            if path not in self.maps:
                with Path(path).open("rb") as f:
                    self.maps[path] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            data = memoryview(self.maps[path])[start : start + size]
        elif isinstance(tensor.data, np.ndarray):
            data = np.ascontiguousarray(tensor.data).data.cast("B")
        name, kind, dtype = tensor.name, int(tensor.kind), int(tensor.dtype)
        return name, kind, dtype, list(tensor.shape), tensor.encoding, data

    def _forget(self, tensor: Tensor) -> None:
        """Gives back the pages of static data that QNN has copied by now."""
        if isinstance(tensor.data, FileSlice):
            path, start, size = tensor.data
            start = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
            whole = (tensor.data.offset + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
            if whole > 0:
                self.maps[path].madvise(mmap.MADV_DONTNEED, start, whole)

    def _validate(self, nodes: Sequence[Node]) -> list[str | None]:
        assert self.backend is not None
        return [self.backend.validate(self._detached(node)) for node in nodes]

    def _detached(self, node: Node) -> tuple[Any, ...]:
        """A node with its tensors, for a question that needs no graph."""
        return (
            node.name,
            node.type,
            [self._tensor(t) for t in node.inputs],
            [self._tensor(t) for t in node.outputs],
            _params(node, self._tensor),
        )

    def _compile(self, request: Compile) -> Compiled | Failed:
        assert self.backend is not None
        context = _native.Context(self.backend)
        stats = {}
        for graph in request.graphs:
            try:
                stats[graph.name] = self._build(context, graph)
            except _native.Error as e:
                return Failed(str(e), getattr(e, "kind", ""), graph.name)
        size = context.write_binary(request.path)
        digest = hashlib.sha256()
        with Path(request.path).open("rb") as f:
            while chunk := f.read(1 << 22):
                digest.update(chunk)
        times = os.times()
        return Compiled(size, digest.digest(), stats, times.user + times.system)

    def _build(self, context: _native.Context, graph: Graph) -> GraphStats:
        g = context.graph(graph.name, {"vtcm_mb": 0})
        index = {}
        for tensor in graph.tensors:
            index[id(tensor)] = g.add_tensor(*self._tensor(tensor))
            self._forget(tensor)
        for node in graph.nodes:
            g.add_node(
                node.name,
                node.type,
                [index[id(t)] for t in node.inputs],
                [index[id(t)] for t in node.outputs],
                _params(node, lambda t: index[id(t)]),
            )
        done = g.finalize()
        ddr = done["ddr"]
        return GraphStats(
            done["seconds"],
            ddr["read"],
            ddr["write"],
            ddr["spill"],
            ddr["fill"],
            dict(Counter(node.type for node in graph.nodes)),
        )


def _params(node: Node, tensor: Callable[[Tensor], object]) -> list[tuple[Any, ...]]:
    return [
        (key, "scalar", int(p.dtype), p.value)
        if isinstance(p, Scalar)
        else (key, "tensor", tensor(p))
        for key, p in node.params.items()
    ]


def main(argv: Sequence[str]) -> int:
    source = os.fdopen(int(argv[0]), "rb")
    sink = os.fdopen(int(argv[1]), "wb")
    compiler = Compiler()
    while True:
        try:
            request = receive(source)
        except EOFError:
            return 0
        try:
            reply: object = compiler.handle(request)
        except _native.Error as e:
            reply = Failed(str(e), getattr(e, "kind", ""))
        except Exception:
            reply = Failed(traceback.format_exc(), "internal")
        send(sink, reply)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
