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
from typing import BinaryIO

_SEAL = struct.Struct("<8sIIQ32s")
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
    packed = _SEAL.pack(b"ETQNNSEA", 1, crc, size, digest.digest())
    file.write(packed + struct.pack("<II", zlib.crc32(packed), 0))
