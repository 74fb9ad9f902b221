# SPDX-License-Identifier: BSD-3-Clause
"""The seal of a `.pte`: a checksum behind ExecuTorch's content, which has none of its own.

ExecuTorch ignores the seal.  `load` checks it, so that a damaged file is an error and not a crash.
The layout is described in runtime/session/seal.h.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from pathlib import Path
from typing import BinaryIO

_MAGIC = b"ETQNNSEA"
_SEAL = struct.Struct("<8sIIQ32s")
_SEAL_BYTES = 64
_CHUNK = 1 << 20


def seal(file: BinaryIO) -> None:
    """Appends the seal to a complete program.

    Args:
        file: open for reading and writing; its whole content is sealed.
    """
    file.flush()
    file.seek(0)
    digest, crc = hashlib.sha256(), 0
    while chunk := file.read(_CHUNK):
        digest.update(chunk)
        crc = zlib.crc32(chunk, crc)
    size = file.seek(0, os.SEEK_END)
    packed = _SEAL.pack(_MAGIC, 1, crc, size, digest.digest())
    file.write(packed + struct.pack("<II", zlib.crc32(packed), 0))


def program_sha256(path: str | os.PathLike[str]) -> str:
    """The name of a program, which state files refer to: SHA-256 of the file without its seal."""
    with Path(path).open("rb") as file:
        if file.seek(0, os.SEEK_END) >= _SEAL_BYTES:
            file.seek(-_SEAL_BYTES, os.SEEK_END)
            magic, _, _, _, digest = _SEAL.unpack(file.read(_SEAL.size))
            if magic == _MAGIC:
                return bytes(digest).hex()
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()
