# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import gc
import mmap
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from executorch_qnn import _native
from executorch_qnn.compile.ir import DType, Kind

from .graphs import SM8650, relu_graph


@pytest.fixture(scope="module")
def library(qnn_libraries: str) -> _native.Library:
    return _native.Library(qnn_libraries)


@pytest.fixture(scope="module")
def backend(library: _native.Library) -> _native.Backend:
    return _native.Backend(library, SM8650)


def _linear(graph: _native.Graph, weight: Any, *, rows: int = 32, columns: int = 64) -> None:
    x = graph.add_tensor("x", Kind.INPUT, DType.FLOAT16, [1, columns])
    w = graph.add_tensor("w", Kind.STATIC, DType.FLOAT16, [rows, columns], None, weight)
    y = graph.add_tensor("y", Kind.OUTPUT, DType.FLOAT16, [1, rows])
    graph.add_node("linear", "FullyConnected", [x, w], [y])


# ---------------------------------------------------------------- the whole way


def test_a_graph_becomes_a_file_that_describes_itself(
    library: _native.Library, backend: _native.Backend, tmp_path: Path
) -> None:
    context = _native.Context(backend)
    report = relu_graph(context, options={"vtcm_mb": 2, "optimization_level": 3}).finalize()
    assert report["ddr"] == {"read": 2048, "write": 4096, "spill": 0, "fill": 0}
    assert "Completed stage: Graph Optimizations" in report["log"]
    assert report["seconds"] > 0

    path = tmp_path / "context.bin"
    size = context.write_binary(path)
    assert path.stat().st_size == size
    assert [entry.name for entry in tmp_path.iterdir()] == ["context.bin"]

    info = _native.inspect_context(library, path)
    assert (info["soc_model"], info["htp_arch"]) == (SM8650, 75)
    assert info["build_id"] == library.build_id
    assert info["core_api"] == library.core_api
    (graph,) = info["graphs"]
    assert (graph["name"], graph["vtcm_bytes"], graph["optimization_level"]) == ("relu", 2 << 20, 3)
    (x,), (y,) = graph["inputs"], graph["outputs"]
    assert (x["name"], x["dtype"], x["shape"]) == ("x", DType.FLOAT16, (1, 64))
    assert y["name"] == "y"
    assert x["id"] != y["id"]


def test_a_binary_is_inspected_wherever_it_lies(
    library: _native.Library, backend: _native.Backend, tmp_path: Path
) -> None:
    context = _native.Context(backend)
    relu_graph(context, encoding=(0.5, -128)).finalize()
    data = context.binary()
    path = tmp_path / "context.bin"
    context.write_binary(str(path))
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        sources: list[Any] = [data, bytearray(data), memoryview(data), mapped, path]
        sources.append(np.frombuffer(data, np.uint8))
        infos = [_native.inspect_context(library, source) for source in sources]
    assert all(info == infos[0] for info in infos)
    assert infos[0]["graphs"][0]["inputs"][0]["encoding"] == (0.5, -128)


def test_several_graphs_share_a_context(library: _native.Library, backend: _native.Backend) -> None:
    context = _native.Context(backend)
    for name in ("prefill", "decode"):
        relu_graph(context, name).finalize()
    graphs = _native.inspect_context(library, context.binary())["graphs"]
    assert sorted(graph["name"] for graph in graphs) == ["decode", "prefill"]


def test_shared_weights_are_stored_once(backend: _native.Backend) -> None:
    weight = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float16)
    sizes = []
    for share in (False, True):
        context = _native.Context(backend, {"share_weights": share})
        for name in ("prefill", "decode"):
            graph = context.graph(name)
            _linear(graph, weight, rows=1024, columns=1024)
            graph.finalize()
        sizes.append(len(context.binary()))
    assert sizes[1] < 0.6 * sizes[0]


