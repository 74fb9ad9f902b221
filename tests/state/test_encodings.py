# SPDX-License-Identifier: BSD-3-Clause
"""Quantized slots, with encodings made by hand: the bits that nobody writes never change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import executorch_qnn as qnn
from executorch_qnn.compile import backend
from executorch_qnn.compile.build import IO, Built, State
from executorch_qnn.compile.ir import DType, Graph, Kind, Node, Scalar, ScaleOffset
from executorch_qnn.compile.ir import Tensor as QnnTensor
from executorch_qnn.compile.payload import Binding
from executorch_qnn.session import Session

from .models import Model

ROWS, WIDTH = 512, 128
ENCODINGS = [
    (DType.UFIXED8, ScaleOffset(0.02, -131)),
    (DType.UFIXED16, ScaleOffset(1e-4, -40000)),
]


def write_row(s: Model, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """The model that the graphs below stand for: a row is written, and the cache is read."""
    s.k.index_copy_(0, at, x)
    return s.k.sum(1), s.k[:4] * 1.0


def graph_of(dtype: DType, encoding: ScaleOffset) -> Graph:
    def tensor(
        name: str, dtype: DType, shape: tuple[int, ...], kind: Kind = Kind.NATIVE, data: Any = None
    ) -> QnnTensor:
        quantized = dtype in (DType.UFIXED8, DType.UFIXED16)
        return QnnTensor(name, dtype, shape, kind, encoding if quantized else None, data)

    f16, i32 = DType.FLOAT16, DType.INT32
    old = tensor("k_in", dtype, (ROWS, WIDTH), Kind.INPUT)
    x = tensor("x", f16, (1, WIDTH), Kind.INPUT)
    at = tensor("at", i32, (1,), Kind.INPUT)
    row, place = tensor("row", dtype, (1, WIDTH)), tensor("place", i32, (1, 1))
    new = tensor("k_out", dtype, (ROWS, WIDTH), Kind.OUTPUT)
    reals, sums = tensor("reals", f16, (ROWS, WIDTH)), tensor("sums", f16, (ROWS,), Kind.OUTPUT)
    head, shown = tensor("head", f16, (4, WIDTH)), tensor("shown", f16, (4, WIDTH), Kind.OUTPUT)
    axes = tensor("axes", DType.UINT32, (1,), Kind.STATIC, np.array([1], np.uint32))
    ranges = tensor("ranges", i32, (2, 3), Kind.STATIC,
                    np.array([[0, 4, 1], [0, WIDTH, 1]], np.int32))  # fmt: skip
    nodes = [
        Node("q", "Quantize", [x], [row]),
        Node("p", "Reshape", [at], [place]),
        Node("s", "ScatterNd", [old, place, row], [new],
             {"reduction": Scalar(DType.UINT32, 0)}),
        Node("d", "Dequantize", [new], [reals]),
        Node("r", "ReduceSum", [reals], [sums],
             {"axes": axes, "keep_dims": Scalar(DType.BOOL8, False)}),
        Node("h", "StridedSlice", [reals], [head], {"ranges": ranges}),
        Node("m", "Relu", [head], [shown]),
    ]  # fmt: skip
    tensors = [old, x, at, row, place, new, reals, sums, head, shown, axes, ranges]
    return Graph("forward_0", tensors, nodes)


def built(dtype: DType, encoding: ScaleOffset, binding: Binding) -> Callable[..., Built]:
    start = (np.arange(ROWS * WIDTH) * 7 % 251).astype(
        np.uint8 if dtype is DType.UFIXED8 else np.uint16
    )
    f16, f32 = DType.FLOAT16, torch.float32

    def build(*_: Any, **__: Any) -> Built:
        return Built(
            graph_of(dtype, encoding),
            (IO("at", torch.int64, (1,), DType.INT32, (1,)),
             IO("x", f32, (1, WIDTH), f16, (1, WIDTH))),
            (IO("sums", f32, (ROWS,), f16, (ROWS,)),
             IO("shown", f32, (4, WIDTH), f16, (4, WIDTH))),
            (State("k", f32, (ROWS, WIDTH), dtype, "k_in", "k_out", binding, "by hand",
                   start.reshape(ROWS, WIDTH), encoding),),
        )  # fmt: skip

    return build


@pytest.fixture(scope="module", params=ENCODINGS, ids=lambda p: p[0].name)
def programs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, qnn_libraries: str
) -> dict[Binding, Path]:
    """One program with the slot in place, and one with two regions."""
    folder = tmp_path_factory.mktemp("encodings")
    paths = {}
    with pytest.MonkeyPatch.context() as patch:
        for binding in (Binding.IN_PLACE, Binding.DOUBLE_BUFFER):
            patch.setattr(backend, "build", built(*request.param, binding))
            program = qnn.lower(
                Model(write_row, k=torch.zeros(ROWS, WIDTH)).eval(),
                (torch.ones(1, WIDTH), torch.tensor([3])),
                target="SM8650",
                qnn_libraries=qnn_libraries,
            )
            paths[binding] = folder / f"{binding.name}.pte"
            program.save(paths[binding])
    return paths


@pytest.fixture
def session(programs: dict[Binding, Path], qnn_libraries: str) -> Session:
    return qnn.load(programs[Binding.IN_PLACE], qnn_libraries=qnn_libraries)


def row(seed: int) -> Tensor:
    return torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_the_slot_has_one_encoding_and_one_address(session: Session) -> None:
    info = session.state()["k"]
    assert info.encoding is not None
    assert info.stored in ("ufixed8", "ufixed16")
    assert info.dtype is torch.float32
    session(row(0), torch.tensor([1]))
    info = session.state()["k"]
    assert info.address == info.input_address == info.output_address


def test_two_hundred_steps_change_only_what_is_written(session: Session) -> None:
    before = session.read_state("k")
    scale, _ = session.state()["k"].encoding or (0.0, 0)
    want = before.clone()
    for i in range(200):
        at = i * 37 % 100  # rows from 100 on are never written
        x = row(i).clamp(-1, 1)
        session(x, torch.tensor([at]))
        want[at] = x
    after = session.read_state("k")
    assert torch.equal(after[100:], before[100:])
    # fp16 on the way in, and half a step of the encoding.
    assert (after[:100] - want[:100]).abs().max() <= scale / 2 + 1e-3


def test_one_address_equals_two(
    programs: dict[Binding, Path], session: Session, qnn_libraries: str
) -> None:
    other = qnn.load(programs[Binding.DOUBLE_BUFFER], qnn_libraries=qnn_libraries)
    for i in range(6):
        inputs = row(i), torch.tensor([i * 101 % ROWS])
        for a, b in zip(session(*inputs), other(*inputs), strict=True):
            assert torch.equal(a, b)
    assert torch.equal(session.read_state("k"), other.read_state("k"))


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.01, 100))
def test_what_was_read_can_be_written_back(
    programs: dict[Binding, Path], qnn_libraries: str, seed: int, spread: float
) -> None:
    session = qnn.load(programs[Binding.IN_PLACE], qnn_libraries=qnn_libraries)
    values = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)) * spread
    session.write_state("k", values)
    stored = session.read_state("k")
    session.write_state("k", stored)
    assert torch.equal(session.read_state("k"), stored)


def test_a_saved_state_comes_back_and_belongs_to_its_encoding(
    session: Session, tmp_path: Path
) -> None:
    session(row(1), torch.tensor([5]))
    session.save_state(tmp_path / "state")
    want = session.read_state("k")
    session.reset_state()
    assert not torch.equal(session.read_state("k"), want)
    session.load_state(tmp_path / "state")
    assert torch.equal(session.read_state("k"), want)
    twin = session.fork()
    assert torch.equal(twin.read_state("k"), want)


def test_nan_has_no_place_in_it(session: Session) -> None:
    before = session.read_state("k")
    values = before.clone()
    values[3, 3] = float("nan")
    with pytest.raises(qnn.StateError, match="NaN"):
        session.write_state("k", values)
    assert torch.equal(session.read_state("k"), before)
