# SPDX-License-Identifier: BSD-3-Clause
"""`fallback="error"`: what would run on the CPU is refused, and all of it is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn

import executorch_qnn as qnn
from executorch_qnn.cli import main
from executorch_qnn.compile.compiler import CompileWorker, GraphRefused
from executorch_qnn.compile.ir import Graph
from executorch_qnn.compile.messages import Compiled

HERE = Path(__file__).name
X = torch.linspace(-1, 1, 8).reshape(2, 4)


def left_to_cpu(x: Tensor) -> Tensor:
    """An op whose row refuses it."""
    return torch.pow(-2.0, x)


class TwoOps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x = left_to_cpu(torch.relu(x))
        wide = torch.cosh(x * 2)
        return wide + torch.relu(x)


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.cond(x.sum() > 0, lambda x: torch.sin(x) * 2, lambda x: x - 1, (x,))
        return torch.relu(y)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("h", torch.zeros(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.h.copy_(left_to_cpu(self.h + x))
        return self.h * 2


def refused(
    model: nn.Module | dict[str, Any], libraries: str, *inputs: Tensor
) -> list[dict[str, str]]:
    """What `lower` names; the message must say the same."""
    with pytest.raises(qnn.UnsupportedOp) as caught:
        qnn.lower(model, inputs or None, target="SM8650", fallback="error", qnn_libraries=libraries)
    message = str(caught.value)
    for node in caught.value.nodes:
        assert f"{node['method']}: {node['node']} ({node['op']}): {node['reason']}" in message
        assert node["source"] in message
    assert "fallback='cpu'" in message
    return caught.value.nodes


def test_every_node_is_named_with_its_line_reason_and_way_out(qnn_libraries: str) -> None:
    power, wide = refused(TwoOps(), qnn_libraries, X)
    assert (power["method"], power["op"]) == ("forward", "aten.pow.Scalar")
    assert "which is not positive" in power["reason"]
    assert HERE in power["source"]
    assert "x = left_to_cpu(torch.relu(x))" in power["source"]
    assert wide["op"] == "aten.cosh.default"
    assert "wide = torch.cosh(x * 2)" in wide["source"]


def test_an_op_without_a_row_comes_with_a_way_out(qnn_libraries: str) -> None:
    class Indices(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(x), torch.nonzero(x)

    (node,) = refused(Indices(), qnn_libraries, X)
    assert node["op"] == "aten.nonzero.default"
    assert "depends on values" in node["reason"]
    assert "use a mask" in node["reason"]


def test_all_methods_are_looked_at(qnn_libraries: str) -> None:
    model = Stateful()
    methods = {"two": (TwoOps(), (X,)), "fine": (nn.ReLU(), (X,)), "state": (model, (X,))}
    nodes = refused(methods, qnn_libraries)
    assert [(n["method"], n["op"].split(".")[1]) for n in nodes] == [
        ("two", "pow"),
        ("two", "cosh"),
        ("state", "pow"),
    ]


def test_control_flow_is_named_with_what_is_in_its_bodies(qnn_libraries: str) -> None:
    nodes = refused(Branches(), qnn_libraries, X)
    assert [n["node"] for n in nodes] == [
        "cond", "true_graph_0.sin", "true_graph_0.mul", "false_graph_0.sub",
    ]  # fmt: skip
    assert "torch.where" in nodes[0]["reason"]
    assert "in a body of cond" in nodes[1]["reason"]
    for node in nodes:
        assert "y = torch.cond(" in node["source"]


def test_what_only_the_compiler_refuses_is_named_beside_the_rest(
    qnn_libraries: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is staged: QNN refuses whole graphs rarely."""
    compile_ = CompileWorker.compile

    def refuse(worker: CompileWorker, graphs: Sequence[Graph], path: str) -> Compiled:
        for graph in graphs:
            if any(n.source.startswith(("tanh", "sigmoid")) for n in graph.nodes):
                raise GraphRefused(graph.name, "staged")
        return compile_(worker, graphs, path)

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return left_to_cpu(torch.tanh(x + 1.0)) * torch.sigmoid(x)

    monkeypatch.setattr(CompileWorker, "compile", refuse)
    nodes = refused(Model(), qnn_libraries, X)
    assert {n["op"].split(".")[1] for n in nodes} == {"pow", "tanh", "sigmoid"}
    assert all("staged" in n["reason"] for n in nodes if "pow" not in n["op"])


def test_constants_are_no_fallback_unless_they_are_large(qnn_libraries: str) -> None:
    class Constants(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            self.n = n

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return torch.relu(x), torch.arange(self.n) * 2

    small = qnn.lower(
        Constants(8), (X,), target="SM8650", fallback="error", qnn_libraries=qnn_libraries
    )
    assert small.report.methods["forward"].cpu_ops == []
    nodes = refused(Constants(1 << 18), qnn_libraries, X)
    assert [n["op"].split(".")[1] for n in nodes] == ["arange", "mul"]
    assert all("make it a buffer" in n["reason"] for n in nodes)


def test_a_buffer_of_the_host_is_fallback_through_what_touches_it(qnn_libraries: str) -> None:
    (node,) = refused(Stateful(), qnn_libraries, X)
    assert node["op"] == "aten.pow.Scalar"


@pytest.mark.parametrize("entry", [to_edge_transform_and_lower, qnn.to_edge_transform_and_lower])
def test_the_partitioner_refuses_in_any_flow(entry: Callable[..., Any], qnn_libraries: str) -> None:
    partitioner = qnn.QnnPartitioner("SM8650", fallback="error", qnn_libraries=qnn_libraries)
    with torch.no_grad():
        bad, good = (torch.export.export(m, (X,)) for m in (TwoOps(), nn.ReLU()))
    with pytest.raises(qnn.UnsupportedOp) as caught:
        entry(bad, partitioner=[partitioner])
    assert [n["op"].split(".")[1] for n in caught.value.nodes] == ["pow", "cosh"]
    assert HERE in str(caught.value)
    entry(good, partitioner=[partitioner])


def test_a_fallback_that_there_is_not(qnn_libraries: str) -> None:
    with pytest.raises(ValueError, match="fallback is 'cpu' or 'error'"):
        qnn.QnnPartitioner("SM8650", fallback="gpu", qnn_libraries=qnn_libraries)


MODELS = """
import torch
from torch import nn

class Model(nn.Module):
    def forward(self, x):
        return torch.pow(-2.0, torch.relu(x))

def model():
    return Model(), (torch.ones(2, 4),)
"""


def test_the_command_exits_1_and_names_the_nodes(
    tmp_path: Path, qnn_libraries: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    output = tmp_path / "model.pte"
    command = ["lower", f"{tmp_path}/models.py:model", "-o", str(output)]
    command += ["--qnn-libraries", qnn_libraries, "--fallback", "error"]
    assert main([*command, "--json"]) == 1
    done = capsys.readouterr()
    error = json.loads(done.out)["error"]
    assert error["type"] == "UnsupportedOp"
    (node,) = error["nodes"]
    assert (node["method"], node["op"]) == ("forward", "aten.pow.Scalar")
    assert "models.py" in node["source"]
    assert node["reason"] in done.err
    assert not output.exists()

    assert main(command) == 1
    done = capsys.readouterr()
    assert done.out == ""
    assert "pow" in done.err
    assert main([*command[:-1], "cpu"]) == 0
    assert output.exists()
