# SPDX-License-Identifier: BSD-3-Clause
"""`to_edge_transform_and_lower` with the partitioners of other backends: state stays right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import ExecutorchBackendConfig
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.backend.utils import tag_constant_data, tag_mutated_buffer
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.graph_module import get_control_flow_submodules
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from executorch.exir.pass_base import ExportPass, PassResult
from executorch.runtime import Runtime
from torch import Tensor, nn
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase

import executorch_qnn as qnn

X = torch.linspace(-1.0, 1.0, 4)
Taken = Callable[[str], bool]


class KeepsNothing(BackendDetails):  # type: ignore[misc]
    """A backend whose delegates the test interprets."""

    @staticmethod
    def preprocess(edge_program: Any, compile_specs: Any) -> PreprocessResult:
        return PreprocessResult(processed_bytes=b"nothing")


class _Takes(OperatorSupportBase):
    def __init__(self, taken: Taken) -> None:
        self.taken = taken

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        return node.op == "call_function" and self.taken(str(node.target))


class Tagging(Partitioner):  # type: ignore[misc]
    """Takes all ops but some, and tags data the way that ExecuTorch's helpers do."""

    def __init__(self, taken: Taken, owns_state: bool) -> None:
        super().__init__()
        self.taken, self.owns_state = taken, owns_state
        self.spec_ = DelegationSpec("KeepsNothing", [])

    def partition(self, ep: Any) -> PartitionResult:
        tags: dict[str, DelegationSpec] = {}
        self._tag(ep.graph_module, tags)
        tag_constant_data(ep)
        if self.owns_state:
            tag_mutated_buffer(ep)
        return PartitionResult(tagged_exported_program=ep, partition_tags=tags)

    def _tag(self, gm: torch.fx.GraphModule, tags: dict[str, DelegationSpec]) -> None:
        proposer = CapabilityBasedPartitioner(
            gm, _Takes(self.taken), allows_single_node_partition=True
        )
        for p in proposer.propose_partitions():
            tag = f"tag{len(tags)}"
            tags[tag] = self.spec_
            for node in p.nodes:
                node.meta["delegation_tag"] = tag
        for _, body, _ in get_control_flow_submodules(gm):
            self._tag(body, tags)


class _Delegates(torch.fx.Interpreter):
    """Executes a program; each delegate has memory of its own for the state that it owns."""

    def __init__(self, gm: torch.fx.GraphModule, memory: dict[int, Any]) -> None:
        super().__init__(gm)
        self.memory = memory

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is executorch_call_delegate:
            lowered = args[0]
            if id(lowered) not in self.memory:
                self.memory[id(lowered)] = copy.deepcopy(lowered.original_module).module()
            return self.memory[id(lowered)](*args[1:])
        return super().call_function(target, args, kwargs)


def simulate(ep: Any, calls: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    """What the program returns, buffers of the host being updated all at once."""
    data = {k: v.clone() for k, v in {**ep.state_dict, **ep.constants}.items()}
    memory: dict[int, Any] = {}
    results = []
    for inputs in calls:
        left = iter(inputs)
        args = [
            next(left) if s.kind.name == "USER_INPUT" else data[s.target]
            for s in ep.graph_signature.input_specs
        ]
        made = _Delegates(ep.graph_module, memory).run(*[a.clone() for a in args])
        specs = ep.graph_signature.output_specs
        results.append(
            [v.clone() for v, s in zip(made, specs, strict=True) if s.kind.name == "USER_OUTPUT"]
        )
        for value, s in zip(made, specs, strict=True):
            if s.kind.name == "BUFFER_MUTATION":
                data[s.target] = value.clone()
    return results


def eagerly(model: nn.Module, calls: Sequence[tuple[Tensor, ...]]) -> list[list[Tensor]]:
    model = copy.deepcopy(model)
    results = []
    for inputs in calls:
        out = model(*[t.clone() for t in inputs])
        results.append([t.clone() for t in (out if isinstance(out, (tuple, list)) else (out,))])
    return results


def same(got: list[list[Tensor]], want: list[list[Tensor]], **tolerance: float) -> None:
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g, w, **tolerance)


