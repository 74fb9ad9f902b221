# SPDX-License-Identifier: BSD-3-Clause
"""What a lowering is doing, and what it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Stages:
    """Names and times the stages of a lowering."""

    def __init__(self, progress: Callable[[str], None] | None = None) -> None:
        self.progress = progress
        self.cpu_s: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        if self.progress is not None:
            self.progress(name)
        start = time.process_time()
        try:
            yield
        finally:
            self.cpu_s[name] = self.cpu_s.get(name, 0.0) + time.process_time() - start
