# SPDX-License-Identifier: BSD-3-Clause
"""Which chips there are: one table of SoC and HTP facts, and `Target`, one row of it.

HTP architecture, VTCM size and fp16 support are what the compiler itself answers for the SoC number
(`tests/test_target.py` asks it again); the names are Qualcomm's public part numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from .errors import QnnError


class UnknownTarget(QnnError, ValueError):
    """No SoC of that name is in the table; the message lists the names that are."""


class _Soc(NamedTuple):
    soc_model: int
    htp_arch: int
    vtcm_mb: int
    fp16: bool
    marketing_name: str


_SOCS: dict[str, _Soc] = {
    # Phones
    "SM7325": _Soc(35, 68, 2, False, "Snapdragon 778G"),
    "SM7350": _Soc(32, 68, 2, False, "Snapdragon 780G"),
    "SM7450": _Soc(41, 69, 2, True, "Snapdragon 7 Gen 1"),
    "SM7475": _Soc(54, 69, 4, False, "Snapdragon 7+ Gen 2"),
    "SM7550": _Soc(64, 73, 2, False, "Snapdragon 7 Gen 3"),
    "SM7635": _Soc(73, 73, 2, False, "Snapdragon 7s Gen 3"),
    "SM7675": _Soc(70, 73, 4, False, "Snapdragon 7+ Gen 3"),
    "SM7750": _Soc(86, 73, 4, False, "Snapdragon 7 Gen 4"),
    "SM8350": _Soc(30, 68, 4, True, "Snapdragon 888"),
    "SM8450": _Soc(36, 69, 8, True, "Snapdragon 8 Gen 1"),
    "SM8475": _Soc(42, 69, 8, True, "Snapdragon 8+ Gen 1"),
    "SM8550": _Soc(43, 73, 8, True, "Snapdragon 8 Gen 2"),
    "SM8635": _Soc(68, 73, 4, False, "Snapdragon 8s Gen 3"),
    "SM8650": _Soc(57, 75, 8, True, "Snapdragon 8 Gen 3"),
    "SM8735": _Soc(85, 73, 8, False, "Snapdragon 8s Gen 4"),
    "SM8750": _Soc(69, 79, 8, True, "Snapdragon 8 Elite"),
    "SM8845": _Soc(97, 81, 8, True, "Snapdragon 8 Gen 5"),
    "SM8850": _Soc(87, 81, 8, True, "Snapdragon 8 Elite Gen 5"),
    # PCs
    "SC8280XP": _Soc(37, 68, 4, False, "Snapdragon 8cx Gen 3"),
    "SC8380XP": _Soc(60, 73, 8, True, "Snapdragon X Elite"),
    "SC8480XP": _Soc(88, 81, 8, True, "Snapdragon X2 Elite"),
    # Embedded
    "QCM6490": _Soc(93, 68, 2, False, "Dragonwing QCM6490"),
    "QCM6690": _Soc(78, 73, 2, False, "Dragonwing QCM6690"),
    "QCS8300": _Soc(82, 75, 8, True, "Dragonwing IQ-8275"),
    "QCS8550": _Soc(66, 73, 8, True, "Dragonwing QCS8550"),
    "QCS9100": _Soc(77, 73, 8, True, "Dragonwing IQ-9075"),
    # Cars
    "SA8255": _Soc(52, 73, 8, True, "SA8255P"),
    "SA8295": _Soc(39, 68, 8, True, "SA8295P"),
    "SA8540": _Soc(62, 68, 8, True, "SA8540P"),
    "SA8620P": _Soc(67, 75, 8, True, "SA8620P"),
    "SA8797": _Soc(72, 81, 16, True, "SA8797P"),
    # Headsets, glasses and watches
    "SAR2230P": _Soc(95, 81, 4, False, "SAR2230P"),
    "SSG2115P": _Soc(46, 73, 2, False, "Snapdragon AR2 Gen 1"),
    "SSG2125P": _Soc(58, 73, 2, False, "Snapdragon AR1 Gen 1"),
    "SW6100": _Soc(96, 81, 4, False, "SW6100"),
    "SXR1230P": _Soc(45, 73, 2, False, "SXR1230P"),
    "SXR2230P": _Soc(53, 69, 8, True, "Snapdragon XR2 Gen 2"),
    "SXR2330P": _Soc(75, 79, 8, True, "SXR2330P"),
}


@dataclass(frozen=True)
class Target:
    """One SoC that a program is compiled for: `Target("SM8650")`; the case of the name is free.

    Attributes:
        name: Qualcomm's part number in capitals.
        soc_model: the number that QNN knows the SoC by.
        htp_arch: version of the Hexagon NPU, 75 for v75.
        vtcm_mb: tightly coupled memory of the NPU in MiB, all of it.
        fp16: whether the NPU computes in fp16; without it a model must be quantized.
        marketing_name: the name on the box, or the part number where there is none.

    Raises:
        UnknownTarget: no such name; a `QnnError` and a `ValueError`.
    """

    name: str
    soc_model: int = field(init=False)
    htp_arch: int = field(init=False)
    vtcm_mb: int = field(init=False)
    fp16: bool = field(init=False)
    marketing_name: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        name = self.name.strip().upper()
        if name not in _SOCS:
            known = ", ".join(_SOCS)
            raise UnknownTarget(f"unknown target {self.name!r}; known targets: {known}")
        object.__setattr__(self, "name", name)
        for attribute, value in _SOCS[name]._asdict().items():
            object.__setattr__(self, attribute, value)

    def __str__(self) -> str:
        return f"{self.name} (v{self.htp_arch}, {self.marketing_name})"


def targets() -> list[Target]:
    """Every known target, grouped by kind of device."""
    return [Target(name) for name in _SOCS]
