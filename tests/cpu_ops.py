# SPDX-License-Identifier: BSD-3-Clause
"""Ops that tests keep on the CPU: the op table has nearly all that ExecuTorch has kernels for."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch._ops import OpOverload

from executorch_qnn.ops.registry import table

aten = torch.ops.aten


@contextlib.contextmanager
def without(*ops: OpOverload) -> Iterator[None]:
    """As if the op table did not have them."""
    with pytest.MonkeyPatch.context() as patch:
        for op in ops:
            patch.delitem(table(), op)
        yield


@pytest.fixture(scope="package", autouse=True)
def cosh_and_asinh_stay_on_the_cpu() -> Iterator[None]:
    with without(aten.cosh.default, aten.asinh.default):
        yield
