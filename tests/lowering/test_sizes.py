# SPDX-License-Identifier: BSD-3-Clause
"""Sizes that are not fixed: listed ones get a graph each, others are refused or on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import to_edge_transform_and_lower
from torch import Tensor, nn
from torch.export import Dim

import executorch_qnn as qnn

X = torch.linspace(-1, 1, 32).reshape(4, 8)
HALF = X[:2]
N = torch.tensor(2)
B = Dim("batch", min=1, max=4)


class Net(nn.Module):
    """A layer, and a sum over all calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(8, 4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.a(x))
        self.total.add_(y.sum(0))
        return y + self.total


class Function(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor, y: Any = None) -> Any:
        return self.fn(x) if y is None else self.fn(x, y)


def lower(model: nn.Module, *inputs: Any, **options: Any) -> qnn.Program:
    return qnn.lower(model.eval(), inputs, target="SM8650", **options)


def check(got: Any, want: Any) -> None:
    gots, wants = (r if isinstance(r, (tuple, list)) else [r] for r in (got, want))
    for g, w in zip(gots, wants, strict=True):
        assert g.dtype is w.dtype
        torch.testing.assert_close(g, w, rtol=4e-3, atol=8e-3)


# -- listed sizes ------------------------------------------------------------------------------


def test_listed_sizes_are_one_method_that_shares_its_state(
    tmp_path: Path, qnn_libraries: str
) -> None:
    model = Net().eval()
    sizes = {"x": {0: qnn.Sizes(1, 4, 7)}}
    program = lower(model, X, dynamic_shapes=sizes, qnn_libraries=qnn_libraries)
    assert set(program.report.methods) == {"forward", "forward_1", "forward_7"}
    assert all(len(m.delegates) == 1 for m in program.report.methods.values())
    program.save(tmp_path / "net.pte")
    session = qnn.load(tmp_path / "net.pte", qnn_libraries=qnn_libraries)
    eager = copy.deepcopy(model)
    for n in (4, 1, 7, 1, 4):
        x = torch.randn(n, 8)
        with torch.no_grad():
            check(session(x), eager(x))
    before = session.read_state("total")
    with pytest.raises(qnn.StateError, match=r"inputs of \[4, 8\]; .*, not of \[3, 8\]"):
        session(torch.randn(3, 8))
    assert torch.equal(session.read_state("total"), before)
    twin = session.fork()
    check(twin(x), session(x))


def test_sizes_of_several_inputs_go_together_or_are_combined(qnn_libraries: str) -> None:
    b, n = qnn.Sizes(1, 2), qnn.Sizes(3, 8)
    model = Function(lambda x, y: x @ y["w"][0] + y["b"])
    y = {"w": [torch.randn(8, 5)], "b": torch.randn(2, 5)}
    shapes = ({0: b, 1: n}, {"w": [{0: n}], "b": (b, None)})
    program = lower(model, HALF, y, dynamic_shapes=shapes, qnn_libraries=qnn_libraries)
    names = {"forward", "forward_1x3", "forward_1x8", "forward_2x3"}
    assert set(program.report.methods) == names
    shapes_of = {
        name: [tuple(s.shape) for s in program.edge.exported_program(name).graph_signature
               and [n.meta["val"] for n in program.edge.exported_program(name).graph.nodes
                    if n.op == "placeholder"]]
        for name in names
    }  # fmt: skip
    assert shapes_of["forward_1x3"] == [(1, 3), (3, 5), (1, 5)]
    assert shapes_of["forward_2x3"] == [(2, 3), (3, 5), (2, 5)]


def test_each_method_has_sizes_of_its_own(tmp_path: Path, qnn_libraries: str) -> None:
    methods = {"a": (nn.ReLU(), (X,)), "b": (nn.Sigmoid(), (X,))}
    program = qnn.lower(
        methods,
        target="SM8650",
        dynamic_shapes={"b": {"input": {0: qnn.Sizes(2, 4)}}},
        qnn_libraries=qnn_libraries,
    )
    program.save(tmp_path / "both.pte")
    session = qnn.load(tmp_path / "both.pte", qnn_libraries=qnn_libraries)
    assert session.methods == ["a", "b", "b_2"]
    check(session.run("b", HALF), torch.sigmoid(HALF))
    with pytest.raises(qnn.StateError):
        session.run("a", HALF)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ({"x": {0: qnn.Sizes(1, 2)}}, r"is \[4, 8\]: its dimension 0 must be one of Sizes\(1, 2\)"),
        ({"x": {2: qnn.Sizes(4)}}, "its dimension 2 must be one of"),
    ],
)
def test_the_example_must_be_of_a_listed_size(shapes: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        lower(Net(), X, dynamic_shapes=shapes)


@pytest.mark.parametrize("sizes", [(), (0,), (1, -2), (2.5,)])
def test_sizes_are_positive_numbers(sizes: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="Sizes takes positive numbers"):
        qnn.Sizes(*sizes)


def test_dynamic_shapes_of_a_method_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="has no method c"):
        qnn.lower({"a": (nn.ReLU(), (X,))}, target="SM8650", dynamic_shapes={"c": None})


