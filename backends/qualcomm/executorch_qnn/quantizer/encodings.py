# SPDX-License-Identifier: BSD-3-Clause
"""Encodings as AIMET's JSON: those of a quantized program, and those that a program is given.

The schema is AIMET's "Encoding Format Specification".  Version 1.0.0 is written, with one entry for
each tensor; it and the versions before it (0.4.0 to 0.6.1, a list of encodings for each name) are
read.  An integer `q` from 0 to `2**bw - 1` stands for `scale * (q + offset)`.

A value has the name of the node that makes it (`forward/NAME` where there are several methods), a
parameter or a buffer its fully qualified one.  What one reader sees otherwise than all others has
the name `VALUE:READER`.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..errors import LoweringError
from .batch_norm import ORIGIN
from .functional import attribute
from .observers import BlockObserver, Follower, RangeObserver, WeightObserver
from .recipe import QuantRecipe, bits_of

Node = torch.fx.Node
Observer: TypeAlias = "RangeObserver | WeightObserver | BlockObserver"
Source: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any]"

VERSION = "1.0.0"
_LISTS = ("0.4", "0.5", "0.6")
_SECTIONS = ("activation_encodings", "param_encodings")
_SCHEMES = {"mse": "post_training_tf_enhanced", "percentile": "post_training_percentile"}


@dataclass(frozen=True, eq=False)
class Encoding:
    """Bits, scales and offsets of one tensor.

    Attributes:
        scale: float32 of shape [1], [channels], or [channels, blocks] where there are blocks.
        offset: integers as many as channels.
        block: length of a block along the axis of the inputs; 0 for none.
    """

    bits: int
    scale: torch.Tensor
    offset: tuple[int, ...]
    symmetric: bool
    block: int = 0

    def same(self, other: Encoding) -> bool:
        return (
            (self.bits, self.offset, self.block) == (other.bits, other.offset, other.block)
            and torch.equal(self.scale, other.scale)
        )  # fmt: skip

    def to_json(self, name: str) -> dict[str, Any]:
        """An entry of version 1.0.0."""
        kind = (
            "PER_BLOCK" if self.block else "PER_CHANNEL" if len(self.offset) > 1 else "PER_TENSOR"
        )
        scale, more, bits, offset = self.scale, dict[str, Any](), self.bits, self.offset
        if self.block:
            more["block_size"] = self.block
            offset = tuple(n for n in offset for _ in range(scale.shape[1]))
            if (parts := _lpbq(scale)) is not None:
                kind, bits = "LPBQ", 2 * self.bits
                scale, factors = parts
                offset = (-(2 ** (bits - 1)),) * len(scale)
                more |= {
                    "compressed_bw": self.bits,
                    "per_block_int_scale": factors.flatten().int().tolist(),
                }
        return {
            "name": name,
            "enc_type": kind,
            "dtype": "INT",
            "bw": bits,
            "is_sym": self.symmetric,
            "scale": scale.flatten().tolist(),
            "offset": list(offset),
        } | more


def _lpbq(scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Scales of channels, and integers whose products with them are those of the blocks.

    Returns:
        Shapes [channels] and [channels, blocks]; None if there are none that are right to the bit.
    """
    most = scale.amax(1, keepdim=True)
    found, factors = torch.zeros_like(most), torch.zeros_like(scale)
    for top in range(16, 0, -1):
        near = most / top
        up, down = (torch.nextafter(near, near.new_tensor(x)) for x in (math.inf, 0.0))
        for each in (near, up, down):
            whole = (scale / each).round()
            right = ((whole * each == scale) & (whole >= 1) & (whole <= 16)).all(1, keepdim=True)
            new = right & (found == 0)
            found, factors = torch.where(new, each, found), torch.where(new, whole, factors)
    return (found[:, 0], factors) if bool((found > 0).all()) else None


# -- where encodings are -----------------------------------------------------------------------


