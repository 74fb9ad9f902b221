# SPDX-License-Identifier: BSD-3-Clause
"""What quantization and the NPU cost, layer by layer, as plain data for text, JSON and HTML."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..text import table
from .report import STYLE, html_table


@dataclass(frozen=True)
class Accuracy:
    """How near values are to those that they should be, over all calls.

    Elements whose reference is not finite (masks) are left out.

    Attributes:
        sqnr_db: signal to noise in decibels; infinite if there is no noise, and minus infinite if
            a value is not finite or there is noise without a signal.
        cosine: of the angle between the two, as vectors.
        max_error: the greatest absolute difference.
    """

    sqnr_db: float
    cosine: float
    max_error: float


@dataclass(frozen=True)
class LayerAccuracy:
    """A value inside of the model.

    Attributes:
        layer: path of the module that makes it, with `@n` at a further call of the module; empty
            if that is the model itself.  An activation that clips is counted with the layer before
            it, as it is computed: both are named, joined by ` + `.
        node: its name in the exported program and in `Program.fake_quantized`.
        fake_vs_eager: what the bits cost; None for a program that is not quantized.
        delegate_vs_fake: what HTP adds to that.
        added_noise: the part of the noise of `delegate_vs_eager`, relative to the signal, that the
            nearest layers before this one do not have; 0 if they have more.
    """

    method: str
    layer: str
    node: str
    op: str
    shape: tuple[int, ...]
    fake_vs_eager: Accuracy | None
    delegate_vs_fake: Accuracy | None
    delegate_vs_eager: Accuracy
    added_noise: float

    @property
    def name(self) -> str:
        """The layer, or the node where the layer is the model itself."""
        return self.layer or self.node


@dataclass(frozen=True)
class OutputAccuracy:
    """An output of a method (`forward: output 0`), or a mutable buffer after the last call.

    Attributes:
        tapped_vs_eager: of the program that has the layers' values as further outputs.
        sqnr_db_by_call: of `delegate_vs_eager`, at each call of the method; empty for a buffer.
    """

    name: str
    shape: tuple[int, ...]
    fake_vs_eager: Accuracy | None
    delegate_vs_fake: Accuracy | None
    delegate_vs_eager: Accuracy
    tapped_vs_eager: Accuracy
    sqnr_db_by_call: tuple[float, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """What `compare` returns.

    Attributes:
        quantize: name of the recipe; None for fp16.
        calls: how many consecutive calls were compared.
        layers: in the order in which they are computed.
        notes: what to know when reading the figures.
    """

    target: str
    quantize: str | None
    calls: int
    layers: tuple[LayerAccuracy, ...]
    outputs: tuple[OutputAccuracy, ...]
    notes: tuple[str, ...] = ()

    @property
    def worst(self) -> LayerAccuracy | None:
        """The layer that adds most noise; None if there are no layers."""
        return max(self.layers, key=lambda v: v.added_noise, default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, which has no infinity: `"inf"` and `"-inf"` stand for it."""
        worst = self.worst
        about: dict[str, Any] = {
            **dataclasses.asdict(self),
            "worst": None if worst is None else {"method": worst.method, "node": worst.node},
        }
        return _finite(about)  # type: ignore[no-any-return]

    def to_json(self) -> str:
        """The comparison as one JSON document."""
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def to_text(self) -> str:
        """The comparison for a terminal."""
        return "\n".join(
            [
                self._title(),
                table(*self._layer_rows()),
                "",
                table(*self._output_rows()),
                *self._conclusions(),
            ]
        )

    def to_html(self) -> str:
        """The comparison as one self-contained HTML page with plots."""
        title = html.escape(f"executorch-qnn: {self._title()}")
        layers, outputs = (_dicts(*rows) for rows in (self._layer_rows(), self._output_rows()))
        return "\n".join(
            [
                f"<!doctype html><meta charset=utf-8><title>{title}</title>{STYLE}",
                f"<h1>{title}</h1>",
                *(f"<p>{html.escape(line)}</p>" for line in self._conclusions()),
                "<h2>Layers</h2>",
                _layers_svg(self.layers, self.worst),
                html_table(layers),
                "<h2>Outputs and state</h2>",
                _calls_svg([v for v in self.outputs if len(v.sqnr_db_by_call) > 1]),
                html_table(outputs),
            ]
        )

    def _title(self) -> str:
        calls = "1 call" if self.calls == 1 else f"{self.calls} calls"
        return f"{self.quantize or 'fp16'} on {self.target}, {calls}"

    def _conclusions(self) -> list[str]:
        lines = [f"note: {note}" for note in self.notes]
        if (worst := self.worst) is not None:
            after = _db(worst.delegate_vs_eager)
            lines.insert(
                0,
                f"most is lost in {worst.name} ({worst.op}, {worst.method}): noise of "
                f"{worst.added_noise:.1e} of the signal; {after} dB after it",
            )
        return lines

    def _layer_rows(self) -> tuple[list[list[str]], list[str]]:
        methods = len({v.method for v in self.layers}) > 1
        rows = [
            [
                *([v.method] if methods else []),
                *(v.layer or "-", v.node, v.op, _shape(v.shape)),
                *self._figures(v),
                f"{v.added_noise:.1e}",
            ]
            for v in self.layers
        ]
        head = [*(["method"] if methods else []), "layer", "node", "op", "shape"]
        return rows, [*head, *self._columns(), "added noise"]

    def _output_rows(self) -> tuple[list[list[str]], list[str]]:
        rows = [
            [v.name, _shape(v.shape), *self._figures(v), _db(v.tapped_vs_eager)]
            for v in self.outputs
        ]
        return rows, ["output or state", "shape", *self._columns(), "tapped/eager dB"]

    def _columns(self) -> list[str]:
        bits = ["fake/eager dB", "delegate/fake dB"] if self.quantize else []
        return [*bits, "delegate/eager dB", "cosine", "max error"]

    def _figures(self, of: LayerAccuracy | OutputAccuracy) -> list[str]:
        bits = [_db(of.fake_vs_eager), _db(of.delegate_vs_fake)] if self.quantize else []
        total = of.delegate_vs_eager
        return [*bits, _db(total), f"{total.cosine:.6f}", f"{total.max_error:.3g}"]


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _db(of: Accuracy | None) -> str:
    return "" if of is None else "exact" if of.sqnr_db == math.inf else f"{of.sqnr_db:.1f}"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))