@pytest.mark.parametrize(
    ("inputs", "shapes"),
    [
        ((X, X), None),
        ((X,), {"y": {0: B}}),
        ((X,), ([{0: B}],)),
        ((X,), ({0: B}, None)),
        ((X,), (3,)),
    ],
)
def test_inputs_and_shapes_that_do_not_fit_the_model_are_a_matter_of_export(
    inputs: tuple[Any, ...], shapes: Any
) -> None:
    with pytest.raises(qnn.LoweringError, match=r"torch\.export cannot export"):
        lower(Net(), *inputs, dynamic_shapes=shapes)


# -- dynamic dimensions ------------------------------------------------------------------------

S = Dim("s", min=2, max=9)


def _collection() -> torch.export.ShapesCollection:
    shapes = torch.export.ShapesCollection()
    shapes[X] = (Dim.DYNAMIC, 8)
    return shapes


@pytest.mark.parametrize(
    ("fn", "inputs", "shapes", "named"),
    [
        (torch.relu, (X,), ({0: B},), ["input x, dimension 0: batch, 1 to 4"]),
        (torch.relu, (X,), {"x": {0: B}}, ["input x, dimension 0: batch, 1 to 4"]),
        (torch.relu, (X,), ((Dim.AUTO, None),), ["input x, dimension 0: Dim.AUTO, 2 or more"]),
        (torch.relu, (X,), ({1: Dim.DYNAMIC(max=9)},), ["dimension 1: Dim.DYNAMIC, 2 to 9"]),
        (torch.relu, (X,), _collection(), ["input x, dimension 0: Dim.DYNAMIC"]),
        (torch.relu, (X,), ({0: 2 * Dim("h", max=3)},), ["dimension 0: 2*h, 4 to 6"]),
        (
            lambda x, y: x[1:] + y,
            (X, X[1:]),
            ({0: S}, {0: S - 1}),
            ["input x, dimension 0: s, 2 to 9", "input y, dimension 0: s - 1, 1 to 8"],
        ),
        (
            lambda x, y: x + y["a"][0].sum(),
            (X, {"a": [X.clone()]}),
            ({0: B}, {"a": [{1: Dim("n", max=9)}]}),
            ["input x, dimension 0: batch, 1 to 4", "input y_a_0, dimension 1: n, 0 to 9"],
        ),
        (lambda x, y: x * y, (X, 3), (None, Dim.DYNAMIC), ["input y: a number"]),
    ],
)
def test_dynamic_dimensions_are_refused_with_name_bounds_and_a_way_out(
    fn: Callable[..., Any], inputs: tuple[Any, ...], shapes: Any, named: list[str]
) -> None:
    if isinstance(shapes, torch.export.ShapesCollection) or len(inputs) == 1:
        model: nn.Module = OneInput(fn)
    else:
        model = Function(fn)
    with pytest.raises(qnn.LoweringError) as caught:
        lower(model, *inputs, dynamic_shapes=shapes)
    message = str(caught.value)
    assert all(text in message for text in (*named, "method 'forward'", "qnn.Sizes(1, 4)"))