@pytest.mark.parametrize(
    ("dtype", "encoding", "weight_encoding"),
    [
        (DType.UFIXED16, (1e-4, -32768), ("axis", 0, [0.01] * 32, None)),
        (DType.UFIXED16, (1e-4, -32768), ("bits", 4, 0.01, 0)),
        (DType.UFIXED16, (1e-4, -32768), ("bits_axis", 4, 0, [0.01] * 32, [0] * 32)),
        (DType.UFIXED8, (1e-2, -128), ("blockwise", 4, 0, [0.01] * 32, 2, b"\3\4" * 32)),
    ],
)
def test_every_weight_encoding_compiles(
    backend: _native.Backend, dtype: DType, encoding: tuple[float, int], weight_encoding: Any
) -> None:
    graph = _native.Context(backend).graph("g")
    weight = np.random.default_rng(0).integers(-8, 8, (32, 64)).astype(np.int8)
    x = graph.add_tensor("x", Kind.INPUT, dtype, [1, 64], encoding)
    w = graph.add_tensor("w", Kind.STATIC, DType.SFIXED8, [32, 64], weight_encoding, weight)
    for i in range(50):  # what QNN points to must survive the tensors after it
        graph.add_tensor(f"unused{i}", Kind.NATIVE, dtype, [1, 64], encoding)
    y = graph.add_tensor("y", Kind.OUTPUT, dtype, [1, 32], encoding)
    graph.add_node("linear", "FullyConnected", [x, w], [y])
    assert graph.finalize()["ddr"]["read"] > 0


def test_parameters_are_scalars_and_small_tensors(backend: _native.Backend) -> None:
    graph = _native.Context(backend).graph("g")
    x = graph.add_tensor("x", Kind.INPUT, DType.FLOAT16, [1, 4, 8, 16])
    permutation = np.array([0, 2, 1, 3], np.uint32)
    perm = graph.add_tensor("perm", Kind.STATIC, DType.UINT32, [4], None, permutation)
    permutation[:] = 9  # QNN and the builder hold copies of their own
    t = graph.add_tensor("t", Kind.NATIVE, DType.FLOAT16, [1, 8, 4, 16])
    y = graph.add_tensor("y", Kind.OUTPUT, DType.FLOAT16, [1, 8, 4, 16])
    graph.add_node("transpose", "Transpose", [x], [t], [("perm", "tensor", perm)])
    graph.add_node(
        "softmax",
        "Softmax",
        [t],
        [y],
        [("axis", "scalar", DType.UINT32, 3), ("beta", "scalar", DType.FLOAT32, 1)],
    )
    graph.finalize()


# ---------------------------------------------------------------- static data


def test_static_data_may_be_a_read_only_mapping(backend: _native.Backend, tmp_path: Path) -> None:
    weight = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float16)
    path = tmp_path / "weight"
    path.write_bytes(b"head" + weight.tobytes())
    binaries = []
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        view = memoryview(mapped)[4:]
        for source in (weight, weight.tobytes(), view):
            context = _native.Context(backend)
            graph = context.graph("g")
            _linear(graph, source)
            graph.finalize()
            binaries.append(context.binary())
        view.release()
    # Equal but for the number of the graph in this process, which is all over the binary.
    for binary in binaries[1:]:
        assert sum(a != b for a, b in zip(binary, binaries[0], strict=True)) < 100


def test_static_data_is_checked(backend: _native.Backend) -> None:
    graph = _native.Context(backend).graph("g")
    weight = np.zeros((32, 64), np.float16)

    def add(data: Any, kind: Kind = Kind.STATIC) -> None:
        graph.add_tensor("w", kind, DType.FLOAT16, [32, 64], None, data)

    with pytest.raises(_native.Error, match="has 4095 bytes of data for 4096"):
        add(weight.tobytes()[:-1])
    with pytest.raises(_native.Error, match="has no data"):
        add(None)
    with pytest.raises(_native.Error, match="takes no data"):
        add(weight, Kind.INPUT)
    with pytest.raises((BufferError, ValueError)):
        add(np.zeros((64, 64), np.float16)[::2])
    with pytest.raises(TypeError):
        add(3.5)


_NO_COPY = """
import resource, sys
import numpy as np
from executorch_qnn import _native
context = _native.Context(_native.Backend(_native.Library(sys.argv[1]), 57))
weight = np.ones((4096, 8192), np.float16)
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
context.graph("g").add_tensor("w", 4, 0x216, list(weight.shape), None, weight)
print((peak() - before) / weight.nbytes)
"""


def test_static_data_is_copied_by_qnn_and_nobody_else(qnn_libraries: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _NO_COPY, qnn_libraries], capture_output=True, text=True, check=True
    )
    assert float(ran.stdout) < 1.2


# ---------------------------------------------------------------- errors


