# SPDX-License-Identifier: BSD-3-Clause
"""Memory planning that knows what shares memory, in ExecuTorch's own flow and runtime."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge_transform_and_lower
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.pass_base import PassBase, PassResult
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.program import EdgeProgramManager
from executorch.exir.schema import KernelCall
from executorch.extension.pybindings.portable_lib import _load_for_executorch_from_buffer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._higher_order_ops import scan
from torch._higher_order_ops.map import map as torch_map

import executorch_qnn as qnn

aten = torch.ops.aten
NO_CHECK = EdgeCompileConfig(_check_ir_validity=False)
X = torch.arange(64.0).reshape(8, 8) / 64
ROW = torch.tensor([3])


class Fn(nn.Module):
    """A function of itself and the inputs, with buffers that start at zero."""

    def __init__(self, step: Callable[..., Any], **buffers: Sequence[int]) -> None:
        super().__init__()
        self.step = step
        for name, shape in buffers.items():
            self.register_buffer(name, torch.zeros(*shape))

    def forward(self, *inputs: Tensor) -> Any:
        return self.step(self, *inputs)


@dataclass
class Both(qnn.AliasAwareMemoryPlanning):  # type: ignore[misc, name-defined]
    """Plans a copy with the stock pass as well, to compare how much memory it takes."""

    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(**self.options)
        self.bytes: list[tuple[int, int]] = []

    def run(self, gm: Any, sig: Any = None) -> PassResult:
        stock = copy.deepcopy(gm)
        MemoryPlanningPass(**self.options).run(stock, copy.deepcopy(sig))
        for graph in (m for m in stock.modules() if isinstance(m, torch.fx.GraphModule)):
            for n in graph.graph.nodes:
                for s in torch.utils._pytree.tree_leaves(n.meta.get("spec")):
                    if hasattr(s, "init_mem_planning_fields"):
                        s.init_mem_planning_fields()
        result = super().run(gm, sig)
        sizes = [sum(m.meta["non_const_buffer_sizes"]) for m in (stock, gm)]
        self.bytes.append((sizes[0], sizes[1]))
        return result


def edge(model: nn.Module, inputs: tuple[Tensor, ...], **options: Any) -> EdgeProgramManager:
    program = torch.export.export(model, inputs)
    return to_edge_transform_and_lower(program, compile_config=NO_CHECK, **options)


def executorch(manager: EdgeProgramManager, planning: Any, **config: Any) -> Any:
    """Makes an executable program; leaves the manager as it was."""
    again = EdgeProgramManager(copy.deepcopy(manager.exported_program()), compile_config=NO_CHECK)
    return again.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning, **config))


def check(model: nn.Module, inputs: tuple[Tensor, ...], program: Any) -> None:
    """Three calls in the runtime give what eager gives, bit by bit."""
    eager = copy.deepcopy(model)
    method = _load_for_executorch_from_buffer(program.buffer)
    for i in range(3):
        moved = [t + 0.25 * i if t.is_floating_point() else t for t in inputs]
        got = method.run_method("forward", [t.clone() for t in moved])
        want = torch.utils._pytree.tree_leaves(eager(*[t.clone() for t in moved]))
        assert len(want) <= len(got)  # updated inputs are returned in front
        for g, w in zip(got[len(got) - len(want) :], want, strict=True):
            torch.testing.assert_close(g, w, rtol=0, atol=0)


def ops(program: Any) -> list[str]:
    """The kernels that a program calls, in order."""
    plan = program.executorch_program.execution_plan[0]
    return [
        plan.operators[i.instr_args.op_index].name.removeprefix("aten::")
        for i in plan.chains[0].instructions
        if isinstance(i.instr_args, KernelCall)
    ]


BUFFER = {"b": (8, 8)}
TWO = {"b": (8, 8), "c": (8, 8)}
REVERSED = {"c": (8, 8), "b": (8, 8)}


def case(step: Callable[..., Any], buffers: Any = None, *inputs: Tensor) -> Any:
    return pytest.param(step, buffers or {}, inputs or (X,), id=step.__name__)


def input_returned(s: Any, x: Tensor) -> Any:
    return x, x + 1.0


def twice(s: Any, x: Tensor) -> Any:
    y = x + 1.0
    return y, y, y.view(64)


def view_chain(s: Any, x: Tensor) -> Any:
    return (x + 1.0).view(64).view(4, 16).view(2, 32) * 2.0 + x.view(2, 32)


def permuted(s: Any, x: Tensor) -> Any:
    return (x + 1.0).transpose(0, 1).reshape(4, 16).permute(1, 0) * 2.0


def split(s: Any, x: Tensor) -> Any:
    return [t.view(32) * 2.0 for t in (x + 1.0).chunk(2, 0)]


def added(s: Any, x: Tensor) -> Any:
    s.b.add_(x)
    return s.b, s.b.view(64), s.b * 2.0


def old_returned(s: Any, x: Tensor) -> Any:
    old = s.b.clone()
    s.b.add_(x)
    return old


def view_updated(s: Any, x: Tensor) -> Any:
    v = aten.view_copy(s.b, [64])
    s.b.copy_(x)
    return v * 2.0, s.b.sum() + v.sum()


def rows_put(s: Any, x: Tensor) -> Any:
    aten.index_put_(s.b, [torch.tensor([3])], x[:1])
    return s.b * 1.0, s.b


def shifted(s: Any, x: Tensor) -> Any:
    out = s.b + x
    s.b.copy_(s.c)
    s.c.copy_(x)
    return out


def swapped(s: Any, x: Tensor) -> Any:
    old = s.b.clone()
    s.b.copy_(s.c + x)
    s.c.copy_(old)
    return s.b + s.c


def assigned_and_added(s: Any, x: Tensor) -> Any:
    t = s.b + x
    s.b.copy_(s.c)
    s.c.copy_(t)
    return x + s.b * 2 + s.c


def input_updated(s: Any, x: Tensor) -> Any:
    x.add_(1.0)
    return x * 2.0


def input_from_buffer(s: Any, x: Tensor) -> Any:
    out = x + 1.0
    x.copy_(s.b)
    s.b.copy_(out)
    return out * 2.0


def put_of_returned(s: Any, x: Tensor, i: Tensor) -> Any:
    y = x + 1.0
    return y, aten.index_put(y, [i], x[:1])


def put_read_late(s: Any, x: Tensor, i: Tensor) -> Any:
    y = aten.index_put(x + 1.0, [i], x[:1])
    z = x * 2.0
    for n in range(3):
        z = z * z + float(n)
    return z + y, z


def cond_cloned(s: Any, x: Tensor) -> Any:
    y = x + 1.0
    a, b = torch.cond(
        x.sum() > 0, lambda v: (v.clone(), v.clone()), lambda v: (v - 1.0, v - 2.0), (y,)
    )
    return a * 2.0, b


def cond_twice(s: Any, x: Tensor) -> Any:
    def branch(v: Tensor) -> Any:
        return torch.cond(v.sum() > 0, lambda v: v + 1.0, lambda v: v - 1.0, (v,))

    a, b = branch(x), branch(x * 3.0)
    return a * 2.0 + b * 5.0


def cond_nested(s: Any, x: Tensor) -> Any:
    def inner(v: Tensor) -> Any:
        return torch.cond(v.mean() > 0, lambda v: v * 2.0, lambda v: v - 3.0, (v + 1.0,))

    return torch.cond(x.sum() > 0, lambda v: inner(v) + inner(v * 2.0), lambda v: v - 1.0, (x,))


def cond_of_buffer(s: Any, x: Tensor) -> Any:
    out = torch.cond(x.sum() > 0, lambda b: b.view(64) * 2.0, lambda b: b.view(64) - 1.0, (s.b,))
    s.b.add_(x)
    return out


def scanned(s: Any, x: Tensor) -> Any:
    return scan(lambda c, a: (c + a, c.clone()), torch.zeros(8), x)


def mapped(s: Any, x: Tensor) -> Any:
    return torch_map(lambda a: a + 1.0, x)


def narrowed(s: Any, x: Tensor, n: Tensor) -> Any:
    k = n.item()
    torch._check(k >= 1)
    torch._check(k <= 8)
    return x.narrow(0, 0, k) * 2.0


@pytest.mark.parametrize(
    ("step", "buffers", "inputs"),
    [
        *map(case, (input_returned, twice, view_chain, permuted, split)),
        *(case(f, BUFFER) for f in (added, old_returned, view_updated, rows_put)),
        *(case(f, TWO) for f in (shifted, swapped, assigned_and_added)),
        pytest.param(shifted, REVERSED, (X,), id="shifted_reversed"),
        case(input_updated),
        case(input_from_buffer, BUFFER),
        case(put_of_returned, {}, X, ROW),
        case(put_read_late, {}, X, ROW),
        *map(case, (cond_cloned, cond_twice, cond_nested, scanned, mapped)),
        case(cond_of_buffer, BUFFER),
        case(narrowed, {}, X, torch.tensor(3)),
    ],
)
def test_programs_follow_eager_in_no_more_memory(
    step: Callable[..., Any], buffers: Any, inputs: tuple[Tensor, ...]
) -> None:
    model = Fn(step, **buffers)
    try:
        manager = edge(model, inputs)
    except torch._export.verifier.SpecViolationError:
        pytest.skip("ExecuTorch's entry point does not lower it")
    for reinplace in {False, bool(buffers) or "put" in step.__name__}:
        planning = Both()
        program = executorch(manager, planning, run_reinplace_pass=reinplace)
        check(model, inputs, program)
        ((stock, ours),) = planning.bytes
        assert ours <= stock


def test_outputs_take_no_memory_for_updates() -> None:
    def step(s: Any, x: Tensor, i: Tensor) -> Tensor:
        for n in range(4):
            aten.index_put_(getattr(s, f"b{n}"), [i], x)
        return x * 2.0

    model = Fn(step, **{f"b{n}": (1024, 64) for n in range(4)})
    inputs = (torch.ones(1, 64), ROW)
    planning = Both()
    program = executorch(edge(model, inputs), planning, run_reinplace_pass=True)
    assert planning.bytes == [(2_097_408, 1_049_088)]
    check(model, inputs, program)


class DropClones(PassBase):
    """What some backends' passes do: a clone is no more than its argument."""

    def call(self, gm: torch.fx.GraphModule) -> PassResult:
        for n in list(gm.graph.nodes):
            if "clone" in str(n.target):
                n.replace_all_uses_with(n.args[0])
                gm.graph.erase_node(n)
        gm.recompile()
        return PassResult(gm, True)


