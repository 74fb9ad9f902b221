# SPDX-License-Identifier: BSD-3-Clause
"""docs/op_coverage.md says what the op table does, and the op table refuses what it cannot do."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from executorch_qnn.ops.cpu import UNWRITTEN, why_on_cpu
from executorch_qnn.ops.registry import table

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import op_coverage

aten = torch.ops.aten


@pytest.fixture(scope="module")
def samples(qnn_libraries: str) -> list[Any]:
    return op_coverage.observe()


def test_the_page_is_up_to_date(samples: list[Any]) -> None:
    now, page = op_coverage.page(samples), op_coverage.PAGE.read_text()
    if now != page:
        changed = sorted(set(now.splitlines()) ^ set(page.splitlines()))
        pytest.fail(f"run `{op_coverage.COMMAND}`; it changes:\n" + "\n".join(changed[:20]))


def test_every_op_of_the_table_and_every_core_op_is_on_the_page(samples: list[Any]) -> None:
    page = op_coverage.page(samples)
    ops = {*table(), *op_coverage.core_ops()}
    assert [op for op in ops if f"`{op_coverage.name(op)}`" not in page] == []


def test_the_op_table_takes_or_refuses_every_sample(samples: list[Any]) -> None:
    assert op_coverage.faults(samples) == []


def test_every_row_has_been_sampled(samples: list[Any]) -> None:
    assert op_coverage.UNSEEN not in op_coverage.page(samples)


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        (aten.nonzero.default, "the shape of its result depends on values"),
        (aten.masked_select.default, "the shape of its result depends on values"),
        (aten._local_scalar_dense.default, "takes a number out of a tensor"),
        (aten.rand.default, "no random numbers"),
        (aten._fft_r2c.default, "no complex numbers"),
        (aten.convolution_backward.default, "training"),
        (aten.sym_size.int, "not fixed"),
        (torch.ops.higher_order.cond, "no control flow"),
        (torch.ops.quantized_decomposed.quantize_per_tensor.default, "custom op"),
        (aten.mode.default, UNWRITTEN),
    ],
)
def test_an_op_without_a_row_has_a_reason_and_a_way_out(target: Any, reason: str) -> None:
    why = why_on_cpu(target)
    assert reason in why
    assert ";" in why