class Step(nn.Module):
    """A function of itself and the inputs, over two buffers with values."""

    def __init__(self, step: Callable[..., Any]) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("a", torch.full((4,), 5.0))
        self.register_buffer("b", torch.full((4,), 2.0))
        self.register_buffer("flat", torch.ones(2, 2))

    def forward(self, *inputs: Tensor) -> Any:
        return self.step(self, *inputs)


def _read_old_outside(s: Any, x: Tensor) -> Any:
    old = torch.sin(s.a)
    s.a.add_(x)
    return old + 1, s.a * 2


def _two_partitions(s: Any, x: Tensor) -> Any:
    s.a.add_(x)
    s.a.mul_(torch.sin(s.a + 1))
    return s.a + 1


def _indirect(s: Any, x: Tensor) -> Any:
    y = s.a + x
    s.a.copy_(torch.sin(y))
    return y * 2


def _swap(s: Any, x: Tensor) -> Any:
    t = s.a.clone()
    s.a.copy_(s.b + x)
    s.b.copy_(t)
    return s.a + s.b


def _one_value(s: Any, x: Tensor) -> Any:
    n = s.a + s.b + x
    s.a.copy_(n)
    s.b.copy_(n)
    return n * 2


def _in_cond(s: Any, x: Tensor) -> Any:
    y = torch.cond(x.sum() > 0, lambda x, a: a + x, lambda x, a: a - x, (x, s.a))
    s.a.add_(x)
    return y


def _shift(s: Any, x: Tensor) -> Any:
    out = s.a + x
    s.a.copy_(s.b)
    s.b.copy_(x)
    return out


def _view_order(s: Any, x: Tensor) -> Any:
    out = s.flat + 1.0
    s.flat.copy_(s.a.view(2, 2))
    s.a.copy_(x)
    return out


def _old_returned(s: Any, x: Tensor) -> Any:
    old = s.a.clone()
    s.a.add_(x)
    return old


