# SPDX-License-Identifier: BSD-3-Clause
"""What partitioners ask for stays whole, wherever it stands and whoever else asks; see `ROWS`."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from executorch.exir import EdgeCompileConfig
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from executorch_qnn import to_edge_transform_and_lower
from executorch_qnn.lowering.decompose import is_composite
from executorch_qnn.lowering.wishes import twin

from .preserved import (
    CONTEXTS,
    ROWS,
    Asking,
    Case,
    EverySecond,
    InContexts,
    NothingBackend,
    Row,
    counts,
    edge_name,
    export,
    inputs,
    name_of,
    op,
    quantized,
)

# torch logs its traces for a tool of its own; pytest would format every entry.
logging.getLogger("torch.__trace").propagate = False

STRAIGHT, BODIES = CONTEXTS[:2], CONTEXTS[2:]
SAMPLE = {
    "reshape.default", "unbind.int", "index_put_.default", "layer_norm.default",
    "scaled_dot_product_attention.default",
}  # fmt: skip
"""What is tried in control flow when the slow tests do not run."""

OTHERS = [row for row in ROWS if row.name in ("linear.default", "hardswish.default")]
"""What the other one of two partitioners asks for; every model has it."""


def is_other(row: Row) -> bool:
    return row.twin in {o.twin for o in OTHERS}


def grouped(rows: Iterable[Row], size: int = 24) -> list[tuple[Row, ...]]:
    """Rows that one model can have: no two of them stand for one op."""
    groups: list[list[Row]] = []
    for row in rows:
        if row in OTHERS:
            continue
        fits = (g for g in groups if len(g) < size and all(row.twin is not r.twin for r in g))
        group = next(fits, None)
        if group is None:
            groups.append(group := [])
        group.append(row)
    return [(*g, *(o for o in OTHERS if all(o.twin is not r.twin for r in g))) for g in groups]


KEPT = [row for row in ROWS if row.twin is not None]
REFUSED = [row for row in ROWS if row.twin is None]
CASES = [
    *(pytest.param(g, STRAIGHT, id=f"straight-{i}") for i, g in enumerate(grouped(KEPT))),
    *(
        pytest.param(g, BODIES, id=f"control-flow-{i}")
        for i, g in enumerate(grouped(r for r in KEPT if r.name in SAMPLE))
    ),
    *(
        pytest.param(
            g,
            BODIES,
            id=f"more-control-flow-{i}",
            marks=pytest.mark.long if i else pytest.mark.slow,
        )
        for i, g in enumerate(grouped((r for r in KEPT if r.name not in SAMPLE), 12))
    ),
]
cases = pytest.mark.parametrize(("rows", "contexts"), CASES)


def check(this: Case, edge: Any) -> None:
    """The lowered program computes the same as the model, call after call."""
    for got, want in zip(this.run(edge), this.want, strict=True):
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-6)


@functools.cache
def case(rows: tuple[Row, ...], contexts: tuple[str, ...]) -> Case:
    return Case(InContexts(rows, contexts).eval(), [inputs(rows, i) for i in range(3)])


def taking(rows: Iterable[Row]) -> set[str]:
    return {edge_name(r.twin) for r in rows if r.twin is not None}


def composite(rows: Iterable[Row]) -> set[str]:
    return taking(r for r in rows if is_composite(r.twin))


def expected(rows: Iterable[Row], contexts: Iterable[str]) -> dict[str, Counter[str]]:
    """How often each op is there at least, per graph."""
    graph = {"value": "", "buffer": ""}
    found: dict[str, Counter[str]] = {}
    for context, row in itertools.product(contexts, rows):
        assert row.twin is not None
        here = found.setdefault(graph.get(context, context), Counter())
        here[edge_name(row.twin)] += InContexts.CALLS[context]
    return found


def total(seen: dict[str, Counter[str]]) -> Counter[str]:
    return sum(seen.values(), Counter())


def graph_code(ep: ExportedProgram) -> str:
    return f"{ep.graph_module.print_readable(print_output=False)}{ep.graph_signature}"


def check_whole(seen: dict[str, Counter[str]], rows: Iterable[Row], contexts: Any) -> None:
    for graph, ops in expected(rows, contexts).items():
        missing = ops - seen.get(graph, Counter())
        assert not missing, f"{dict(missing)} are not whole in the graph {graph!r}"


# ------------------------------------------------------------------ the table


def test_the_table_has_more_than_60_ops() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS) > 60


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_what_stands_for_an_op_in_a_functional_graph(row: Row) -> None:
    assert twin(row.op) is row.twin


def test_the_document_says_what_is_shown_here() -> None:
    page = (Path(__file__).parents[2] / "docs" / "preserved_ops.md").read_text()
    lines = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    said = {cells[1].strip("`"): cells[-2] for cells in lines if len(cells) == 6}
    assert {row.name: said.get(row.name) for row in ROWS} == {r.name: r.outcome for r in ROWS}


@cases
def test_what_is_asked_for_is_whole_and_delegated(
    rows: tuple[Row, ...], contexts: tuple[str, ...]
) -> None:
    this = case(rows, contexts)
    before = graph_code(this.program)
    asking = Asking([r.op for r in rows], taking(rows))
    NothingBackend.programs.clear()
    edge = to_edge_transform_and_lower(this.program, partitioner=[asking])
    assert asking.asked == 1
    check_whole(asking.seen, rows, contexts)
    delegated = total(
        {str(i): counts(p.graph_module)[""] for i, p in enumerate(NothingBackend.programs)}
    )
    offered = total({g: ops for g, ops in asking.seen.items() if g != "while_loop"})
    assert {n: delegated[n] for n in taking(rows)} == {n: offered[n] for n in taking(rows)}
    check(this, edge)
    assert graph_code(this.program) == before


@cases
def test_nodes_that_the_filter_refuses_are_opened(
    rows: tuple[Row, ...], contexts: tuple[str, ...]
) -> None:
    this = case(rows, contexts)
    second = EverySecond()
    asking = Asking([r.op for r in rows], taking(rows), second)
    edge = to_edge_transform_and_lower(this.functional, partitioner=[asking])
    seen, wanted = total(asking.seen), second.wanted()
    for name in composite(rows):
        assert seen[name] == wanted[name] > 0, name
    check(this, edge)


@cases
@pytest.mark.parametrize("first", [True, False], ids=["first", "second"])
def test_two_partitioners_lose_nothing_to_each_other(
    rows: tuple[Row, ...], contexts: tuple[str, ...], first: bool
) -> None:
    this = case(rows, contexts)
    mine = [r for r in rows if not is_other(r)]
    others = [r for r in rows if is_other(r)]
    asking = Asking([r.op for r in mine], taking(mine), lambda node: True)
    other = Asking([r.op for r in others], taking(others))
    partitioners = [asking, other] if first else [other, asking]
    edge = to_edge_transform_and_lower(this.functional, partitioner=partitioners)
    check_whole(asking.seen, mine, contexts)
    check_whole(other.seen, others, contexts)
    check(this, edge)


@cases
def test_what_nobody_takes_is_opened(rows: tuple[Row, ...], contexts: tuple[str, ...]) -> None:
    this = case(rows, contexts)
    asking = Asking([r.op for r in rows])
    edge = to_edge_transform_and_lower(this.functional, partitioner=[asking])
    check_whole(asking.seen, rows, contexts)
    left = total(counts(edge.exported_program().graph_module))
    assert left.keys() & composite(rows) == set()
    check(this, edge)


@pytest.mark.parametrize("rows", grouped((r for r in KEPT if r.quantizes), 40))
def test_ops_in_a_quantized_graph_are_whole(rows: tuple[Row, ...]) -> None:
    this = Case(quantized(rows), [inputs(rows, i) for i in range(3)])
    asking = Asking([r.op for r in rows], taking(rows), lambda node: True)
    edge = to_edge_transform_and_lower(this.program, partitioner=[asking])
    check_whole(asking.seen, rows, ["value"])
    assert total(asking.seen)["quantize_per_tensor.default"] > len(rows) / 2
    check(this, edge)


@pytest.mark.parametrize("row", REFUSED, ids=lambda row: row.name)
def test_what_no_functional_graph_has_is_refused_with_a_message(
    row: Row, caplog: pytest.LogCaptureFixture
) -> None:
    this = case((row,), STRAIGHT)
    asking = Asking([row.op])
    with caplog.at_level(logging.WARNING, "executorch_qnn.lowering.wishes"):
        edge = to_edge_transform_and_lower(this.program, partitioner=[asking])
    (record,) = (r for r in caplog.records if r.name == "executorch_qnn.lowering.wishes")
    assert f"Asking asks to keep aten.{row.name} whole" in record.getMessage()
    check(this, edge)


def test_a_twin_that_is_kept_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    rows = tuple(r for r in ROWS if r.name == "hardswish_.default")
    with caplog.at_level(logging.INFO, "executorch_qnn.lowering.wishes"):
        to_edge_transform_and_lower(
            case(rows, STRAIGHT).functional, partitioner=[Asking([rows[0].op])]
        )
    assert "aten.hardswish_.default: aten.hardswish.default is kept" in caplog.text


# ------------------------------------------------------------------ the rest of the contract


class Small(nn.Module):
    """A few ops that consist of others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l = nn.Linear(6, 6)
        self.register_buffer("h", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.h.mul_(0.5).add_(x.sum(0))
        y = torch.cond(x.sum() > 0, lambda a: nn.functional.hardswish(a), lambda a: a * 1.0, (x,))
        return nn.functional.layer_norm(self.l(y), (6,)) * self.h


@functools.cache
def small() -> ExportedProgram:
    return export(Small(), SMALL)


SMALL = (torch.linspace(-1.0, 2.0, 18).reshape(3, 6),)
ASKED = [op("linear.default"), op("hardswish.default"), op("layer_norm.default")]


def test_the_callers_configuration_is_not_changed() -> None:
    config = EdgeCompileConfig(preserve_ops=[op("linear.default")])
    before = copy.deepcopy(vars(config))
    for _ in range(2):
        to_edge_transform_and_lower(small(), partitioner=[Asking(ASKED)], compile_config=config)
    assert vars(config) == before


@pytest.mark.parametrize("partitioners", [[], [Asking([])], [Asking(ASKED), Asking([])]], ids=len)
def test_what_the_configuration_preserves_is_in_the_result(partitioners: list[Asking]) -> None:
    config = EdgeCompileConfig(preserve_ops=[op("linear.default"), op("hardswish_.default")])
    edge = to_edge_transform_and_lower(small(), partitioner=partitioners, compile_config=config)
    found = total(counts(edge.exported_program().graph_module))
    assert (found["linear.default"], found["hardswish.default"]) == (1, 1)
    assert not found["layer_norm.default"]


@pytest.fixture
def retraces(monkeypatch: pytest.MonkeyPatch) -> list[ExportedProgram]:
    done = []
    retrace = ExportedProgram.run_decompositions

    def counted(self: ExportedProgram, *args: Any, **kwargs: Any) -> ExportedProgram:
        done.append(self)
        return retrace(self, *args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "run_decompositions", counted)
    return done


@pytest.mark.parametrize("accept", [None, EverySecond()], ids=["all", "filter"])
def test_a_program_is_retraced_once_and_a_functional_one_never(
    retraces: list[ExportedProgram], accept: Any
) -> None:
    exported = small()
    partitioners = [Asking(ASKED, accept=accept), Asking(ASKED[:1], ["linear.default"])]
    to_edge_transform_and_lower(exported, partitioner=partitioners)
    assert len(retraces) == 1
    functional = exported.run_decompositions({})
    retraces.clear()
    to_edge_transform_and_lower(functional, partitioner=partitioners)
    assert not retraces


@pytest.mark.parametrize("accept", [None, EverySecond()], ids=["all", "filter"])
def test_sizes_may_be_dynamic(accept: Any) -> None:
    model = Small()
    exported = export(model, SMALL, ({0: Dim("rows", min=2, max=8)},))
    asking = Asking(ASKED, ["linear.default", "layer_norm.default"], accept)
    edge = to_edge_transform_and_lower(exported, partitioner=[asking])
    program = edge.exported_program()
    assert (2, 8) in [(r.lower, r.upper) for r in program.range_constraints.values()]
    run, eager = program.module(), copy.deepcopy(model)  # the program's buffers are the model's
    for rows in (2, 5, 8):
        x = torch.linspace(-1.0, 1.0, rows * 6).reshape(rows, 6)
        with torch.no_grad():
            torch.testing.assert_close(run(x), eager(x), rtol=1e-5, atol=1e-6)


def test_what_nodes_are_opened_into_says_where_it_comes_from() -> None:
    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.hardswish(nn.functional.layer_norm(x, (6,)))

    asking = Asking([])
    edge = to_edge_transform_and_lower(export(nn.Sequential(Block()), SMALL), partitioner=[asking])
    nodes = [n for n in edge.exported_program().graph.nodes if name_of(n.target)]
    assert len(nodes) > 3
    for node in nodes:
        assert "0" in {path for path, _ in node.meta["nn_module_stack"].values()}, node
        assert "nn.functional.hardswish(nn.functional.layer_norm" in node.meta["stack_trace"], node


def test_two_calls_give_equal_graphs() -> None:
    exported = small()
    one, two = (
        to_edge_transform_and_lower(exported, partitioner=[Asking(ASKED, [], EverySecond())])
        for _ in range(2)
    )
    assert graph_code(one.exported_program()) == graph_code(two.exported_program())
