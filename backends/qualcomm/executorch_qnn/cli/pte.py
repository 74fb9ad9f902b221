# SPDX-License-Identifier: BSD-3-Clause
"""A `.pte` file opened for reading without ExecuTorch's Python code, which takes seconds to import.

The program is decoded by the `flatc` and the schema that ExecuTorch's wheel ships; segments are
views of the mapped file.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import QnnError

# Bytes 8 to 36 of a program with segments: magic, its own length, then sizes and offsets.
_HEADER = struct.Struct("<4sIQQ")
_HEADER_AT = 8


class PteFile:
    """A mapped `.pte`. Use as a context manager.

    Attributes:
        program: ExecuTorch's `Program` as plain data, the way exir/schema.py describes it.

    Raises:
        QnnError: the file is missing, cut short or no ExecuTorch program.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise QnnError(f"no such file: {self.path}")
        with self.path.open("rb") as file:
            head = file.read(_HEADER_AT + _HEADER.size)
            if head[4:6] != b"ET" or len(head) < _HEADER_AT + _HEADER.size:
                raise QnnError(f"{self.path} is not an ExecuTorch program")
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._view = memoryview(self._map)
        magic, _, program_size, self._segments_at = _HEADER.unpack_from(head, _HEADER_AT)
        if magic != b"eh00":  # no segments: the program is the whole file
            program_size = self._segments_at = self.size
        try:
            if max(program_size, self._segments_at) > self.size:
                raise QnnError(f"{self.path} is cut short")
            self.program = self._decode(self._view[:program_size])
        except BaseException:
            self.close()
            raise

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
        """Unmaps the file; while a view of it is in use, that happens when the view goes."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self._view)

    def segment(self, index: int) -> memoryview:
        """The bytes of one segment, in place."""
        segment = self.program["segments"][index]
        start = self._segments_at + segment["offset"]
        data = self._view[start : start + segment["size"]]
        if len(data) != segment["size"]:
            data.release()
            raise QnnError(f"{self.path} is cut short: segment {index} is not complete")
        return data

    def delegate_data(self, delegate: dict[str, Any]) -> memoryview:
        """What a backend wrote for a `BackendDelegate` of the program."""
        reference = delegate["processed"]
        if reference["location"] == "SEGMENT":
            return self.segment(reference["index"])
        return memoryview(bytes(self.program["backend_delegate_data"][reference["index"]]["data"]))

    def named_data(self) -> dict[str, memoryview]:
        """Named data by key."""
        entries = self.program.get("named_data") or []
        return {entry["key"]: self.segment(entry["segment_index"]) for entry in entries}

    def _decode(self, program: memoryview) -> dict[str, Any]:
        spec = importlib.util.find_spec("executorch")
        if spec is None:
            raise QnnError('executorch is not installed: pip install "executorch==1.5.1"')
        root = Path(next(iter(spec.submodule_search_locations or ())))
        schema = root / "exir" / "_serialize" / "program.fbs"
        with tempfile.TemporaryDirectory(prefix="executorch-qnn-") as folder:
            source = Path(folder, "program.bin")
            source.write_bytes(program)
            flatc = [str(root / "data" / "bin" / "flatc"), "--json", "--defaults-json"]
            flatc += ["--strict-json", "-o", folder, str(schema), "--", str(source)]
            done = subprocess.run(flatc, capture_output=True, text=True, check=False)
            if done.returncode:
                reason = (done.stdout + done.stderr).strip()
                raise QnnError(f"{self.path} is damaged: {reason or 'flatc cannot decode it'}")
            text = source.with_suffix(".json").read_text()
        # flatc writes infinity in a way that JSON does not know.
        text = re.sub(r'("double_val"\s*:\s*)(-?)inf', r"\1\2Infinity", text)
        decoded: dict[str, Any] = json.loads(text)
        return decoded