class _Given(RangeObserver):
    """What another observer is from now on: an encoding, whatever is seen."""

    scale: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, of: RangeObserver, encoding: Encoding) -> None:
        super().__init__(
            label=of.label,
            dtype=of.dtype,
            qscheme=of.qscheme,
            quant_min=of.quant_min,
            quant_max=of.quant_max,
        )
        self.register_buffer("scale", encoding.scale.clone())
        self.register_buffer("zero_point", torch.tensor([-encoding.offset[0]]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def calculate_qparams(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.scale, self.zero_point


@dataclass(frozen=True)
class Place:
    """Where a module has an encoding.

    Attributes:
        name: of the value.
        reader: what tells it from other places of that name.
        parameter: it is a parameter, or another constant.
        tensor: of a weight; what a buffer starts with.
    """

    name: str
    reader: str
    observer: Observer
    parameter: bool = False
    tensor: torch.Tensor | None = None

    @property
    def own_name(self) -> str:
        return f"{self.name}:{self.reader}"

    @property
    def constant(self) -> bool:
        """Whether one call of the model shows all that it ever is."""
        if isinstance(self.observer, RangeObserver):
            return self.observer.fixed
        return not getattr(self.observer, "seq_mse", False)

    def encoding(self) -> Encoding:
        """What has been found or given."""
        seen = self.observer
        if isinstance(seen, RangeObserver):
            scale, zero = seen.calculate_qparams()
            symmetric = seen.qscheme is torch.per_tensor_symmetric
            bits = 8 * seen.dtype.itemsize
            return Encoding(bits, scale.reshape(1).float(), (-int(zero),), symmetric)
        scale, bits = seen.scale.float(), _bits(seen)
        block = seen.block if isinstance(seen, BlockObserver) else 0
        scale = scale.flatten(1) if block else scale.reshape(-1)
        return Encoding(bits, scale, (-(2 ** (bits - 1)),) * len(scale), True, block)

    def give(self, e: Encoding, name: str) -> None:
        """Has the value take an encoding.

        Raises:
            LoweringError: it is of another form.
        """
        seen = self.observer
        bits = 8 * seen.dtype.itemsize if isinstance(seen, RangeObserver) else _bits(seen)
        if e.bits != bits:
            raise _refused(name, f"has {e.bits} bits there, and {bits} by the recipe")
        middle = -(2 ** (bits - 1))
        if isinstance(seen, RangeObserver):
            if len(e.offset) != 1 or e.block:
                raise _refused(name, "has a scale for each channel, and is an activation")
            if seen.qscheme is torch.per_tensor_symmetric and e.offset[0] != middle:
                raise _refused(
                    name,
                    f"has the offset {e.offset[0]}; HTP's products have second operands with zero "
                    f"in the middle, that is {middle}",
                )
            if not 2 * middle < e.offset[0] <= 0:
                raise _refused(name, f"has the offset {e.offset[0]}, not one of {bits} bits")
            self._check_start(e, name)
            seen.joined = _Given(seen, e)
            return
        if any(o not in (middle, middle + 1) for o in e.offset):
            raise _refused(name, f"has offsets; weights are symmetric: it must be {middle}")
        block = seen.block if isinstance(seen, BlockObserver) else 0
        if e.block != block:
            kinds = [f"blocks of {n}" if n else "no blocks" for n in (e.block, block)]
            raise _refused(name, f"has {kinds[0]} there, and {kinds[1]} by the recipe")
        shape = _shape(self)
        scale = e.scale
        if not block and len(scale) == 1:
            scale = scale.expand(shape[0])
        if scale.numel() != math.prod(shape):
            what = "scales of blocks" if block else "channels"
            raise _refused(name, f"has {scale.numel()} {what}, and the weight {math.prod(shape)}")
        seen.scale, seen.fixed, seen.seq_mse = scale.reshape(shape).clone(), True, False

    def _check_start(self, e: Encoding, name: str) -> None:
        if self.tensor is None:
            return
        scale, offset = float(e.scale[0]), e.offset[0]
        low, high = scale * (offset - 0.5), scale * (2**e.bits - 0.5 + offset)
        least, most = (float(x) for x in torch.aminmax(self.tensor.float()))
        if least < low or most > high:
            raise _refused(
                name, f"ends at {low:g} and {high:g}; the buffer starts from {least:g} to {most:g}"
            )

    def kind(self) -> tuple[object, ...]:
        """What an encoding must fit."""
        seen = self.observer
        return type(seen), seen.dtype, seen.quant_max, getattr(seen, "qscheme", None)


def _bits(seen: WeightObserver | BlockObserver) -> int:
    return int(seen.quant_max + 1).bit_length()


def _shape(place: Place) -> tuple[int, ...]:
    """Shape of a weight's scales."""
    assert place.tensor is not None
    w, seen = place.tensor, place.observer
    if isinstance(seen, BlockObserver):
        return (w.shape[0], w.shape[1] // seen.block, *[1] * (w.dim() - 2))
    assert isinstance(seen, WeightObserver)
    return (1,) if seen.ch_axis is None else (w.shape[seen.ch_axis],)


def places_of(
    prepared: torch.fx.GraphModule, made: Mapping[Any, Any], slots: Mapping[str, str], method: str
) -> list[Place]:
    """All places of encodings in a prepared module.

    Args:
        made: nodes, and edges as (value, reader), to observers, as torchao had them.
        slots: buffer to slot.
        method: what names of values begin with; empty for nothing.
    """
    inserted = {id(_final(m)) for m in prepared.modules()}
    found: list[tuple[int, Place]] = []
    for at, observer in made.items():
        seen = _final(observer)
        if id(seen) not in inserted:
            continue
        assert isinstance(seen, (RangeObserver, WeightObserver, BlockObserver))
        value, reader = (at[0], at[1].name) if isinstance(at, tuple) else (at, "output")
        if value.op != "get_attr":
            place = Place(f"{method}/{value.name}" if method else value.name, reader, seen)
            found.append((1 if value is at else 3, place))
            continue
        tensor, fqn = attribute(prepared, str(value.target)), str(value.target)
        if fqn in slots:
            found.append((0, Place(slots[fqn], "buffer", seen, tensor=tensor)))
        else:
            weight = not isinstance(seen, RangeObserver)
            place = Place(
                value.meta.get(ORIGIN, fqn), reader, seen, True, tensor if weight else None
            )
            found.append((2 if weight else 3, place))
    return [place for _, place in sorted(found, key=lambda f: f[0])]


def _final(observer: Any) -> Any:
    """What decides on an observer's encoding."""
    while True:
        if isinstance(observer, Follower):
            observer = observer.leader
        elif isinstance(observer, RangeObserver) and observer.joined is not None:
            observer = observer.joined
        else:
            return observer


# -- reading and writing -----------------------------------------------------------------------


@dataclass
class Encodings:
    """Encodings by name, in the order of a file.

    Attributes:
        values: of activations and buffers.
        parameters: of constants.
        source: where they come from, for messages.
    """

    values: dict[str, Encoding] = field(default_factory=dict)
    parameters: dict[str, Encoding] = field(default_factory=dict)
    source: str = "the encodings"

    @staticmethod
    def of(places: Iterable[Place]) -> Encodings:
        """What has been found or given at all places."""
        made = Encodings()
        for place in places:
            if not isinstance(place.observer, RangeObserver) and not place.observer.scale.numel():
                continue  # of a layer that is never computed
            of, encoding = made.parameters if place.parameter else made.values, place.encoding()
            if not of.setdefault(place.name, encoding).same(encoding):
                of[place.own_name] = encoding
        return made

    def to_json(self, recipe: QuantRecipe | str) -> dict[str, Any]:
        """The whole document, of version 1.0.0.

        Args:
            recipe: for the part on how it was made.
        """
        recipe = QuantRecipe.of(recipe)
        bits = bits_of(recipe.base)
        assert bits is not None
        sections = zip(_SECTIONS, (self.values, self.parameters), strict=True)
        return {
            "version": VERSION,
            **{key: [e.to_json(name) for name, e in of.items()] for key, of in sections},
            "quantizer_args": {
                "activation_bitwidth": bits.activations,
                "dtype": "int",
                "is_symmetric": True,
                "param_bitwidth": bits.weights,
                "per_channel_quantization": bits.weights < 16,
                "quant_scheme": _SCHEMES.get(recipe.observer, "post_training_tf"),
            },
            "excluded_layers": [],
        }

    @staticmethod
    def read(source: Source) -> Encodings:
        """From a file, or the document itself.

        Raises:
            LoweringError: it is none, or of a version that is not known.
        """
        if isinstance(source, Mapping):
            return _parsed(source, "the encodings")
        path = Path(source)
        try:
            document = json.loads(path.read_text("utf-8"))
        except OSError as e:
            raise LoweringError(f"encodings: cannot read {path}: {e.strerror}") from None
        except ValueError as e:
            raise LoweringError(f"encodings: {path} is not JSON: {e}") from None
        return _parsed(document, str(path))

    def give(self, places: Sequence[Place]) -> list[Place]:
        """Has places take the encodings of their names.

        Returns:
            Those that have none.

        Raises:
            LoweringError: names are unknown, an encoding does not fit its tensor, or two are for
                values that have one in common.
        """
        given = self.values | self.parameters
        by_name: dict[str, list[Place]] = {}
        for place in places:
            by_name.setdefault(place.name, []).append(place)
        self._check_names(by_name)
        taken: dict[int, tuple[str, Encoding]] = {}
        for name, alike in by_name.items():
            for place in alike:
                one = place.own_name
                if one not in given:
                    one = name
                    if one not in given or place.kind() != alike[0].kind():
                        continue
                other, encoding = taken.setdefault(id(place.observer), (one, given[one]))
                if not encoding.same(given[one]):
                    raise LoweringError(
                        f"encodings: {other} and {one} have one encoding, because values are only "
                        "moved between them or stored in one buffer; there they have two"
                    )
                place.give(given[one], one)
        return [p for p in places if id(p.observer) not in taken]

    def _check_names(self, by_name: Mapping[str, Sequence[Place]]) -> None:
        known = {*by_name, *(p.own_name for places in by_name.values() for p in places)}
        unknown = [n for n in self.values | self.parameters if n not in known]
        if not unknown:
            return
        have = ", ".join(sorted(by_name)[:8])
        if len(unknown) == len(self.values | self.parameters):
            raise LoweringError(
                f"{self.source}: nothing in it has a name of this program, which has {have}...; "
                "`Program.save_encodings` writes them all"
            )
        near = [m for n in unknown for m in difflib.get_close_matches(n, known, 1)]
        hint = f"; did you mean {', '.join(near[:5])}?" if near else ""
        raise LoweringError(
            f"{self.source}: the program quantizes nothing named {', '.join(unknown[:8])}"
            f"{' and more' if len(unknown) > 8 else ''}{hint}"
        )


def _refused(name: str, why: str) -> LoweringError:
    return LoweringError(f"encodings: {name} {why}")


def _parsed(document: Any, source: str) -> Encodings:
    if not isinstance(document, Mapping) or not any(s in document for s in _SECTIONS):
        raise LoweringError(
            f"{source}: no encodings of AIMET: it has no {' and no '.join(_SECTIONS)}"
        )
    version = str(document.get("version", "0.4.0"))
    if version != VERSION and not version.startswith(_LISTS):
        raise LoweringError(
            f"{source}: its version is {version}; {VERSION} and those before it are read, which "
            "AIMET writes when asked for encoding_version"
        )
    made = Encodings(source=source)
    for section, of in zip(_SECTIONS, (made.values, made.parameters), strict=True):
        entries = document.get(section, [])
        if isinstance(entries, Mapping):
            named = list(entries.items())
        else:
            named = [(e.get("name"), e) if isinstance(e, Mapping) else (None, e) for e in entries]
        for name, entry in named:
            try:
                of[str(name)] = _old(entry) if isinstance(entries, Mapping) else _current(entry)
            except (KeyError, TypeError, ValueError, AttributeError) as e:
                what = f"lacks {e}" if isinstance(e, KeyError) else f"is not right: {e}"
                raise LoweringError(f"{source}: the encoding of {name} {what}") from None
    return made


def _current(entry: Mapping[str, Any]) -> Encoding:
    """An entry of version 1.0.0."""
    kind = entry["enc_type"]
    _check_integer(entry["dtype"])
    bits, size = int(entry["bw"]), 0
    scale = torch.tensor(entry["scale"], dtype=torch.float32)
    offset = [int(o) for o in entry["offset"]]
    if kind in ("PER_BLOCK", "LPBQ"):
        size = int(entry["block_size"])
    if kind == "LPBQ":
        bits = int(entry["compressed_bw"])
        factors = torch.tensor(entry["per_block_int_scale"], dtype=torch.float32)
        scale = scale[:, None] * factors.reshape(len(scale), -1)
        offset = [-(2 ** (bits - 1))] * len(scale)
    elif kind not in ("PER_TENSOR", "PER_CHANNEL", "PER_BLOCK"):
        raise ValueError(f"there is no enc_type {kind!r}")
    if len(offset) == 1:
        offset *= len(scale)
    if len(offset) != len(scale):
        raise ValueError(f"it has {len(scale)} scales and {len(offset)} offsets")
    return _checked(Encoding(bits, scale, tuple(offset), bool(entry.get("is_sym")), size))


def _old(entry: Any) -> Encoding:
    """An entry of the versions before: an encoding for each channel."""
    each = entry if isinstance(entry, list) else [entry]
    scales, offsets = [], []
    for e in each:
        _check_integer(e.get("dtype", "int"))
        steps = 2 ** int(e["bitwidth"]) - 1
        scale = e["scale"] if "scale" in e else (e["max"] - e["min"]) / steps
        scales.append(float(scale))
        offsets.append(round(e["offset"] if "offset" in e else e["min"] / scale))
    symmetric = str(each[0].get("is_symmetric", "False")).lower() == "true"
    bits, scale = int(each[0]["bitwidth"]), torch.tensor(scales, dtype=torch.float32)
    return _checked(Encoding(bits, scale, tuple(offsets), symmetric))


def _check_integer(dtype: str) -> None:
    if dtype.lower() != "int":
        raise ValueError(
            f"it is {dtype}; what is to be a float is left out of the recipe, not given an encoding"
        )


def _checked(e: Encoding) -> Encoding:
    if not e.scale.numel() or not bool(((e.scale > 0) & e.scale.isfinite()).all()):
        raise ValueError("scales are finite and above zero")
    return e
