# SPDX-License-Identifier: BSD-3-Clause
"""State that several partitions, several methods, or delegates and the CPU touch.

Every program runs through our session and through ExecuTorch's own runtime, call by call against
eager.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn
from executorch_qnn.aliasing.updates import sort
from executorch_qnn.compile.compiler import CompileWorker, GraphRefused
from executorch_qnn.compile.ir import Graph

from .models import Model, _noise

Inputs = tuple[Tensor, ...]
Methods = dict[str, tuple[nn.Module, Inputs]]
Calls = Sequence[tuple[str, Inputs]]


@dataclass(frozen=True)
class Check:
    """Lowers methods and compares each call of a program with eager, in both runtimes."""

    folder: Path
    qnn_libraries: str

    def __call__(self, methods: Methods, calls: Calls, **options: Any) -> qnn.Program:
        eager = copy.deepcopy(methods)  # one copy of all, so that shared modules stay shared
        program = qnn.lower(methods, target="SM8650", qnn_libraries=self.qnn_libraries, **options)
        path = self.folder / "program.pte"
        program.save(path)
        session = qnn.load(path, qnn_libraries=self.qnn_libraries)
        stock = self._stock(path)
        for i, (name, inputs) in enumerate(calls):
            with torch.no_grad():
                want = pytree.tree_map(torch.clone, eager[name][0](*inputs))
            assert_close(session.run(name, *inputs), want, f"call {i}, {name}")
            assert_close(stock(name, inputs), want, f"call {i}, {name}, stock runtime")
        for module, _ in eager.values():
            for fqn, value in module.named_buffers():
                if fqn in session.state():
                    assert_close(session.read_state(fqn), value, f"buffer {fqn}")
        return program

    def forward(self, model: nn.Module, *calls: Inputs, **options: Any) -> qnn.Program:
        methods = {"forward": (model.eval(), calls[0])}
        return self(methods, [("forward", c) for c in calls], **options)

    def _stock(self, path: Path) -> Callable[[str, Inputs], Any]:
        from executorch.runtime import Runtime

        qnn.register(self.qnn_libraries)
        program = Runtime.get().load_program(path)
        methods = {name: program.load_method(name) for name in program.method_names}
        return lambda name, inputs: methods[name].execute(inputs)


def assert_close(got: Any, want: Any, where: str) -> None:
    got, want = pytree.tree_leaves(got), pytree.tree_leaves(want)
    assert len(got) == len(want), where
    for g, w in zip(got, want, strict=True):
        assert (g.shape, g.dtype) == (w.shape, w.dtype), where
        torch.testing.assert_close(
            g,
            w,
            rtol=4e-3,
            atol=8e-3,
            msg=lambda m: f"{where}: {m}",
        )


@pytest.fixture
def check(tmp_path: Path, qnn_libraries: str) -> Check:
    return Check(tmp_path, qnn_libraries)


def steps(*shape: int, n: int = 4) -> Iterator[Inputs]:
    return ((_noise(i, *shape),) for i in range(n))


def owners(program: qnn.Program, method: str = "forward") -> dict[str, tuple[str, str]]:
    """Buffer to its owner and binding."""
    return {s.fqn: (s.owner, s.binding) for s in program.report.methods[method].state}


def reason(program: qnn.Program, fqn: str, method: str = "forward") -> str:
    return next(s.reason for s in program.report.methods[method].state if s.fqn == fqn)


RAMP = torch.arange(12.0).reshape(3, 4) / 8
cpu = torch.cosh  # has no row in the op table


# -- several partitions ---------------------------------------------------------------------------


def read_then_written(s: Model, x: Tensor) -> Tensor:
    """Case 14: what is read here goes through the CPU into what is written there."""
    u = cpu(torch.tanh(x + s.a))
    s.a.copy_(torch.sigmoid(u * 0.5))
    return u * 2.0


def read_beside(s: Model, x: Tensor) -> Tensor:
    """No data lead from the reader behind the CPU op to the writer: only the order of calls."""
    late = cpu(torch.tanh(x)) * 0.25 + s.a
    s.a.mul_(0.5).add_(x)
    return late


def read_unrelated(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The reader and the writer have nothing to do with each other but the buffer."""
    new = cpu(x) * 0.25
    y = cpu(s.a * 0.5) + 1.0
    s.a.copy_(new)
    return y, new


