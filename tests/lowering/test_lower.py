# SPDX-License-Identifier: BSD-3-Clause
"""What `lower` promises: values, reports, fallbacks and errors."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn
from executorch_qnn.compile.compiler import CompileWorker, GraphRefused
from executorch_qnn.compile.ir import DType, Graph, Kind, Node
from executorch_qnn.compile.ir import Tensor as IrTensor
from executorch_qnn.compile.messages import Compiled
from executorch_qnn.target import Target


class Fn(nn.Module):
    """A function as a module."""

    def __init__(self, fn: Callable[..., Any], **buffers: Tensor) -> None:
        super().__init__()
        self.fn = fn
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *inputs: Any) -> Any:
        return self.fn(*inputs)


def check(model: nn.Module, *inputs: Any, tmp_path: Path, **options: Any) -> qnn.Program:
    """Lowers, runs and compares with eager."""
    program: qnn.Program = qnn.lower(model.eval(), inputs, target="SM8650", **options)
    program.save(tmp_path / "model.pte")
    got = qnn.load(tmp_path / "model.pte", qnn_libraries=options.get("qnn_libraries"))(*inputs)
    with torch.no_grad():
        want = model(*inputs)
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert [(g.shape, g.dtype) for g in got] == [(w.shape, w.dtype) for w in want]
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, rtol=4e-3, atol=8e-3, equal_nan=True)
    return program


@pytest.fixture
def on(qnn_libraries: str, tmp_path: Path) -> dict[str, Any]:
    return {"qnn_libraries": qnn_libraries, "tmp_path": tmp_path}


def forward(program: qnn.Program) -> Any:
    return program.report.methods["forward"]


def test_one_delegate_and_nothing_on_the_cpu(on: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4), nn.Softmax(-1))
    report = forward(check(model, torch.randn(3, 8), **on))
    assert len(report.delegates) == 1
    assert report.cpu_ops == []


def test_a_cpu_op_in_the_middle_is_reported_with_its_reason(on: dict[str, Any]) -> None:
    model = Fn(lambda x: torch.relu(torch.cosh(torch.relu(x) * 0.5)) + 1.0)
    report = forward(check(model, torch.randn(3, 8), **on))
    assert len(report.delegates) == 2
    (op,) = report.cpu_ops
    assert op.op == "aten.cosh.default"
    assert "op table" in op.reason


def test_fallback_error_lists_what_would_run_on_the_cpu(qnn_libraries: str) -> None:
    with pytest.raises(qnn.UnsupportedOp, match=r"cosh \(aten\.cosh\.default\)"):
        qnn.lower(
            Fn(torch.cosh), (torch.randn(3),), target="SM8650", fallback="error",
            qnn_libraries=qnn_libraries,
        )  # fmt: skip


def test_a_model_without_anything_for_the_npu_still_runs(on: dict[str, Any]) -> None:
    assert forward(check(Fn(torch.cosh), torch.randn(3, 8), **on)).delegates == []


def test_parameter_only_subgraphs_are_folded(on: dict[str, Any]) -> None:
    weight = nn.Parameter(torch.randn(6, 6))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = weight

        def forward(self, x: Tensor) -> Tensor:
            w = torch.softmax(self.w.t() * 2.0, -1) + torch.arange(6.0)
            return x @ w

    report = forward(check(Model(), torch.randn(2, 6), **on))
    (delegate,) = report.delegates
    assert delegate.qnn_ops == 1
    assert report.cpu_ops == []


def test_a_partition_without_run_time_inputs_is_never_built(on: dict[str, Any]) -> None:
    model = Fn(lambda x: (x + 1.0, torch.arange(4.0) * 2.0))
    report = forward(check(model, torch.randn(4), **on))
    assert all(d.inputs for d in report.delegates)


def test_a_tied_table_is_static_once(on: dict[str, Any]) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.e = nn.Embedding(64, 16)

        def forward(self, ids: Tensor) -> Tensor:
            x = self.e(ids)
            return x @ self.e.weight.t() + nn.functional.linear(x, self.e.weight)

    (delegate,) = forward(check(Tied(), torch.tensor([[3, 63, 0]]), **on)).delegates
    assert delegate.static_bytes < 64 * 16 * 2 * 1.5


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.relu(x).transpose(1, 2),
        lambda x: (x + 1).permute(2, 0, 1),
        lambda x: torch.cosh(torch.relu(x).transpose(1, 2)) * 0.1,
        lambda x: torch.relu(torch.cosh(x).transpose(1, 2)) * 0.1,
        lambda x: torch.relu(x)[:, 1],
        lambda x: [torch.relu(x), {"a": x + 1.0, "b": (x * 2.0, torch.relu(x))}],
        lambda x: torch.split(torch.relu(x), 2, -1),
        lambda x: torch.where(x > 0, x, float("-inf")),
        lambda x: x.mean().reshape(()),
    ],
)
def test_outputs_keep_their_order_shape_and_values(
    fn: Callable[[Tensor], Any], on: dict[str, Any]
) -> None:
    check(Fn(fn), torch.randn(2, 3, 4), **on)


def test_inputs_may_be_called_like_builtins(on: dict[str, Any]) -> None:
    class Named(nn.Module):
        def forward(self, input: Tensor, id: Tensor, sum: Tensor) -> Tensor:
            return input + id * sum

    check(Named(), torch.randn(3), torch.randn(3), torch.randn(3), **on)


def test_lowering_leaves_the_model_as_it_was(qnn_libraries: str) -> None:
    model = Fn(lambda x: x, acc=torch.ones(3))
    model.fn = lambda x: model.acc.add_(x) * 1.0
    qnn.lower(model, (torch.ones(3),), target="SM8650", qnn_libraries=qnn_libraries)
    assert torch.equal(model.acc, torch.ones(3))


def test_the_report_is_json_text_and_html(on: dict[str, Any]) -> None:
    report = check(Fn(torch.relu), torch.randn(3), **on).report
    document = json.loads(report.to_json())
    assert document["methods"]["forward"]["delegates"][0]["qnn_ops"] == 1
    assert "1 delegates, 0 CPU ops" in report.to_text()
    assert "<table>" in report.to_html()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"quantize": "16a4w"}, qnn.LoweringError, "calibration="),
        ({"quantize": "15a3w"}, qnn.RecipeError, "16a4w"),
        ({"state_update": "copy"}, ValueError, "state_update is"),
        ({"fallback": "gpu"}, ValueError, "fallback is"),
        ({"target": "SM1"}, qnn.QnnError, "SM8650"),
        ({"qnn_libraries": "/nowhere"}, qnn.LibraryNotFound, "onnxruntime-qnn"),
    ],
)
def test_what_is_not_supported_is_a_clear_error(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        qnn.lower(Fn(torch.relu), (torch.randn(3),), **{"target": "SM8650", **options})


def test_a_model_that_cannot_be_exported_says_why() -> None:
    model = Fn(lambda x: x if x.sum() > 0 else -x)
    with pytest.raises(qnn.LoweringError, match=r"torch\.export cannot export method 'forward'"):
        qnn.lower(model, (torch.randn(3),), target="SM8650")


def test_a_refused_graph_is_split_until_only_the_culprit_is_on_the_cpu(
    on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is staged (QNN refuses whole graphs rarely); all that follows is real."""
    compile_ = CompileWorker.compile

    def refuse_tanh(worker: CompileWorker, graphs: Sequence[Graph], path: str) -> Compiled:
        for graph in graphs:
            if any(n.type == "Tanh" or n.source.startswith("tanh") for n in graph.nodes):
                raise GraphRefused(graph.name, "staged")
        return compile_(worker, graphs, path)

    monkeypatch.setattr(CompileWorker, "compile", refuse_tanh)
    model = Fn(lambda x: (torch.tanh((x + 1.0) * 0.5) - 0.25) * torch.relu(x))
    report = forward(check(model, torch.randn(3, 8), **on))
    (op,) = report.cpu_ops
    assert op.op == "aten.tanh.default"
    assert "staged" in op.reason
    assert len(report.delegates) >= 2


