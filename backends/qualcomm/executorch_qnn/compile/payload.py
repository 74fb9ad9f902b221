# SPDX-License-Identifier: BSD-3-Clause
"""The delegate payload: what the runtime must know about one QNN graph.  See docs/adr/0003.

Little endian.  A 32-byte header (magic, format version, CRC-32 over everything from byte 16 on,
total size), then the fields below without padding; a string is its length (u32) and UTF-8 bytes.
Context binaries and initial values are not in here: they lie once in the program's named data.
"""

from __future__ import annotations

import enum
import struct
import zlib
from dataclasses import dataclass, field

from ..errors import IncompatiblePayload
from .ir import ScaleOffset

MAGIC = b"ETQNNDLG"
MAJOR, MINOR = 2, 0
_HEADER = struct.Struct("<8sHHIQQ")


class Binding(enum.IntEnum):
    """How a state's slot is bound to its graph.

    IN_PLACE: the graph reads and writes one address.  DOUBLE_BUFFER: it reads one region and writes
    another, and the two change places after a success.  DELTA: it puts out new rows and their
    positions, and the runtime places them.  ACCUMULATE: it puts out what is to be added to the
    slot, which is wider than the graph's type.  COPIED: such a slot is converted on both ways.
    """

    IN_PLACE = 0
    DOUBLE_BUFFER = 1
    READ_ONLY = 2
    WRITE_ONLY = 3
    DELTA = 4
    ACCUMULATE = 5
    COPIED = 6


@dataclass(frozen=True)
class IOEntry:
    """One argument of the delegate call.

    Attributes:
        name: of the QNN tensor; empty when the graph does not use the argument.
        scalar_type: ExecuTorch's number of the host's element type.
        dtype: QNN's number of the graph's element type.
        shape: as ExecuTorch sees it; `qnn_shape`: as QNN does.
        encoding: of a tensor of 8 or 16-bit integers that stand for real numbers.  If the host's
            type is a float, the delegate converts with it; integers cross as they are.
    """

    name: str
    scalar_type: int
    dtype: int
    shape: tuple[int, ...]
    qnn_shape: tuple[int, ...]
    encoding: ScaleOffset | None = None


@dataclass(frozen=True)
class RowsEntry:
    """What a graph puts out of a buffer that it changes in some rows only.

    The buffer, whatever its shape, is `outer` blocks of `length` rows of `row` elements.  The graph
    puts out `outer` blocks of `count` rows, from element `offset` on of its tensor.

    Attributes:
        positions: name of the QNN tensor, INT32, that says where the rows belong.
    """

    positions: str
    offset: int
    outer: int
    length: int
    row: int
    count: int


@dataclass(frozen=True)
class StateEntry:
    """One mutable buffer that the graph reads or writes.

    Attributes:
        dtype: QNN's number of the type in which the buffer is stored.
        npu_dtype: of the graph's tensors; values are converted where it differs.
        binding: a `Binding`.
        rows: with the binding DELTA only.
        scale: what is put out with the binding ACCUMULATE is so many times what is to be added.
        initial_key: named data key of the initial value in the stored type; empty for zeros.
    """

    fqn: str
    scalar_type: int
    dtype: int
    npu_dtype: int
    shape: tuple[int, ...]
    input_name: str
    output_name: str
    binding: int
    initial_key: str = ""
    encoding: ScaleOffset | None = None
    rows: RowsEntry | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class Payload:
    """The content of one delegate blob."""

    method: str
    graph: str
    context_key: str
    context_sha256: bytes
    context_size: int
    build_id: str
    core_api: tuple[int, int]
    soc_model: int
    htp_arch: int
    target: str
    inputs: tuple[IOEntry, ...] = ()
    outputs: tuple[IOEntry, ...] = ()
    states: tuple[StateEntry, ...] = ()

    def pack(self) -> bytes:
        """The blob, header included."""
        w = _Writer()
        w.str(self.method)
        w.str(self.graph)
        w.str(self.context_key)
        w.raw(self.context_sha256)
        w.u64(self.context_size)
        w.str(self.build_id)
        w.u32(*self.core_api, self.soc_model, self.htp_arch)
        w.str(self.target)
        for ios in (self.inputs, self.outputs):
            w.u32(len(ios))
            for io in ios:
                w.str(io.name)
                w.i32(io.scalar_type)
                w.u32(io.dtype)
                w.dims(io.shape)
                w.dims(io.qnn_shape)
                w.encoding(io.encoding)
                w.u32(0)
        w.u32(len(self.states))
        for s in self.states:
            w.str(s.fqn)
            w.i32(s.scalar_type)
            w.u32(s.dtype, s.npu_dtype)
            w.dims(s.shape)
            w.encoding(s.encoding)
            w.str(s.input_name)
            w.str(s.output_name)
            w.u32(s.binding)
            w.u32(1 if s.initial_key else 0)
            if s.initial_key:
                w.str(s.initial_key)
            if s.rows is not None:
                r = s.rows
                w.str(r.positions)
                w.u64(r.offset)
                w.u32(r.outer, r.length, r.row, r.count)
            if s.binding == Binding.ACCUMULATE:
                w.data += struct.pack("<f", s.scale)
        body = bytes(w.data)
        total = _HEADER.size + len(body)
        tail = struct.pack("<QQ", total, 0) + body
        return struct.pack("<8sHHI", MAGIC, MAJOR, MINOR, zlib.crc32(tail)) + tail