def read_after(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """The old value is needed behind a CPU op that needs the new one."""
    old = s.a.clone()
    s.a.mul_(0.5).add_(x)
    return cpu(torch.tanh(s.a)) * 0.25 + old * 2.0, s.a - x


def written_only_by_itself(s: Model, x: Tensor) -> Tensor:
    """The writing partition reads nothing of the buffer and returns nothing."""
    y = cpu(torch.tanh(x)) * 0.5 + s.a
    s.a.copy_(cpu(torch.tanh(y)) * 0.25)
    return cpu(torch.tanh(y))


def crossed(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Each buffer's old value is needed behind a CPU op that needs the other's new value."""
    a, b = s.a.clone(), s.b.clone()
    s.a.mul_(0.5).add_(x)
    s.b.mul_(0.25).sub_(x)
    return cpu(torch.tanh(s.b)) * 0.2 + a, cpu(torch.tanh(s.a)) * 0.2 + b


def swapped_far(s: Model, x: Tensor) -> Tensor:
    """Swapped, and both read behind a CPU op."""
    y = cpu(torch.tanh(x)) * 0.2
    out = y * s.a - s.b
    a = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(a)
    return out


def rotated(s: Model, x: Tensor) -> Tensor:
    y = cpu(torch.tanh(x)) * 0.2 + s.b
    a = s.a.clone()
    s.a.copy_(s.b)
    s.b.copy_(s.c)
    s.c.copy_(a + x)
    return y + s.c


def old_returned(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.a.clone()
    s.a.copy_(cpu(torch.tanh(x + s.b)) * 0.5 + s.b)
    s.b.copy_(old)
    return old, s.a * 1.0


def shifted_far(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two regions that change places, read by another delegate."""
    before = s.a * 1.0
    y = cpu(torch.tanh(x)) * 0.1
    s.a.copy_(torch.cat([s.a[1:], y[:1] * 1.0]))
    return before, s.a * 1.0


def chain(s: Model, x: Tensor) -> Tensor:
    for name in "abc":
        b = getattr(s, name)
        x = cpu(torch.tanh(x + b)) * 0.3
        b.mul_(0.5).add_(x)
    return x


@pytest.mark.parametrize(
    "update",
    [
        read_then_written,
        read_beside,
        read_unrelated,
        read_after,
        written_only_by_itself,
        crossed,
        swapped_far,
        rotated,
        old_returned,
        shifted_far,
        chain,
    ],
)
def test_a_buffer_in_several_partitions_is_one_slot(
    update: Callable[..., Any], check: Check
) -> None:
    model = Model(update, a=RAMP, b=-RAMP, c=RAMP + 1.0)
    program = check.forward(model, *steps(3, 4, n=5))
    assert len(program.report.methods["forward"].delegates) > 1
    assert {owner for owner, _ in owners(program).values()} == {"delegate"}
    assert program.executorch.buffer.count(b"a_copy") == 0


def test_the_report_names_who_reads_and_who_writes(check: Check) -> None:
    program = check.forward(Model(read_unrelated, a=RAMP), *steps(3, 4))
    assert owners(program) == {"a": ("delegate", "write_only")}
    read, written = program.delegates["forward"][:2]
    assert reason(program, "a").startswith(
        f"written by {written.graph}, read before that by {read.graph}; "
    )
    assert [s.binding.name for s in (*read.states, *written.states)] == ["READ_ONLY", "WRITE_ONLY"]


def test_an_order_that_contradicts_the_data_is_found() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(torch.relu, (x,))
    b = graph.call_function(torch.relu, (x,))
    c = graph.call_function(torch.relu, (b,))
    graph.output((a, c))
    sort(graph, {c: [a]})
    assert [n.name for n in graph.nodes] == [x.name, b.name, c.name, a.name, "output"]
    with pytest.raises(AssertionError, match="contradicts"):
        sort(graph, {c: [b]})


def many_steps(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.a.clone()
    s.a.mul_(0.5).add_(torch.tanh(x + s.b))
    y = torch.sigmoid(s.a) * old
    s.b.copy_(old)
    s.c.copy_(torch.roll(s.c, 1, 0) + y)
    return y + s.c, old


@pytest.mark.parametrize("update", [many_steps, crossed, rotated, shifted_far])
@pytest.mark.parametrize("largest", [1, 3])
def test_a_graph_that_qnn_refuses_is_cut_without_harm_to_state(
    update: Callable[..., Any], largest: int, check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_ = CompileWorker.compile

    def refuse_large(worker: CompileWorker, graphs: Sequence[Graph], path: str) -> Any:
        for graph in graphs:
            if len({n.source for n in graph.nodes}) > largest:
                raise GraphRefused(graph.name, "staged")
        return compile_(worker, graphs, path)

    monkeypatch.setattr(CompileWorker, "compile", refuse_large)
    program = check.forward(Model(update, a=RAMP, b=-RAMP, c=RAMP + 1.0), *steps(3, 4))
    assert len(program.report.methods["forward"].delegates) > 2


# -- one method, and the CPU ----------------------------------------------------------------------


def read_on_cpu(s: Model, x: Tensor) -> Tensor:
    y = cpu(s.a) * 0.5
    s.a.mul_(0.5).add_(x)
    return y + s.a


def made_on_cpu(s: Model, x: Tensor) -> Tensor:
    y = s.a * 0.5
    s.a.copy_(cpu(torch.tanh(x)))
    return y + s.b


@pytest.mark.parametrize("update", [read_on_cpu, made_on_cpu])
def test_what_the_cpu_touches_in_a_single_method_is_the_hosts(
    update: Callable[..., Any], check: Check
) -> None:
    program = check.forward(Model(update, a=RAMP, b=RAMP), *steps(3, 4))
    assert owners(program)["a"] == ("host", "")
    assert "cosh" in reason(program, "a")
    assert {op.op for op in program.report.methods["forward"].cpu_ops} == {"aten.cosh.default"}


def new_value_used_on_cpu(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    s.a.add_(torch.tanh(x))
    return cpu(s.a * 0.5) + s.a, s.a.mean()


def test_a_new_value_on_the_cpu_is_an_ordinary_result(check: Check) -> None:
    program = check.forward(Model(new_value_used_on_cpu, a=RAMP), *steps(3, 4))
    assert owners(program)["a"][0] == "delegate"


# -- several methods ------------------------------------------------------------------------------


def accumulate(s: Model, x: Tensor) -> Tensor:
    s.a.mul_(0.5).add_(x)
    return s.a * 1.0


def untouched(s: Model, x: Tensor) -> Tensor:
    return x + 1.0


def peek(s: Model, x: Tensor) -> Tensor:
    return s.a + x


def returned(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    return s.a, x * 2.0


def zeroed(s: Model, x: Tensor) -> Tensor:
    s.a.zero_()
    return x * 1.0


def filled(s: Model, x: Tensor) -> Tensor:
    old = s.a * 1.0
    s.a.fill_(0.5)
    s.n.fill_(3)
    return old


def replaced(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(x)
    return x


def only_stored(s: Model, x: Tensor) -> Tensor:
    """Nothing that the NPU computes is returned."""
    s.a.copy_(x * 0.5)
    return x


def rolled(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(torch.roll(s.a, 1, 0) + x)
    return s.a * 1.0


def counted(s: Model, x: Tensor) -> Tensor:
    s.n.add_(1)
    return x * s.n + s.a


def cpu_reads(s: Model, x: Tensor) -> Tensor:
    return cpu(s.a * 1.0) + cpu(s.a) * 0.5


def cpu_only_reads(s: Model, x: Tensor) -> Tensor:
    return cpu(s.a)


def cpu_makes(s: Model, x: Tensor) -> Tensor:
    s.a.copy_(cpu(torch.tanh(x)))
    return x * 1.0


def cpu_reads_and_makes(s: Model, x: Tensor) -> tuple[Tensor, Tensor]:
    old = s.a.clone()
    y = cpu(s.a * 1.0 + x) * 0.1
    s.a.copy_(cpu(torch.tanh(y)))
    return cpu(old) + old, y * s.a


def views(*updates: Callable[..., Any], **buffers: Tensor) -> Methods:
    """One module's buffers under several methods, each named after its function."""
    methods: Methods = {}
    first = Model(updates[0], **buffers).eval()
    for update in updates:
        model = Model(update, **buffers).eval()
        model._buffers = first._buffers
        methods[update.__name__] = (model, (torch.ones(3, 4),))
    return methods


STATE = {"a": RAMP, "n": torch.tensor([1], dtype=torch.int64)}


@pytest.mark.parametrize(
    "updates",
    [
        (accumulate, untouched),
        (accumulate, peek, returned),
        (accumulate, zeroed, peek),
        (accumulate, filled, counted),
        (accumulate, replaced, only_stored),
        (rolled, peek, returned, read_after),
        (read_beside, accumulate, written_only_by_itself),
    ],
    ids=lambda updates: "-".join(u.__name__ for u in updates),
)
def test_methods_share_what_delegates_own(
    updates: Sequence[Callable[..., Any]], check: Check
) -> None:
    program = check(views(*updates, **STATE), turns(updates))
    for name in program.report.methods:
        assert {owner for owner, _ in owners(program, name).values()} <= {"delegate"}


@pytest.mark.parametrize(
    "updates",
    [
        (accumulate, cpu_reads),
        (accumulate, cpu_only_reads),
        (accumulate, cpu_makes, peek),
        (accumulate, cpu_reads_and_makes, zeroed),
        (cpu_makes, cpu_only_reads),
        (read_on_cpu, cpu_reads_and_makes, rolled),
    ],
    ids=lambda updates: "-".join(u.__name__ for u in updates),
)
def test_methods_share_what_the_cpu_touches_too(
    updates: Sequence[Callable[..., Any]], check: Check
) -> None:
    program = check(views(*updates, **STATE), turns(updates))
    for update in updates:
        assert owners(program, update.__name__)["a"][0] == "delegate"
        if "cpu" in update.__name__:
            assert "copied between its slot and the CPU" in reason(program, "a", update.__name__)
            assert "cosh" in reason(program, "a", update.__name__)


def turns(updates: Sequence[Callable[..., Any]]) -> Calls:
    """Every method after every other, on new inputs each time."""
    names = [u.__name__ for u in updates]
    order = [n for a in names for b in names for n in (a, b)]
    return [(name, (_noise(i, 3, 4),)) for i, name in enumerate(order)]


def test_a_shared_buffer_that_qnn_cannot_hold_is_refused(qnn_libraries: str) -> None:
    def mark(s: Model, x: Tensor) -> Tensor:
        s.m.add_(1)
        return x * 2.0

    def show(s: Model, x: Tensor) -> Tensor:
        return x + s.m

    with pytest.raises(qnn.LoweringError) as e:
        qnn.lower(
            views(mark, show, m=torch.zeros(3, 4, dtype=torch.uint8)),
            target="SM8650",
            qnn_libraries=qnn_libraries,
        )
    for word in ("'m'", "uint8", "'mark'", "'show'", "Keep it in a type that QNN holds"):
        assert word in str(e.value)
