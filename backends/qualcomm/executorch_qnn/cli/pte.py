# SPDX-License-Identifier: BSD-3-Clause
"""A `.pte` file opened for reading: ExecuTorch's program, and its segments without copying them."""

from __future__ import annotations

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import QnnError

_EXTENDED_HEADER_BYTES = 64


class PteFile:
    """A mapped `.pte`. Use as a context manager; views of it must not outlive it.

    Attributes:
        program: ExecuTorch's `Program` (exir/schema.py), segments not filled in.

    Raises:
        QnnError: the file is missing or no ExecuTorch program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        from executorch.exir._serialize import _program as pte

        self.path = Path(path)
        if not self.path.is_file():
            raise QnnError(f"no such file: {self.path}")
        with self.path.open("rb") as file:
            head = file.read(_EXTENDED_HEADER_BYTES)
            if len(head) < 8 or head[4:6] != b"ET":
                raise QnnError(f"{self.path} is not an ExecuTorch program")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        header = pte._get_extended_header(head)
        program_size = header.program_size if header else len(self._view)
        self._segment_base = header.segment_base_offset if header else len(self._view)
        self._segment_bytes = header.segment_data_size if header else 0
        end = self._segment_base + self._segment_bytes
        if program_size > len(self._view) or end > len(self._view):
            self.close()
            raise QnnError(f"{self.path} is cut short")
        try:
            self.program: Any = pte._flatbuffer_to_program(bytes(self._view[:program_size]))
        except Exception as error:
            self.close()
            raise QnnError(f"{self.path} is damaged: {error}") from error

    def __enter__(self) -> PteFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file."""
        self._view.release()
        self._map.close()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._view)

    def segment(self, index: int) -> memoryview:
        """The bytes of one segment, in place."""
        segment = self.program.segments[index]
        start = self._segment_base + segment.offset
        return self._view[start : start + segment.size]

    def delegate_data(self, delegate: Any) -> memoryview:
        """What a backend wrote for a `BackendDelegate` of the program."""
        from executorch.exir.schema import DataLocation

        reference = delegate.processed
        if reference.location == DataLocation.SEGMENT:
            return self.segment(reference.index)
        return memoryview(bytes(self.program.backend_delegate_data[reference.index].data))

    def named_data(self) -> dict[str, memoryview]:
        """Named data by key."""
        entries = self.program.named_data or []
        return {entry.key: self.segment(entry.segment_index) for entry in entries}
