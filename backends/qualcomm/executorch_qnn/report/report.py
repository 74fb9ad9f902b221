# SPDX-License-Identifier: BSD-3-Clause
"""The report of a lowering, as plain data that goes into JSON, text or HTML."""

from __future__ import annotations

import dataclasses
import html
import json
from dataclasses import dataclass, field

STYLE = (
    "<style>body{font:14px system-ui;margin:2em}table{border-collapse:collapse}"
    "td,th{border:1px solid #ccc;padding:.2em .6em;text-align:left}</style>"
)


@dataclass(frozen=True)
class DelegateReport:
    """One delegate of a method.

    Attributes:
        nodes: ATen nodes that it replaces; `qnn_ops`: QNN ops that it consists of.
        transposes: those of them that change the order of axes, and did not cancel.
        ddr_read_bytes: what QNN's finalize counts per execution, `None` if it does not say.
        static_bytes: weights and constants of its graph, before the compiler's layout.
    """

    graph: str
    nodes: int
    qnn_ops: int
    transposes: int
    inputs: int
    outputs: int
    states: int
    finalize_s: float
    ddr_read_bytes: int | None
    ddr_write_bytes: int | None
    static_bytes: int
    context_bytes: int


@dataclass(frozen=True)
class OpReport:
    """A node, why it is listed, and the line of the user's model that it comes from."""

    node: str
    op: str
    reason: str
    source: str = ""


@dataclass(frozen=True)
class StateReport:
    """A mutable buffer.

    Attributes:
        owner: `delegate` (lives in QNN's memory) or `host`.
        binding: `in_place`, `double_buffer` or `write_only` for a delegate's, else empty.
        reason: why this owner and this binding.
    """

    fqn: str
    shape: tuple[int, ...]
    dtype: str
    stored: str
    nbytes: int
    owner: str
    binding: str
    reason: str


@dataclass(frozen=True)
class MethodReport:
    """One method of a program.

    Attributes:
        cpu_ops: what runs on the CPU.
        fp16_ops: what a delegate computes in fp16 although the model is quantized around it.
        retraces: how often torch had to trace the exported program again, one or none.
    """

    delegates: list[DelegateReport] = field(default_factory=list)
    cpu_ops: list[OpReport] = field(default_factory=list)
    fp16_ops: list[OpReport] = field(default_factory=list)
    state: list[StateReport] = field(default_factory=list)
    retraces: int = 0


@dataclass(frozen=True)
class Report:
    """What became of each method.

    Attributes:
        cpu_s: CPU seconds of each stage of the lowering in this process.
        compile_cpu_s: CPU seconds of QNN's compiler in its own process.
    """

    target: str
    methods: dict[str, MethodReport]
    cpu_s: dict[str, float]
    compile_cpu_s: float

    def to_json(self) -> str:
        """The report as one JSON document."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def to_text(self) -> str:
        """The report for a terminal."""
        lines = [f"target {self.target}"]
        for name, m in self.methods.items():
            lines.append(f"method {name}: {len(m.delegates)} delegates, {len(m.cpu_ops)} CPU ops")
            for d in m.delegates:
                ddr = (
                    ""
                    if d.ddr_write_bytes is None
                    else f", DDR {d.ddr_read_bytes:,} read and {d.ddr_write_bytes:,} written"
                )
                lines.append(
                    f"  delegate {d.graph}: {d.nodes} nodes, {d.qnn_ops} QNN ops, "
                    f"{d.states} states, {d.static_bytes:,} static bytes{ddr}"
                )
            lines += [
                f"  {where} {op.node} ({op.op}): {op.reason}{'; ' + op.source if op.source else ''}"
                for where, ops in (("CPU", m.cpu_ops), ("fp16", m.fp16_ops))
                for op in ops
            ]
            lines += [
                f"  state {s.fqn}: {s.stored}{list(s.shape)}, {s.owner}"
                f"{', ' + s.binding if s.binding else ''}: {s.reason}"
                for s in m.state
            ]
        return "\n".join(lines)

    def to_html(self) -> str:
        """The report as one self-contained HTML page."""
        parts = [
            "<!doctype html><meta charset=utf-8><title>executorch-qnn report</title>",
            STYLE,
            f"<h1>executorch-qnn: {html.escape(self.target)}</h1>",
        ]
        for name, m in self.methods.items():
            parts.append(f"<h2>{html.escape(name)}</h2>")
            tables: list[tuple[str, list[DelegateReport] | list[OpReport] | list[StateReport]]]
            tables = [
                ("Delegates", m.delegates),
                ("CPU ops", m.cpu_ops),
                ("Computed in fp16", m.fp16_ops),
                ("State", m.state),
            ]
            for title, rows in tables:
                parts.append(f"<h3>{title}: {len(rows)}</h3>")
                parts.append(html_table([dataclasses.asdict(r) for r in rows]))
        return "\n".join(parts)


def html_table(rows: list[dict[str, object]]) -> str:
    """Rows with the same keys, which are the header."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(k)}</th>" for k in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(v))}</td>" for v in row.values()) + "</tr>"
        for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
