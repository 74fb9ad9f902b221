# SPDX-License-Identifier: BSD-3-Clause
"""Tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], header: Sequence[str] | None = None) -> str:
    """Left-aligned columns, two spaces apart."""
    lines = [[str(cell) for cell in row] for row in rows]
    if header is not None:
        lines.insert(0, list(header))
    if not lines:
        return ""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