def _dicts(rows: list[list[str]], head: list[str]) -> list[dict[str, object]]:
    return [dict(zip(head, row, strict=True)) for row in rows]


# -- plots -----------------------------------------------------------------------------------------

_TOP_DB = 100.0
"""Where exact values are drawn."""
_COLOURS = ("#1565c0", "#ef6c00", "#2e7d32", "#6a1b9a", "#c62828", "#00838f")
_LEFT, _WIDTH, _ROW = 320, 640, 18


def _clamped(db: float) -> float:
    return min(max(db, 0.0), _TOP_DB)


def _svg(height: float, parts: Sequence[str]) -> str:
    size = f'width="{_LEFT + _WIDTH + 20}" height="{height:.0f}"'
    return "\n".join([f'<svg {size} font-size="12">', *parts, "</svg>"])


def _text(x: float, y: float, text: str, **how: str) -> str:
    style = "".join(f' {k.replace("_", "-")}="{v}"' for k, v in how.items())
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}>{html.escape(text)}</text>'


def _line(points: Sequence[tuple[float, float]], colour: str) -> str:
    joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{joined}" fill="none" stroke="{colour}"/>'


def _dot(x: float, y: float, colour: str, title: str) -> str:
    about = f"<title>{html.escape(title)}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{about}</circle>'


def _legend(names: Sequence[str], y: float) -> list[str]:
    parts, x = [], float(_LEFT)
    for name, colour in zip(names, _COLOURS, strict=False):
        parts += [_dot(x, y - 4, colour, name), _text(x + 8, y, name)]
        x += 30 + 7 * len(name)
    return parts


def _layers_svg(layers: Sequence[LayerAccuracy], worst: LayerAccuracy | None) -> str:
    """A row for each layer, its figures from left (0 dB) to right (100 dB or exact)."""
    series = [
        (name, [(i, a) for i, v in enumerate(layers) if (a := getattr(v, key)) is not None])
        for name, key in (
            ("delegate against eager", "delegate_vs_eager"),
            ("fake-quant against eager", "fake_vs_eager"),
            ("delegate against fake-quant", "delegate_vs_fake"),
        )
    ]
    series = [s for s in series if s[1]]
    top = 40
    height = top + _ROW * (len(layers) + 1)
    parts = _legend([name for name, _ in series], 14)
    for db in range(0, 101, 20):
        x = _LEFT + _WIDTH * db / _TOP_DB
        parts += [
            _line([(x, top - 6), (x, height - _ROW)], "#ddd"),
            _text(x, top - 10, f"{db} dB", text_anchor="middle", fill="#666"),
        ]
    for i, layer in enumerate(layers):
        how = {"font_weight": "bold", "fill": "#c62828"} if layer is worst else {}
        label = layer.name if len(layer.name) < 48 else f"…{layer.name[-46:]}"
        parts.append(_text(_LEFT - 12, top + _ROW * (i + 0.75), label, text_anchor="end", **how))
    for (name, values), colour in zip(series, _COLOURS, strict=False):
        at = [
            (_LEFT + _WIDTH * _clamped(a.sqnr_db) / _TOP_DB, top + _ROW * (i + 0.5))
            for i, a in values
        ]
        parts.append(_line(at, colour))
        parts += [
            _dot(x, y, colour, f"{layers[i].name}: {name} {_db(a)} dB")
            for (x, y), (i, a) in zip(at, values, strict=True)
        ]
    return _svg(height, parts)


def _calls_svg(outputs: Sequence[OutputAccuracy]) -> str:
    """Signal to noise of each output from call to call."""
    if not outputs:
        return ""
    top, height = 30, 200
    calls = max(len(v.sqnr_db_by_call) for v in outputs)
    parts = _legend([v.name for v in outputs], 14)
    for db in range(0, 101, 20):
        y = top + height * (1 - db / _TOP_DB)
        parts += [
            _line([(_LEFT, y), (_LEFT + _WIDTH, y)], "#ddd"),
            _text(_LEFT - 12, y + 4, f"{db} dB", text_anchor="end", fill="#666"),
        ]
    for v, colour in zip(outputs, _COLOURS, strict=False):
        at = [
            (_LEFT + _WIDTH * i / (calls - 1), top + height * (1 - _clamped(db) / _TOP_DB))
            for i, db in enumerate(v.sqnr_db_by_call)
        ]
        parts.append(_line(at, colour))
        parts += [
            _dot(x, y, colour, f"{v.name}, call {i}: {db:.1f} dB")
            for i, ((x, y), db) in enumerate(zip(at, v.sqnr_db_by_call, strict=True))
        ]
    parts.append(_text(_LEFT, top + height + 18, f"calls 0 to {calls - 1}", fill="#666"))
    return _svg(top + height + 24, parts)