def _both(change: Callable[[Any, Tensor], Any], value: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda s, x: (change(s, x), value(s))[1]


STATE: dict[str, tuple[Callable[..., Any], Taken]] = {
    "all inside": (_both(lambda s, x: s.a.add_(x), lambda s: s.a * 2), lambda op: True),
    "old value read outside": (_read_old_outside, lambda op: "sin" not in op),
    "new value read outside": (
        _both(lambda s, x: s.a.add_(x), lambda s: (torch.sin(s.a), s.a * 2)),
        lambda op: "sin" not in op,
    ),
    "new value returned": (_both(lambda s, x: s.a.add_(x), lambda s: s.a), lambda op: True),
    "two partitions": (_two_partitions, lambda op: "sin" not in op),
    "new value made outside": (_indirect, lambda op: "sin" not in op),
    "swapped": (_swap, lambda op: True),
    "one value in two buffers": (_one_value, lambda op: True),
    "read in a cond": (_in_cond, lambda op: "cond" not in op),
    "shifted": (_shift, lambda op: True),
    "view in another buffer": (_view_order, lambda op: True),
    "old value returned": (_old_returned, lambda op: True),
}


@pytest.mark.parametrize("owns_state", [True, False], ids=["tagged", "untagged"])
@pytest.mark.parametrize("case", STATE)
def test_state_is_right_whatever_a_partitioner_tags(case: str, owns_state: bool) -> None:
    step, taken = STATE[case]
    model = Step(step).eval()
    calls = [(X + i,) for i in range(3)]
    program = torch.export.export(model, (X,))
    edge = qnn.to_edge_transform_and_lower(program, partitioner=[Tagging(taken, owns_state)])
    ep = edge.exported_program()
    assert get_lowered_backend_modules(ep.graph_module)
    same(simulate(ep, calls), eagerly(model, calls))


def test_state_that_one_delegate_can_own_stays_with_it() -> None:
    step, taken = STATE["all inside"]
    program = torch.export.export(Step(step).eval(), (X,))
    edge = qnn.to_edge_transform_and_lower(program, partitioner=[Tagging(taken, True)])
    assert "a" not in edge.exported_program().graph_signature.inputs_to_buffers.values()


class DropClones(ExportPass):  # type: ignore[misc]
    """What some backends' passes do."""

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        for node in list(graph_module.graph.nodes):
            if node.op == "call_function" and "clone" in str(node.target):
                node.replace_all_uses_with(node.args[0])
                graph_module.graph.erase_node(node)
        graph_module.recompile()
        return PassResult(graph_module, True)


@pytest.mark.parametrize("case", [c for c in STATE if c != "one value in two buffers"])
@pytest.mark.parametrize(
    ("reinplace", "passes"),
    [(False, None), (True, None), (False, [DropClones()])],
    ids=["plain", "reinplace", "clones dropped"],
)
def test_state_on_the_cpu_follows_eager(case: str, reinplace: bool, passes: Any) -> None:
    model = Step(STATE[case][0]).eval()
    calls = [(X + i,) for i in range(3)]
    edge = qnn.to_edge_transform_and_lower(torch.export.export(model, (X,)), passes)
    made = edge.to_executorch(ExecutorchBackendConfig(run_reinplace_pass=reinplace))
    method = Runtime.get().load_program(made.buffer).load_method("forward")
    assert method is not None
    got = [[t.clone() for t in method.execute(inputs)] for inputs in calls]
    same(got, eagerly(model, calls))


@pytest.mark.parametrize("passes", [None, [DropClones()]])
def test_one_value_in_two_buffers(passes: Any) -> None:
    model = Step(_one_value).eval()
    program = torch.export.export(model, (X,))
    if passes:
        with pytest.raises(qnn.LoweringError, match="pass"):
            qnn.to_edge_transform_and_lower(program, passes)
        return
    made = qnn.to_edge_transform_and_lower(program).to_executorch()
    method = Runtime.get().load_program(made.buffer).load_method("forward")
    assert method is not None
    same([[t.clone() for t in method.execute([X])]], eagerly(model, [(X,)]))


class Hybrid(nn.Module):
    """State beside ops that QNN takes, that XNNPACK takes, and that nobody takes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.conv = nn.Conv2d(1, 2, 3)
        self.register_buffer("h", torch.full((1, 8), 0.5))
        self.register_buffer("n", torch.tensor(3.0))

    def forward(self, x: Tensor, image: Tensor) -> Any:
        self.h.mul_(0.5).add_(self.first(x))
        y = nn.functional.gelu(self.conv(image)).mean((2, 3))
        z = torch.cosh(self.h)
        self.n.add_(1.0)
        out = torch.softmax(self.second(z), -1) + self.n
        return out, nn.functional.hardswish(y), nn.functional.layer_norm(z, (8,)), self.h * 1.0


HYBRID = (torch.linspace(-1, 1, 8).reshape(1, 8), torch.linspace(-2, 2, 64).reshape(1, 1, 8, 8))


@pytest.mark.parametrize(
    ("order", "passes", "owner"),
    [
        ("qnn", None, "delegate"),
        ("qnn, xnnpack", None, "delegate"),
        ("xnnpack, qnn", None, "host"),
        ("qnn", [], "delegate"),
        ("xnnpack", None, None),
    ],
)
def test_backends_share_a_program_in_any_order(
    order: str, passes: Any, owner: str | None, tmp_path: Path, qnn_libraries: str
) -> None:
    ours = qnn.QnnPartitioner("SM8650", qnn_libraries=qnn_libraries)
    partitioners = [ours if p == "qnn" else XnnpackPartitioner() for p in order.split(", ")]
    model = Hybrid().eval()
    program = torch.export.export(model, HYBRID)
    edge = qnn.to_edge_transform_and_lower(program, passes, partitioner=partitioners)
    lowered = get_lowered_backend_modules(edge.exported_program().graph_module)
    left = [str(n.target) for n in edge.exported_program().graph.nodes if "aten" in str(n.target)]
    assert {"QnnDelegate" if p == "qnn" else "XnnpackBackend" for p in order.split(", ")} >= {
        m.backend_id for m in lowered
    }
    if owner:
        assert len(left) == 1  # cosh
        assert "cosh" in left[0]
        assert [o.op for o in ours.plan.cpu_ops if "cosh" in o.op]
        assert {o.owner for o in ours.plan.owners if o.fqn == "h"} == {owner}
    path = tmp_path / "hybrid.pte"
    path.write_bytes(edge.to_executorch().buffer)
    session = qnn.load(path, qnn_libraries=qnn_libraries)
    calls = [HYBRID] * 3
    with torch.no_grad():
        same([list(session(*c)) for c in calls], eagerly(model, calls), rtol=4e-3, atol=4e-3)


class Put(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor) -> Tensor:
        self.core.a.add_(x)
        return x * 1.0


class Get(nn.Module):
    def __init__(self, core: nn.Module, renamed: bool) -> None:
        super().__init__()
        if renamed:
            self.register_buffer("other", core.get_buffer("a"))
        else:
            self.core = core

    def forward(self, x: Tensor) -> Tensor:
        return x * 0.0 + (self.other if hasattr(self, "other") else self.core.a)


@pytest.mark.parametrize("delegated", [False, True], ids=["cpu", "delegated"])
@pytest.mark.parametrize("renamed", [False, True], ids=["one name", "two names"])
def test_methods_share_state_of_the_host(renamed: bool, delegated: bool, tmp_path: Path) -> None:
    core = Step(lambda s, x: x)
    methods = {
        "get": torch.export.export(Get(core, renamed).eval(), (X,)),
        "put": torch.export.export(Put(core).eval(), (X,)),
    }
    partitioner = [Tagging(lambda op: True, owns_state=True)] if delegated else None
    edge = qnn.to_edge_transform_and_lower(methods, partitioner=partitioner)
    for name in methods:  # in no method a constant, nor a delegate's own
        buffers = edge.exported_program(name).graph_signature.inputs_to_buffers
        assert ("other" if renamed else "core.a") in buffers.values()
    if delegated:
        return
    path = tmp_path / "shared.pte"
    path.write_bytes(edge.to_executorch().buffer)
    program = Runtime.get().load_program(str(path))
    loaded = {name: program.load_method(name) for name in methods}
    session = qnn.load(path)
    for run in (lambda name: loaded[name].execute([X])[0], lambda name: session.run(name, X)):
        torch.testing.assert_close(run("get"), torch.full((4,), 5.0))
        run("put")
        run("put")
        torch.testing.assert_close(run("get"), 5.0 + 2 * X)


def test_a_planning_pass_of_the_caller_shares_too() -> None:
    core = Step(lambda s, x: x)
    methods = {
        "get": torch.export.export(Get(core, False).eval(), (X,)),
        "put": torch.export.export(Put(core).eval(), (X,)),
    }
    edge = qnn.to_edge_transform_and_lower(methods)
    planning = qnn.AliasAwareMemoryPlanning()
    made = edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    assert not planning.share_mutable_buffers
    program = Runtime.get().load_program(made.buffer)
    loaded = {name: program.load_method(name) for name in methods}
    loaded["put"].execute([X])
    torch.testing.assert_close(loaded["get"].execute([X])[0], 5.0 + X)
    passes = {name: qnn.AliasAwareMemoryPlanning() for name in methods}
    with pytest.raises(qnn.LoweringError, match="one MemoryPlanningPass for all"):
        qnn.to_edge_transform_and_lower(methods).to_executorch(
            ExecutorchBackendConfig(memory_planning_pass=passes)
        )


def test_values_of_a_buffer_are_not_taken_for_a_constant_of_the_same_bytes() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("state", torch.full((4,), 7.0))
            self.register_buffer("constant", torch.full((4,), 7.0))

        def forward(self, x: Tensor) -> Tensor:
            y = self.constant * x
            self.state.add_(x)
            return y + self.state

    model = Model().eval()
    made = qnn.to_edge_transform_and_lower(torch.export.export(model, (X,))).to_executorch()
    method = Runtime.get().load_program(made.buffer).load_method("forward")
    assert method is not None
    got = [[t.clone() for t in method.execute([X])] for _ in range(2)]
    same(got, eagerly(model, [(X,)] * 2))


def test_nodes_of_one_shape_are_not_nodes_of_the_same_operands() -> None:
    """What a node consists of is remembered by shapes, though one node has one tensor twice."""

    def step(s: Any, x: Tensor) -> Any:
        one, other = x > 0, x > 0.5
        y = x.reshape(2, 2)
        return (one ^ one), (one ^ other), y @ y, y @ s.flat, torch.lerp(y.t()[:1], s.flat[:1], 0.5)

    model = Step(step).eval()
    ep = qnn.to_edge_transform_and_lower(torch.export.export(model, (X,))).exported_program()
    same(simulate(ep, [(X,)]), eagerly(model, [(X,)]))


_LIBRARY = torch.library.Library("test_flow", "DEF")
_LIBRARY.define("increase_(Tensor(a!) x, Tensor y) -> ()")
_LIBRARY.define("same(Tensor(a) x) -> Tensor(a)")
_LIBRARY.impl("increase_", lambda x, y: (x.add_(y), None)[1], "CompositeExplicitAutograd")
_LIBRARY.impl("same", lambda x: x.view(x.shape), "CompositeExplicitAutograd")


def test_custom_ops_that_cannot_be_called_are_named() -> None:
    def increase(s: Any, x: Tensor) -> Tensor:
        torch.ops.test_flow.increase_(s.a, x)
        return s.a * 2.0

    edge = qnn.to_edge_transform_and_lower(torch.export.export(Step(increase), (X,)))
    with pytest.raises(qnn.LoweringError, match=r"(?s)increase_.*test_flow\.py.*Return the new"):
        edge.to_executorch()
    view = torch.export.export(Step(lambda s, x: torch.ops.test_flow.same(x + 1.0) * 2.0), (X,))
    with pytest.raises(qnn.LoweringError, match=r"returns a view of its argument.*same_copy"):
        qnn.to_edge_transform_and_lower(view)


def test_named_results_are_returned_as_tuples() -> None:
    model = Step(lambda s, x: torch.topk(x, 2))
    made = qnn.to_edge_transform_and_lower(torch.export.export(model, (X,))).to_executorch()
    method = Runtime.get().load_program(made.buffer).load_method("forward")
    assert method is not None
    same([method.execute([X])], eagerly(model, [(X,)]))


def test_partitioners_of_one_program_must_agree(qnn_libraries: str) -> None:
    program = torch.export.export(Step(lambda s, x: x + 1.0), (X,))
    one, two = (qnn.QnnPartitioner(t, qnn_libraries=qnn_libraries) for t in ("SM8650", "SM8550"))
    with pytest.raises(qnn.LoweringError, match="two QnnPartitioners"):
        qnn.to_edge_transform_and_lower(program, partitioner=[one, one])
    with pytest.raises(qnn.LoweringError, match="different options"):
        qnn.to_edge_transform_and_lower(
            {"a": program, "b": program}, partitioner={"a": [one], "b": [two]}
        )