def swapped_alone(s: Any, x: Tensor) -> Any:
    out, old = s.b + x, s.b.clone()
    s.b.copy_(s.c)
    s.c.copy_(old + x)
    return out


def crossed(s: Any, x: Tensor) -> Any:
    out, old = s.b + s.c * x, s.b.clone()
    s.b.copy_(s.c)
    s.c.copy_(old)
    s.d.copy_(x)
    return out


def viewed_crosswise(s: Any, x: Tensor) -> Any:
    out, old = s.flat + 1.0, s.b.clone()
    s.b.copy_(x)
    s.flat.copy_(old.view(64))
    return out


@pytest.mark.parametrize(
    ("step", "buffers"),
    [
        (old_returned, BUFFER),
        (swapped_alone, TWO),
        (crossed, {**TWO, "d": (8, 8)}),
        (viewed_crosswise, {"b": (8, 8), "flat": (64,)}),
    ],
)
def test_old_values_survive_passes_that_drop_their_clones(
    step: Callable[..., Any], buffers: Any
) -> None:
    model = Fn(step, **buffers)
    manager = edge(model, (X,), transform_passes=[DropClones()])
    for reinplace in (False, True):
        check(model, (X,), executorch(manager, Both(), run_reinplace_pass=reinplace))


def test_updates_that_read_nothing_are_computed_in_place() -> None:
    def step(s: Any, x: Tensor) -> Tensor:
        out = s.b * 2.0
        s.b.copy_(x * 3.0)
        return out

    model = Fn(step, **BUFFER)
    planning = Both()
    program = executorch(edge(model, (X,)), planning)
    assert "copy_" not in ops(program)
    ((stock, ours),) = planning.bytes
    assert ours <= stock - X.nbytes
    check(model, (X,), program)


