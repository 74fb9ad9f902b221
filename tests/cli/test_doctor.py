# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import pytest

from executorch_qnn.cli.doctor import fits


@pytest.mark.parametrize(
    ("installed", "specifier", "expected"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("2.14.1", ">=2.13,<2.14", False),
        ("1.5.1", "==1.5.1", True),
        ("1.5", "==1.5.0", True),
        ("1.5.1", "==1.5", False),
        ("0.18.0", ">=0.18, <0.19", True),
        ("2.7.0", "<=2.7", True),
        ("2.7.0", "!=2.7.0", False),
        ("3.0", ">2", True),
        ("4.70.1", "", True),
    ],
)
def test_versions_are_compared_as_numbers(installed: str, specifier: str, expected: bool) -> None:
    assert fits(installed, specifier) is expected


def test_a_specifier_that_cannot_be_read_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"~=1\.0"):
        fits("1.0", "~=1.0")
