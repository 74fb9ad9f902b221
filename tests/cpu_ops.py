# SPDX-License-Identifier: BSD-3-Clause
"""Ops that tests keep on the CPU: the op table has nearly all that ExecuTorch has kernels for."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from executorch_qnn.ops.registry import table

aten = torch.ops.aten


@pytest.fixture(scope="package", autouse=True)
def cosh_and_asinh_stay_on_the_cpu() -> Iterator[None]:
    """As if the op table did not have them."""
    with pytest.MonkeyPatch.context() as patch:
        for op in (aten.cosh.default, aten.asinh.default):
            patch.delitem(table(), op)
        yield