def on_cpu(x: Tensor) -> Tensor:
    """What XNNPACK does not take, and is exact."""
    return torch.flip(x, [0])


def unread(s: Any, x: Tensor) -> Any:
    out = on_cpu(s.b)
    s.b.copy_(x * x)
    return out


def read_by_the_delegate(s: Any, x: Tensor) -> Any:
    s.b.copy_(s.b + x)
    return on_cpu(x)


def returned_as_well(s: Any, x: Tensor) -> Any:
    y = x * x
    s.b.copy_(y)
    return y, on_cpu(x)


def late_reader(s: Any, x: Tensor) -> Any:
    y = x * x
    out = on_cpu(on_cpu(y) + s.b)
    s.b.copy_(y)
    return out


@pytest.mark.parametrize(
    ("step", "copies"),
    [(unread, 0), (read_by_the_delegate, 1), (returned_as_well, 1), (late_reader, 1)],
)
def test_a_delegate_writes_a_buffer_that_nobody_reads_from_then_on(
    step: Callable[..., Any], copies: int
) -> None:
    model = Fn(step, **BUFFER)
    planning = Both()
    program = executorch(edge(model, (X,), partitioner=[XnnpackPartitioner()]), planning)
    assert ops(program).count("copy_") == copies
    ((stock, ours),) = planning.bytes
    assert ours <= stock - (0 if copies else X.nbytes)
    check(model, (X,), program)