def test_an_op_that_qnn_refuses_is_an_error_with_its_reason(backend: _native.Backend) -> None:
    graph = _native.Context(backend).graph("g")
    x = graph.add_tensor("x", Kind.INPUT, DType.FLOAT16, [1, 64])
    y = graph.add_tensor("y", Kind.OUTPUT, DType.FLOAT16, [1, 63])
    with pytest.raises(_native.Error, match="64 != 63") as caught:
        graph.add_node("relu", "Relu", [x], [y])
    assert (caught.value.kind, caught.value.code) == ("qnn", 3110)
    with pytest.raises(_native.Error, match="names tensor 7 of 2") as wrong:
        graph.add_node("relu", "Relu", [x], [7])
    assert wrong.value.kind == "invalid"


def test_a_graph_that_does_not_compile_is_an_error(backend: _native.Backend) -> None:
    graph = _native.Context(backend).graph("lost")
    x = graph.add_tensor("x", Kind.INPUT, DType.FLOAT16, [1, 64])
    y = graph.add_tensor("y", Kind.NATIVE, DType.FLOAT16, [1, 64])
    graph.add_node("relu", "Relu", [x], [y])
    with pytest.raises(_native.Error, match="compiling graph lost failed with QNN error") as caught:
        graph.finalize()
    assert "QNN says:" in str(caught.value)


def test_a_finalized_graph_is_closed(backend: _native.Backend) -> None:
    context = _native.Context(backend)
    graph = relu_graph(context)
    with pytest.raises(_native.Error, match="not finalized"):
        context.binary()
    graph.finalize()
    with pytest.raises(_native.Error, match="graph relu is finalized"):
        graph.finalize()


@pytest.mark.parametrize(
    "options", [{"precision": "float64"}, {"vtcm": 4}, {"hvx_threads": "many"}, {"vtcm_mb": -1}]
)
def test_unknown_options_are_errors(backend: _native.Backend, options: dict[str, Any]) -> None:
    context = _native.Context(backend)
    with pytest.raises((_native.Error, RuntimeError, TypeError)):
        context.graph("g", options)  # type: ignore[arg-type]


def test_a_file_that_cannot_be_written_is_an_io_error(
    backend: _native.Backend, tmp_path: Path
) -> None:
    context = _native.Context(backend)
    relu_graph(context).finalize()
    with pytest.raises(_native.Error, match="No such file or directory") as caught:
        context.write_binary(tmp_path / "missing" / "context.bin")
    assert caught.value.kind == "io"


@pytest.mark.parametrize("data", [b"", b"x", b"\0" * 100, bytes(range(256)) * 40])
def test_bytes_that_are_no_binary_are_refused(library: _native.Library, data: bytes) -> None:
    with pytest.raises(_native.Error):
        _native.inspect_context(library, data)


def test_a_missing_file_is_an_io_error(library: _native.Library, tmp_path: Path) -> None:
    with pytest.raises(_native.Error, match="missing") as caught:
        _native.inspect_context(library, tmp_path / "missing")
    assert caught.value.kind == "io"


# ---------------------------------------------------------------- logs, threads, lifetimes

_CRASH = """
import os, signal, sys
from executorch_qnn import _native
from tests.native.graphs import relu_graph
_native.log_to(sys.argv[2])
context = _native.Context(_native.Backend(_native.Library(sys.argv[1]), 57))
relu_graph(context).finalize()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_log_file_outlives_a_crash(qnn_libraries: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    ran = subprocess.run(
        [sys.executable, "-c", _CRASH, qnn_libraries, str(log)], cwd=Path(__file__).parents[2]
    )
    assert ran.returncode == -9
    text = log.read_text()
    assert "Starting stage: Graph Optimizations" in text
    assert "read_total_bytes=2048" in text


def test_threads_use_backends_of_their_own(library: _native.Library) -> None:
    found: list[tuple[int, int]] = []

    def work(soc_model: int) -> None:
        for _ in range(3):
            context = _native.Context(_native.Backend(library, soc_model))
            assert relu_graph(context).finalize()["ddr"]["read"] == 2048
            info = _native.inspect_context(library, context.binary())
            found.append((soc_model, info["soc_model"]))

    threads = [threading.Thread(target=work, args=(soc,)) for soc in (57, 69)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == [(57, 57)] * 3 + [(69, 69)] * 3


def test_a_graph_keeps_all_that_it_needs(library: _native.Library) -> None:
    graph = relu_graph(_native.Context(_native.Backend(library, SM8650)))
    gc.collect()
    assert graph.finalize()["ddr"]["write"] > 0
