# SPDX-License-Identifier: BSD-3-Clause
"""The seal of a `.pte`: a digest behind ExecuTorch's content, which has no checksum of its own.

ExecuTorch ignores the seal.  `load` checks it, so that a damaged file is an error and not a crash.
The layout is described in runtime/session/seal.h.
"""

from __future__ import annotations

import hashlib
import os
import struct
from io import BufferedRandom

_SEAL = struct.Struct("<8sIIQ32sQ")


def seal(file: BufferedRandom) -> None:
    """Appends the seal to a complete program.

    Args:
        file: open for reading and writing; its whole content is sealed.
    """
    file.flush()
    file.seek(0)
    digest = hashlib.file_digest(file, "sha256").digest()
    size = file.seek(0, os.SEEK_END)
    file.write(_SEAL.pack(b"ETQNNSEA", 1, 0, size, digest, 0))
