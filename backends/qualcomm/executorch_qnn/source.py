# SPDX-License-Identifier: BSD-3-Clause
"""Where in the user's model a node comes from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.fx import Node


def source_of(node: Node) -> str:
    """Like `File "model.py", line 7, in forward: y = torch.cosh(x)`; empty if it is not known."""
    frames = str(node.meta.get("stack_trace") or "").split('File "')[1:]
    for frame in reversed(frames):
        if not frame.startswith("<"):  # what torch has generated
            return 'File "' + ": ".join(s.strip() for s in frame.splitlines() if s.strip())
    return ""


def called_in(node: Node) -> str:
    """The same as the end of a sentence about `node`."""
    source = source_of(node)
    return f"; the model calls it in {source}" if source else ""