def unpack(blob: bytes | memoryview) -> Payload:
    """Reads a delegate blob.

    Raises:
        IncompatiblePayload: not a blob of this backend, cut short, damaged, or of a newer format.
    """
    blob = memoryview(blob)
    if len(blob) < _HEADER.size or bytes(blob[:8]) != MAGIC:
        raise IncompatiblePayload("this is not a payload of the QnnDelegate backend")
    _, major, minor, crc, total, _ = _HEADER.unpack_from(blob)
    if major != MAJOR:
        raise IncompatiblePayload(
            f"payload format {major}.{minor} is not {MAJOR}.x: upgrade executorch-qnn, or lower "
            "the model again with this version"
        )
    if total > len(blob) or total < _HEADER.size:
        raise IncompatiblePayload(f"the payload is cut short: {len(blob)} of {total} bytes")
    if zlib.crc32(blob[16:total]) != crc:
        raise IncompatiblePayload("the payload is damaged: its checksum does not match")
    return _Reader(blob[_HEADER.size : total]).payload()


@dataclass
class _Writer:
    data: bytearray = field(default_factory=bytearray)

    def raw(self, data: bytes) -> None:
        self.data += data

    def u32(self, *values: int) -> None:
        self.data += struct.pack(f"<{len(values)}I", *values)

    def i32(self, value: int) -> None:
        self.data += struct.pack("<i", value)

    def u64(self, value: int) -> None:
        self.data += struct.pack("<Q", value)

    def str(self, text: str) -> None:
        encoded = text.encode()
        if len(encoded) > 65535:
            raise ValueError(f"a name of {len(encoded)} bytes does not fit into the payload")
        self.u32(len(encoded))
        self.data += encoded

    def dims(self, shape: tuple[int, ...]) -> None:
        self.u32(len(shape), *shape)

    def encoding(self, encoding: ScaleOffset | None) -> None:
        self.u32(0 if encoding is None else 1)
        if encoding is not None:
            self.data += struct.pack("<fi", *encoding)


class _Reader:
    def __init__(self, data: memoryview) -> None:
        self.data = data
        self.at = 0

    def _take(self, n: int) -> memoryview:
        if n > len(self.data) - self.at:
            raise IncompatiblePayload("the payload is damaged: a field runs past its end")
        self.at += n
        return self.data[self.at - n : self.at]

    def u32(self) -> int:
        return int(struct.unpack("<I", self._take(4))[0])

    def i32(self) -> int:
        return int(struct.unpack("<i", self._take(4))[0])

    def u64(self) -> int:
        return int(struct.unpack("<Q", self._take(8))[0])

    def str(self) -> str:
        return bytes(self._take(self.u32())).decode("utf-8", "replace")

    def dims(self) -> tuple[int, ...]:
        n = self.u32()
        return struct.unpack(f"<{n}I", self._take(4 * n))

    def encoding(self) -> ScaleOffset | None:
        if self.u32() == 0:
            return None
        return ScaleOffset(*struct.unpack("<fi", self._take(8)))

    def io(self) -> IOEntry:
        name, scalar_type, dtype = self.str(), self.i32(), self.u32()
        shape, qnn_shape, encoding = self.dims(), self.dims(), self.encoding()
        self.u32()
        return IOEntry(name, scalar_type, dtype, shape, qnn_shape, encoding)

    def state(self) -> StateEntry:
        fqn, scalar_type, dtype, npu_dtype = self.str(), self.i32(), self.u32(), self.u32()
        shape, encoding = self.dims(), self.encoding()
        input_name, output_name, binding = self.str(), self.str(), self.u32()
        key = self.str() if self.u32() else ""
        rows = self.rows() if binding == Binding.DELTA else None
        scale = 1.0
        if binding == Binding.ACCUMULATE:
            (scale,) = struct.unpack("<f", self._take(4))
        return StateEntry(
            fqn, scalar_type, dtype, npu_dtype, shape, input_name, output_name, binding, key,
            encoding, rows, scale,
        )  # fmt: skip

    def rows(self) -> RowsEntry:
        return RowsEntry(self.str(), self.u64(), self.u32(), self.u32(), self.u32(), self.u32())

    def payload(self) -> Payload:
        method, graph, key = self.str(), self.str(), self.str()
        sha256, size, build_id = bytes(self._take(32)), self.u64(), self.str()
        core, soc, arch, target = (self.u32(), self.u32()), self.u32(), self.u32(), self.str()
        inputs = tuple(self.io() for _ in range(self.u32()))
        outputs = tuple(self.io() for _ in range(self.u32()))
        states = tuple(self.state() for _ in range(self.u32()))
        return Payload(
            method, graph, key, sha256, size, build_id, core, soc, arch, target,
            inputs, outputs, states,
        )  # fmt: skip
