# SPDX-License-Identifier: BSD-3-Clause
"""Floats of the host that are integers on the NPU: what crosses is what PyTorch quantizes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.quantization.fx import _decomposed  # noqa: F401 - registers the ops

import executorch_qnn as qnn
from executorch_qnn.compile import backend
from executorch_qnn.compile.backend import scalar_type
from executorch_qnn.compile.build import IO, Built
from executorch_qnn.compile.ir import DType, Graph, Kind, Node, ScaleOffset
from executorch_qnn.compile.ir import Tensor as QnnTensor
from executorch_qnn.compile.payload import IOEntry
from executorch_qnn.session import Session

from .programs import Method, Plan, Step

MakeFile = Callable[..., Path]

N = 1031  # odd, and more than a chunk of what is converted in chunks
ROWS = 600  # more than 1 MiB of 16-bit integers
TORCH = {
    DType.UFIXED8: torch.uint8,
    DType.SFIXED8: torch.int8,
    DType.UFIXED16: torch.uint16,
    DType.SFIXED16: torch.int16,
}
ENCODINGS = {
    DType.UFIXED8: ScaleOffset(float(np.float32(0.037)), -131),
    DType.SFIXED8: ScaleOffset(0.125, 0),
    DType.UFIXED16: ScaleOffset(float(np.float32(1e-3)), -32768),
    DType.SFIXED16: ScaleOffset(float(np.float32(7e-4)), 11),
}


def eager(x: Tensor, dtype: DType) -> Tensor:
    """`x` on the grid of `dtype`, by PyTorch."""
    (scale, offset), torch_dtype = ENCODINGS[dtype], TORCH[dtype]
    limits = torch.iinfo(torch_dtype)
    args = scale, -offset, limits.min, limits.max, torch_dtype
    ops = torch.ops.quantized_decomposed
    q = ops.quantize_per_tensor(x.to(torch.float32), *args)
    return ops.dequantize_per_tensor(q, *args).to(x.dtype)


def samples(dtype: DType, torch_dtype: torch.dtype, seed: int) -> Tensor:
    """Values in and out of the range, ties, infinities and NaN."""
    scale, offset = ENCODINGS[dtype]
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-1000, 132_000, (N,), generator=generator) / 2
    if dtype in (DType.UFIXED8, DType.SFIXED8):
        steps = steps / 256
    x = (steps + offset) * scale
    x[::3] *= 1 + 1e-6 * torch.randn(x[::3].shape, generator=generator)
    x[5:10] = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    return x.to(torch_dtype)


@pytest.fixture(params=list(TORCH), ids=lambda d: d.name)
def dtype(request: pytest.FixtureRequest) -> DType:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def null_session(program_file: MakeFile, null_qnn: str) -> Callable[..., Session]:
    """A session on a graph that hands on the integers it gets (and one more in the first byte)."""

    def load(dtype: DType, host: torch.dtype, encoding: ScaleOffset | None) -> Session:
        io = IOEntry("x", scalar_type(host), int(dtype), (N,), (N,), encoding)
        name = hashlib.sha256(repr(io).encode()).hexdigest()
        method = Method(Step(), (torch.zeros(N, dtype=host),), (), io)
        return qnn.load(program_file(name, Plan({"forward": method})), qnn_libraries=null_qnn)

    return load


@pytest.mark.parametrize("host", [torch.float16, torch.float32, torch.float64], ids=str)
def test_floats_cross_as_pytorch_quantizes_them(
    null_session: Callable[..., Session], dtype: DType, host: torch.dtype
) -> None:
    session = null_session(dtype, host, ENCODINGS[dtype])

    @settings(max_examples=10, deadline=None, database=None)
    @given(seed=st.integers(0, 2**32))
    def check(seed: int) -> None:
        x = samples(dtype, host, seed)
        y = session(x)
        assert y.dtype is host
        assert torch.equal(y[1:], eager(x, dtype)[1:])

    check()


def test_integers_cross_as_they_are(null_session: Callable[..., Session], dtype: DType) -> None:
    session = null_session(dtype, TORCH[dtype], None)
    limits = torch.iinfo(TORCH[dtype])
    x = torch.linspace(limits.min, limits.max, N).round().to(torch.int32).to(TORCH[dtype])
    y = session(x)
    assert y.dtype is TORCH[dtype]
    assert torch.equal(y[1:].to(torch.int32), x[1:].to(torch.int32))


@pytest.mark.parametrize(
    "encoding",
    [None, (0.0, 0), (-1.0, 0), (float("nan"), 0), (float("inf"), 0), (1.0, 2**31 - 1)],
    ids=str,
)
def test_an_encoding_that_cannot_be_computed_with_is_refused(
    null_session: Callable[..., Session], encoding: tuple[float, int] | None
) -> None:
    with pytest.raises(qnn.IncompatiblePayload, match="encoding of tensor x"):
        null_session(DType.UFIXED8, torch.float32, encoding and ScaleOffset(*encoding))


# -------------------------------------------------------------------------------- the simulator


class Relu(nn.Module):
    """Something that is delegated; what the graphs below compute is another thing."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@pytest.fixture
def lowered(
    tmp_path: Path, qnn_libraries: str, monkeypatch: pytest.MonkeyPatch
) -> Callable[[DType], Session]:
    """A session on a graph whose input and output have a dtype and its encoding."""

    def lower(dtype: DType) -> Session:
        shape, encoding = (ROWS, N), ENCODINGS[dtype]

        def build(*_: Any, **__: Any) -> Built:
            x = QnnTensor("x", dtype, shape, Kind.INPUT, encoding)
            y = QnnTensor("y", dtype, shape, Kind.OUTPUT, encoding)
            graph = Graph("forward_0", [x, y], [Node("r", "Reshape", [x], [y])])
            x_io = IO("x", torch.float32, shape, dtype, shape, encoding)
            y_io = IO("y", torch.float32, shape, dtype, shape, encoding)
            return Built(graph, (x_io,), (y_io,), ())

        monkeypatch.setattr(backend, "build", build)
        program = qnn.lower(
            Relu(), (torch.zeros(shape),), target="SM8650", qnn_libraries=qnn_libraries
        )
        program.save(tmp_path / "model.pte")
        return qnn.load(tmp_path / "model.pte", qnn_libraries=qnn_libraries)

    return lower


def test_qnn_gets_and_gives_the_integers_bit_by_bit(
    lowered: Callable[[DType], Session], dtype: DType
) -> None:
    session = lowered(dtype)
    x = torch.stack([samples(dtype, torch.float32, seed) for seed in range(ROWS)])
    assert torch.equal(session(x), eager(x, dtype))