class PlanningTestBackend(BackendDetails):  # type: ignore[misc]
    """Compiles to nothing; declares the pairs that are set on it."""

    pairs: Any = None

    @staticmethod
    def preprocess(program: Any, specs: Any) -> PreprocessResult:
        declared = PlanningTestBackend.pairs
        info = None if declared is None else SimpleNamespace(in_place_pairs=declared)
        return PreprocessResult(processed_bytes=b"", _delegate_info_meta=info)


class Everything(Partitioner):  # type: ignore[misc]
    def partition(self, program: Any) -> PartitionResult:
        for n in program.graph.nodes:
            if n.op == "call_function":
                n.meta["delegation_tag"] = "all"
        specs = {"all": DelegationSpec("PlanningTestBackend", [])}
        return PartitionResult(tagged_exported_program=program, partition_tags=specs)


@pytest.mark.parametrize(("declared", "copies"), [(None, 1), ({(1, 0)}, 1), ({(0, 0)}, 0)])
def test_a_delegate_that_reads_a_buffer_writes_it_if_it_declares_the_pair(
    declared: Any, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(s: Any, x: Tensor) -> Tensor:
        s.b.add_(x)
        return x * 2.0

    monkeypatch.setattr(PlanningTestBackend, "pairs", declared)
    manager = edge(Fn(step, **BUFFER), (X,), partitioner=[Everything()])
    program = executorch(manager, Both())
    assert ops(program).count("copy_") == copies
    nodes = {n.name: n for n in program.exported_program().graph.nodes}
    (call,) = (n for n in nodes.values() if n.target is executorch_call_delegate)
    (updated,) = (n for n in call.users if n.target is operator.getitem and n.args[1] == 0)
    assert (updated.meta["spec"] is nodes["b_b"].meta["spec"]) == (copies == 0)


def test_applications_may_place_outputs_themselves() -> None:
    planning = qnn.AliasAwareMemoryPlanning(alloc_graph_input=False, alloc_graph_output=False)
    manager = edge(Fn(added, **BUFFER), (X,))
    program = executorch(manager, planning, run_reinplace_pass=True)
    plan = program.executorch_program.execution_plan[0]
    outputs = [plan.values[i].val for i in plan.outputs]
    assert all(o.allocation_info is None for o in outputs)


class Reset(nn.Module):
    def __init__(self, core: nn.Module) -> None:
        super().__init__()
        self.register_buffer("b", core.get_buffer("b"))

    def forward(self, x: Tensor) -> None:
        self.b.copy_(x * 0.0)


def test_methods_that_share_a_buffer_have_it_at_one_address() -> None:
    core = Fn(added, **BUFFER)
    programs = {n: torch.export.export(m, (X,)) for n, m in (("forward", core), ("r", Reset(core)))}
    manager = to_edge_transform_and_lower(programs, compile_config=NO_CHECK)
    planning = qnn.AliasAwareMemoryPlanning(share_mutable_buffers=True)
    manager = manager.to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
    for plan in manager.executorch_program.execution_plan:
        assert plan.non_const_buffer_sizes[2] == X.nbytes
    specs = [
        next(n for n in manager.exported_program(m).graph.nodes if n.name == "b_b").meta["spec"]
        for m in ("forward", "r")
    ]
    assert [(s.mem_id, s.mem_offset) for s in specs] == [(2, 0), (2, 0)]


NAMES = ("b", "c", "d")
names = st.sampled_from(NAMES)
STEPS = st.one_of(
    st.tuples(st.just("assign"), names, names),
    st.tuples(st.just("swap"), names, names),
    st.tuples(st.just("shift"), names, names),
    st.tuples(st.just("add"), names, names),
    st.tuples(st.just("view"), names, names),
    st.tuples(st.just("put"), names, names),
    st.tuples(st.just("input"), names, names),
    st.tuples(st.just("return"), names, names),
    st.tuples(st.just("keep"), names, names),
)


def interpret(s: Any, x: Tensor, i: Tensor, steps: list[tuple[str, str, str]]) -> list[Tensor]:
    results = [x * 1.0]
    for kind, a, b in steps:
        first, second = getattr(s, a), getattr(s, b)
        if kind == "assign":
            first.copy_(second * 1.0)
        elif kind == "swap":
            old = first.clone()
            first.copy_(second.clone())
            second.copy_(old)
        elif kind == "shift":
            first.copy_(second.clone())
            second.copy_(x * 0.5)
        elif kind == "add":
            first.add_(second)
        elif kind == "view":
            first.copy_(second.clone().view(64).view(8, 8))
        elif kind == "put":
            aten.index_put_(first, [i], second[:1] + 1.0)
        elif kind == "input":
            first.copy_(x)
        elif kind == "return":
            results.append(first + second)
        else:
            results.append(first.clone())
    return results


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=st.lists(STEPS, min_size=1, max_size=6), clones=st.booleans(), reinplace=st.booleans())
def test_random_updates_follow_eager(
    steps: list[tuple[str, str, str]], clones: bool, reinplace: bool
) -> None:
    model = Fn(lambda s, x, i: interpret(s, x, i, steps), **dict.fromkeys(NAMES, (8, 8)))
    program = torch.export.export(model, (X, ROW))
    try:
        manager = to_edge_transform_and_lower(
            program,
            transform_passes=None if clones else [DropClones()],
            compile_config=NO_CHECK,
        )
    except (torch._export.verifier.SpecViolationError, AssertionError):
        return  # several retraces in ExecuTorch's entry point do not survive some of these
    check(model, (X, ROW), executorch(manager, Both(), run_reinplace_pass=reinplace))
