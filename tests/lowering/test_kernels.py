# SPDX-License-Identifier: BSD-3-Clause
"""Ops that neither QNN nor ExecuTorch's runtime has."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import executorch_qnn as qnn
from executorch_qnn.lowering.kernels import EXTRA

from .test_lower import Fn, check, forward


def test_erfcx_of_core_ops_is_exact_to_single_precision() -> None:
    erfcx = EXTRA[torch.ops.aten.special_erfcx.default]
    x = torch.cat([torch.linspace(-3, 30, 4001), torch.tensor([0.0, -0.0, 1e6, torch.inf])])
    want = torch.special.erfcx(x.double()).float()
    torch.testing.assert_close(erfcx(x), want, rtol=1.5e-6, atol=1e-9)
    assert erfcx(torch.tensor([2])).dtype is torch.float32


def test_the_pieces_of_an_op_without_kernel_are_delegated(
    qnn_libraries: str, tmp_path: Path
) -> None:
    model = Fn(lambda x: torch.special.erfcx(x) * 0.5)
    report = forward(
        check(model, torch.linspace(-1, 4, 24).reshape(4, 6), tmp_path=tmp_path,
              qnn_libraries=qnn_libraries)
    )  # fmt: skip
    assert report.cpu_ops == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.fmax(x, x.flip(0)) * 2.0,
        lambda x: torch.linalg.vector_norm(x, 3, -1),
    ],
)
def test_ops_that_torch_can_open_need_no_kernel(
    fn: Callable[[Tensor], Tensor], qnn_libraries: str, tmp_path: Path
) -> None:
    check(Fn(fn), torch.linspace(-2, 2, 24).reshape(4, 6), tmp_path=tmp_path,
          qnn_libraries=qnn_libraries)  # fmt: skip


def test_an_op_that_nobody_has_is_refused_with_its_place_in_the_model(qnn_libraries: str) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.special.bessel_j0(x * 2.0)
            return y + 1.0

    with pytest.raises(qnn.LoweringError) as e:
        qnn.lower(Model(), (torch.randn(3),), target="SM8650", qnn_libraries=qnn_libraries)
    for word in (
        "special_bessel_j0",
        "no kernel",
        "test_kernels.py",
        "y = torch.special",
        "custom op",
    ):
        assert word in str(e.value)


def test_a_custom_op_is_left_to_the_user_and_reported(qnn_libraries: str) -> None:
    library = torch.library.Library("etqnn_test", "DEF")
    library.define("halve(Tensor x) -> Tensor")
    library.define("halve.out(Tensor x, *, Tensor(a!) out) -> Tensor(a!)")
    library.impl("halve", lambda x: x * 0.5, "CompositeExplicitAutograd")
    library.impl("halve.out", lambda x, *, out: out.copy_(x * 0.5), "CompositeExplicitAutograd")
    halve = torch.ops.etqnn_test.halve
    program = qnn.lower(
        Fn(lambda x: halve(x) + 1.0), (torch.randn(3),), target="SM8650",
        qnn_libraries=qnn_libraries,
    )  # fmt: skip
    (op,) = forward(program).cpu_ops
    assert op.op == "etqnn_test.halve.default"
    assert "link its kernel into the runtime" in op.reason


def test_an_lstm_that_nobody_takes_whole_is_opened_into_ops_that_have_kernels(
    tmp_path: Path,
) -> None:
    model, x = torch.nn.LSTM(3, 4, 2, bidirectional=True, proj_size=2), torch.randn(5, 1, 3)
    ep = torch.export.export(model.eval(), (x,))
    program = qnn.to_edge_transform_and_lower(ep).to_executorch()
    (tmp_path / "lstm.pte").write_bytes(program.buffer)
    for got, want in zip(
        pytree.tree_leaves(qnn.load(tmp_path / "lstm.pte")(x)),
        pytree.tree_leaves(model(x)),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