def small_graph(name: str) -> Graph:
    a = IrTensor("a", DType.FLOAT16, (4,), Kind.INPUT)
    b = IrTensor("b", DType.FLOAT16, (4,), Kind.OUTPUT)
    return Graph(name, [a, b], [Node("relu", "Relu", [a], [b])])


def test_a_dead_compiler_is_an_error_and_not_the_end(qnn_libraries: str, tmp_path: Path) -> None:
    with CompileWorker(Target("SM8650"), qnn_libraries) as worker:
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGSEGV)
        with pytest.raises(qnn.LoweringError, match="SIGSEGV"):
            worker.compile([small_graph("g")], str(tmp_path / "a.bin"))
        assert worker.compile([small_graph("g")], str(tmp_path / "a.bin")).size > 0


def test_a_node_on_which_the_validator_dies_is_refused_alone(
    qnn_libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CompileWorker(Target("SM8650"), qnn_libraries) as worker:
        ask = worker._ask

        def die_on_poison(request: Any) -> Any:
            if any(n.name == "poison" for n in getattr(request, "nodes", [])):
                assert worker._process is not None
                os.kill(worker._process.pid, signal.SIGFPE)
            return ask(request)

        monkeypatch.setattr(worker, "_ask", die_on_poison)
        nodes = [small_graph("g").nodes[0] for _ in range(5)]
        nodes[3].name = "poison"
        verdicts = worker.validate(nodes)
    assert [v is None for v in verdicts] == [True, True, True, False, True]
    assert "SIGFPE" in (verdicts[3] or "")


def test_saving_replaces_a_file_only_by_a_whole_one(
    on: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = check(Fn(torch.relu), torch.randn(3), **on)
    path = on["tmp_path"] / "model.pte"
    before = path.read_bytes()

    def fail(file: Any) -> None:
        file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(program.executorch, "write_to_file", fail)
    with pytest.raises(OSError, match="disk full"):
        program.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == ["model.pte"]
