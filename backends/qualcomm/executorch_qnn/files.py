# SPDX-License-Identifier: BSD-3-Clause
"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replaced(target: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file that takes the place of another only if it is completely written.

    Args:
        mode: permissions of the new file.
    """
    fd, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(name)
    try:
        with os.fdopen(fd, "w+b") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        temporary.chmod(mode)
        temporary.replace(target)
    except BaseException:
        temporary.unlink()
        raise
