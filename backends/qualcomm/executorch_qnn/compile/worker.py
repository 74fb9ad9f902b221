# SPDX-License-Identifier: BSD-3-Clause
"""The compile worker: the only process that loads a QNN library ahead of time.

Run as `python -m executorch_qnn.compile.worker IN OUT`, with two inherited file descriptors.
Requests and replies are pickles behind a length.  QNN's compiler can crash; then this process
dies, and its parent reports the last lines that it logged to stderr.  It imports no torch.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pickle
import struct
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from .. import _native
from .ir import Array, FileSlice, Graph, LazyData, Node, Scalar, Tensor

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Open:
    """Opens the library and a device for one SoC; answers with `Opened`."""

    folder: str
    soc_model: int


@dataclass(frozen=True)
class Opened:
    build_id: str
    core_api: tuple[int, int, int]


@dataclass(frozen=True)
class Validate:
    """Asks QNN about nodes; answers with a list of reasons, `None` where a node is accepted."""

    nodes: list[Node]


@dataclass(frozen=True)
class Compile:
    """Compiles graphs into one context binary at `path`; answers with `Compiled`."""

    graphs: list[Graph]
    path: str
    options: dict[str, Any]


@dataclass(frozen=True)
class GraphStats:
    """What QNN's finalize says of a graph: DDR bytes per execute, and its own seconds."""

    finalize_s: float
    ddr_read: int | None
    ddr_write: int | None
    spill: int | None
    fill: int | None
    ops: int


@dataclass(frozen=True)
class Compiled:
    size: int
    sha256: bytes
    graphs: dict[str, GraphStats]
    cpu_s: float


@dataclass(frozen=True)
class Failed:
    """QNN refused; `graph` names the graph that it refused, if one."""

    message: str
    kind: str
    graph: str = ""


def send(stream: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (n,) = LENGTH.unpack(head)
    data = stream.read(n)
    if len(data) < n:
        raise EOFError
    return pickle.loads(data)


class Compiler:
    """Handles requests; one library and one device."""

    def __init__(self) -> None:
        self.backend: _native.Backend | None = None
        self.maps: dict[str, mmap.mmap] = {}

    def handle(self, request: object) -> object:
        if isinstance(request, Open):
            library = _native.Library(request.folder)
            self.backend = _native.Backend(library, request.soc_model)
            return Opened(library.build_id, library.core_api)
        if isinstance(request, Validate):
            return self._validate(request.nodes)
        if isinstance(request, Compile):
            return self._compile(request)
        raise TypeError(f"unknown request {type(request).__name__}")

    def _data(self, tensor: Tensor) -> Array | memoryview | None:
        data = tensor.data
        if isinstance(data, FileSlice):
            if data.path not in self.maps:
                with open(data.path, "rb") as f:
                    self.maps[data.path] = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_READ)
            return memoryview(self.maps[data.path])[data.offset : data.offset + data.nbytes]
        assert not isinstance(data, LazyData)
        return data

    def _add(self, graph: _native.Graph, tensor: Tensor) -> int:
        data = self._data(tensor)
        if isinstance(data, np.ndarray):
            data = memoryview(np.ascontiguousarray(data)).cast("B")
        return graph.add_tensor(
            tensor.name, int(tensor.kind), int(tensor.dtype), list(tensor.shape), tensor.encoding, data
        )

    def _validate(self, nodes: Sequence[Node]) -> list[str | None]:
        assert self.backend is not None
        return [self.backend.validate(*describe(node)) for node in nodes]

    def _compile(self, request: Compile) -> Compiled | Failed:
        assert self.backend is not None
        context = _native.Context(self.backend)
        stats = {}
        for graph in request.graphs:
            try:
                stats[graph.name] = self._build(context, graph, request.options)
            except _native.Error as e:
                return Failed(str(e), getattr(e, "kind", ""), graph.name)
        size = context.write_binary(request.path)
        digest = hashlib.sha256()
        with open(request.path, "rb") as f:
            while chunk := f.read(1 << 22):
                digest.update(chunk)
        times = os.times()
        return Compiled(size, digest.digest(), stats, times.user + times.system)

    def _build(
        self, context: _native.Context, graph: Graph, options: dict[str, Any]
    ) -> GraphStats:
        g = context.graph(graph.name, options)
        index = {id(t): self._add(g, t) for t in graph.tensors}
        for node in graph.nodes:
            params: list[tuple[Any, ...]] = [
                (key, "scalar", int(p.dtype), p.value)
                if isinstance(p, Scalar)
                else (key, "tensor", index[id(p)])
                for key, p in node.params.items()
            ]
            g.add_node(
                node.name,
                node.type,
                [index[id(t)] for t in node.inputs],
                [index[id(t)] for t in node.outputs],
                params,
            )
        done = g.finalize()
        ddr = done.get("ddr") or {}
        return GraphStats(
            done["seconds"],
            ddr.get("read"),
            ddr.get("write"),
            ddr.get("spill"),
            ddr.get("fill"),
            len(graph.nodes),
        )


def describe(node: Node) -> tuple[Any, ...]:
    """A node as `_native.Backend.validate` takes it."""
    raise NotImplementedError


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
