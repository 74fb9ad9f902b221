# SPDX-License-Identifier: BSD-3-Clause
"""What the compile worker and its parent say to each other: pickles behind their length."""

from __future__ import annotations

import pickle
import struct
from dataclasses import dataclass
from typing import IO, Any

from .ir import Graph, Node

LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Open:
    """Opens the library and a device for one SoC; answers with `Opened`."""

    folder: str
    soc_model: int


@dataclass(frozen=True)
class Opened:
    build_id: str
    core_api: tuple[int, int, int]


@dataclass(frozen=True)
class Validate:
    """Asks QNN about nodes; answers with a list of reasons, `None` where a node is accepted."""

    nodes: list[Node]


@dataclass(frozen=True)
class Compile:
    """Compiles graphs into one context binary at `path`; answers with `Compiled`."""

    graphs: list[Graph]
    path: str


@dataclass(frozen=True)
class GraphStats:
    """What QNN's finalize says of a graph: DDR bytes per execute, and its own seconds.

    Attributes:
        ops: how many there are of each type.
    """

    finalize_s: float
    ddr_read: int | None
    ddr_write: int | None
    spill: int | None
    fill: int | None
    ops: dict[str, int]


@dataclass(frozen=True)
class Compiled:
    size: int
    sha256: bytes
    graphs: dict[str, GraphStats]
    cpu_s: float


@dataclass(frozen=True)
class Failed:
    """QNN refused; `graph` names the graph that it refused, if one."""

    message: str
    kind: str
    graph: str = ""


def send(stream: IO[bytes], message: object) -> None:
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    stream.write(LENGTH.pack(len(data)))
    stream.write(data)
    stream.flush()


def receive(stream: IO[bytes]) -> Any:
    """The next message.

    Raises:
        EOFError: the other side is gone.
    """
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        raise EOFError
    (n,) = LENGTH.unpack(head)
    data = stream.read(n)
    if len(data) < n:
        raise EOFError
    return pickle.loads(data)
