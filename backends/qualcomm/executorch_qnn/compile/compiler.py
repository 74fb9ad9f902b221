# SPDX-License-Identifier: BSD-3-Clause
"""The parent's side of compilation: starts the worker, hands it graphs, survives its crashes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ..errors import LibraryNotFound, LoweringError
from ..libraries import find
from ..target import Target
from .ir import FileSlice, Graph, LazyData, Node, Tensor
from .messages import Compile, Compiled, Failed, Open, Opened, Validate, receive, send

_ALIGN = 64
_INLINE = 4096
_LOG_LINES = 12


class GraphRefused(LoweringError):
    """QNN did not take a whole graph: its compiler said no, or died.

    Attributes:
        graph: name of the graph; empty when the crash cannot be tied to one.
    """

    def __init__(self, graph: str, reason: str) -> None:
        super().__init__(f"QNN does not compile graph {graph or '?'}: {reason}")
        self.graph = graph
        self.reason = reason


class _Crash(Exception):
    pass


class CompileWorker:
    """A worker process for one target.  Use as a context manager.

    Args:
        target: the SoC to validate and compile for.
        qnn_libraries: folder of the QNN libraries; searched for when `None`.

    Raises:
        LibraryNotFound: no QNN library was found.
        LoweringError: the library or its device for the target cannot be opened.
    """

    def __init__(self, target: Target, qnn_libraries: str | os.PathLike[str] | None = None) -> None:
        self.target = target
        self.folder = str(find(qnn_libraries))
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self.opened = self._start()

    def __enter__(self) -> CompileWorker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __deepcopy__(self, memo: object) -> CompileWorker:
        """The worker itself: ExecuTorch copies what a compile spec carries."""
        return self

    def close(self) -> None:
        """Ends the worker; the library is unloaded with it."""
        if self._process is not None:
            self._to.close()
            self._process.wait()
            self._from.close()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None

    def validate(self, nodes: Sequence[Node]) -> list[str | None]:
        """QNN's verdict on each node: `None`, or the reason for its refusal.

        A node on which QNN's validator crashes is refused, the others still get their answer.
        """
        if not nodes:
            return []
        try:
            reply = self._ask(Validate(list(nodes)))
        except _Crash as crash:
            self._restart()
            if len(nodes) == 1:
                return [f"QNN's validator died on it: {crash}"]
            half = len(nodes) // 2
            return self.validate(nodes[:half]) + self.validate(nodes[half:])
        if isinstance(reply, Failed):
            raise LoweringError(f"validation failed: {reply.message}")
        verdicts: list[str | None] = reply
        return verdicts

    def compile(self, graphs: Sequence[Graph], path: str) -> Compiled:
        """Compiles `graphs` into one context binary, written to `path`.

        Raises:
            GraphRefused: QNN refused a graph, or crashed on it.
        """
        with tempfile.TemporaryDirectory(prefix="executorch-qnn-") as folder:
            write_static_data(graphs, Path(folder) / "static.bin")
            try:
                reply = self._ask(Compile(list(graphs), path))
            except _Crash as crash:
                self._restart()
                name = graphs[0].name if len(graphs) == 1 else self._culprit(graphs)
                raise GraphRefused(name, f"its compiler died: {crash}") from None
        if isinstance(reply, Failed):
            if reply.kind == "internal":
                raise LoweringError(f"the compile worker failed: {reply.message}")
            raise GraphRefused(reply.graph, reply.message)
        assert isinstance(reply, Compiled)
        return reply

    def _culprit(self, graphs: Sequence[Graph]) -> str:
        """The first of several graphs on which the compiler dies when it is alone."""
        with tempfile.TemporaryDirectory(prefix="executorch-qnn-") as folder:
            for graph in graphs:
                try:
                    self._ask(Compile([graph], f"{folder}/context.bin"))
                except _Crash:
                    self._restart()
                    return graph.name
        return ""

    def _start(self) -> Opened:
        read, child_write = os.pipe()
        child_read, write = os.pipe()
        self._log = tempfile.TemporaryFile(prefix="executorch-qnn-log-")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", "executorch_qnn.compile.worker",
             str(child_read), str(child_write)],
            pass_fds=(child_read, child_write),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )  # fmt: skip
        os.close(child_read)
        os.close(child_write)
        self._from = os.fdopen(read, "rb")
        self._to = os.fdopen(write, "wb")
        try:
            reply = self._ask(Open(self.folder, self.target.soc_model))
        except _Crash as crash:
            self.close()
            raise LoweringError(
                f"the compile worker died while it opened {self.folder}: {crash}"
            ) from None
        if isinstance(reply, Failed):
            self.close()
            error = LibraryNotFound if reply.kind == "library_not_found" else LoweringError
            raise error(reply.message)
        assert isinstance(reply, Opened)
        return reply

    def _restart(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.close()
        self._start()

    def _ask(self, request: object) -> Any:
        assert self._process is not None
        try:
            send(self._to, request)
            return receive(self._from)
        except (BrokenPipeError, EOFError):
            code = self._process.wait()
            how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
            raise _Crash(f"{how}\n{self._tail()}") from None

    def _tail(self) -> str:
        assert self._log is not None
        size = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, size - 8192))
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "(it logged nothing)"


def write_static_data(graphs: Sequence[Graph], path: Path) -> None:
    """Moves the graphs' static data into one file; each tensor then refers to its slice.

    Lazy data is made here, tensor by tensor, so that no two of them are in memory at once.
    """
    with path.open("wb") as f:
        for tensor in _statics(graphs):
            data = tensor.data.make() if isinstance(tensor.data, LazyData) else tensor.data
            assert isinstance(data, np.ndarray), tensor.name
            if data.nbytes <= _INLINE:
                tensor.data = data
                continue
            offset = -(-f.tell() // _ALIGN) * _ALIGN
            f.seek(offset)
            f.write(np.ascontiguousarray(data).data.cast("B"))
            tensor.data = FileSlice(str(path), offset, data.nbytes)


def _statics(graphs: Sequence[Graph]) -> Iterator[Tensor]:
    for graph in graphs:
        for tensor in graph.tensors:
            if tensor.data is not None and not isinstance(tensor.data, FileSlice):
                yield tensor