class OneInput(nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Any:
        return self.fn(x)


def test_a_dimension_for_which_the_model_allows_one_size_is_static(qnn_libraries: str) -> None:
    model = nn.Sequential(nn.Flatten(0), nn.Linear(32, 2))
    program = lower(model, X, dynamic_shapes=({0: Dim.AUTO},), qnn_libraries=qnn_libraries)
    assert program.report.methods["forward"].cpu_ops == []
    with pytest.raises(qnn.LoweringError, match=r"batch = 4"):
        lower(model, X, dynamic_shapes=({0: B},))


@pytest.mark.parametrize("entry", [to_edge_transform_and_lower, qnn.to_edge_transform_and_lower])
def test_exported_programs_of_any_size_run_on_the_cpu_where_sizes_are_dynamic(
    entry: Callable[..., Any], tmp_path: Path, qnn_libraries: str
) -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
            s = torch.sigmoid(s * 2)
            return torch.relu(x) + s, s + 1

    with torch.no_grad():
        program = torch.export.export(Mixed(), (X, X[:1]), dynamic_shapes=({0: B}, None))
    partitioner = qnn.QnnPartitioner("SM8650", qnn_libraries=qnn_libraries)
    edge = entry(program, partitioner=[partitioner])
    assert partitioner.plan.partitions
    reasons = [op.reason for op in partitioner.plan.cpu_ops]
    assert len(reasons) == 2
    assert all("dynamic shape" in r and "fixed sizes" in r for r in reasons)
    path = tmp_path / "mixed.pte"
    path.write_bytes(edge.to_executorch().buffer)
    session = qnn.load(path, qnn_libraries=qnn_libraries)
    for n in (4, 1, 3):
        check(session(X[:n], X[1:2]), Mixed()(X[:n], X[1:2]))
    with pytest.raises(qnn.StateError):
        session(torch.ones(5, 8), X[:1])


def test_inputs_of_another_size_or_order_of_sizes_are_refused(
    tmp_path: Path, qnn_libraries: str
) -> None:
    from executorch.runtime import Runtime

    import executorch_qnn.runtime

    program = lower(Net(), X, qnn_libraries=qnn_libraries)
    program.save(tmp_path / "net.pte")
    session = qnn.load(tmp_path / "net.pte", qnn_libraries=qnn_libraries)
    executorch_qnn.runtime.register(qnn_libraries=qnn_libraries)
    method = Runtime.get().load_program(tmp_path / "net.pte").load_method("forward")
    for x in (X[:1], torch.ones(5, 8), torch.ones(8, 4), torch.ones(32), torch.ones(1, 4, 8)):
        with pytest.raises(qnn.StateError, match=r"must be float32\[4, 8\]"):
            session(x)
        with pytest.raises(RuntimeError):
            method.execute([x])
    assert torch.equal(session.read_state("total"), torch.zeros(4))
    with torch.no_grad():
        want = Net().eval()(X)
    check(session(X), want)
    check(method.execute([X]), want)


# -- sizes that depend on values ---------------------------------------------------------------


def places(x: Tensor) -> Any:
    i, j = torch.where(x > 0)
    return torch.nonzero(torch.relu(x).reshape(2, 2, 8)), i, x[i, j], torch.relu(x)[x > 0.2] + 1


def up_to(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= x.shape[0])
    return torch.relu(x[:k] * 2), x * k


def at(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 2)
    return torch.relu(x.narrow(0, k, 2) * 2)


VALUES: dict[str, tuple[Callable[..., Any], list[tuple[Tensor, ...]]]] = {
    "places": (places, [(X,), (-X.abs() - 1,), (X.abs() + 1,)]),
    "up_to": (up_to, [(X, N), (X, N * 0), (X, N * 2)]),
    "at": (at, [(X, N), (X, N * 0)]),
}


@pytest.mark.parametrize("name", VALUES)
def test_sizes_that_depend_on_values_stay_on_the_cpu_with_the_reason(
    name: str, tmp_path: Path, qnn_libraries: str
) -> None:
    from executorch.runtime import Runtime

    import executorch_qnn.runtime

    fn, calls = VALUES[name]
    model = OneInput(fn) if len(calls[0]) == 1 else Function(fn)
    program = lower(model, *calls[0], qnn_libraries=qnn_libraries)
    (first, *_) = program.report.methods["forward"].cpu_ops
    assert "keep" in first.reason
    assert "assert" not in " ".join(op.op for op in program.report.methods["forward"].cpu_ops)
    program.save(tmp_path / "model.pte")
    session = qnn.load(tmp_path / "model.pte", qnn_libraries=qnn_libraries)
    executorch_qnn.runtime.register(qnn_libraries=qnn_libraries)
    method = Runtime.get().load_program(tmp_path / "model.pte").load_method("forward")
    for inputs in calls:
        check(session(*inputs), fn(*inputs))
        check(method.execute(inputs), fn(*inputs) if name != "at" else [fn(*inputs)])


def without_bound(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    return torch.relu(x), torch.zeros(k, 2) + 1


def into_control_flow(x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 0)
    torch._check(k <= 4)
    return torch.cond(n > 2, lambda x: x * 2, lambda x: x - 1, (x[:k],))


def anywhere(x: Tensor, n: Tensor) -> Any:
    return x.select(0, n.item()) * 2


@pytest.mark.parametrize("fn", [without_bound, into_control_flow, anywhere])
def test_what_executorch_cannot_lower_names_where_the_size_comes_from(
    fn: Callable[..., Any], qnn_libraries: str
) -> None:
    with pytest.raises(qnn.LoweringError) as caught:
        lower(Function(fn), X, N, qnn_libraries=qnn_libraries)
    message = str(caught.value)
    for text in ("_local_scalar_dense", Path(__file__).name, "torch._check", "use a mask"):
        assert text in message
