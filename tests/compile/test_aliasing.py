# SPDX-License-Identifier: BSD-3-Clause
"""When one address may hold a state's old and new value, and when it may not."""

from __future__ import annotations

from executorch_qnn.compile.hazards import aliasing_is_sound
from executorch_qnn.compile.ir import DType, Graph, Kind, Node, Tensor


class Sketch:
    """Graphs in a line or two: `s.op("Relu", out, x)`."""

    def __init__(self) -> None:
        self.graph = Graph("g")
        self.old = self.tensor("old", (4, 8), Kind.INPUT)
        self.new = self.tensor("new", (4, 8), Kind.OUTPUT)

    def tensor(
        self, name: str, shape: tuple[int, ...] = (4, 8), kind: Kind = Kind.NATIVE
    ) -> Tensor:
        t = Tensor(name, DType.FLOAT16, shape, kind)
        self.graph.tensors.append(t)
        return t

    def op(self, type: str, out: Tensor, *inputs: Tensor) -> None:
        self.graph.nodes.append(Node(f"{type}_{len(self.graph.nodes)}", type, [*inputs], [out]))

    def verdict(self) -> bool:
        sound, why = aliasing_is_sound(self.graph, self.old, self.new)
        assert why
        return sound


def scatter(s: Sketch) -> None:
    index, rows = s.tensor("index", (1, 1), Kind.INPUT), s.tensor("rows", (1, 8), Kind.INPUT)
    s.op("ScatterNd", s.new, s.old, index, rows)


def test_a_scatter_is_sound_when_nobody_else_reads_the_old_value() -> None:
    s = Sketch()
    scatter(s)
    s.op("MatMul", s.tensor("scores", (1, 4), Kind.OUTPUT), s.tensor("q", (1, 8)), s.new)
    assert s.verdict()


def test_a_scatter_is_not_sound_when_the_old_value_is_read_elsewhere() -> None:
    s = Sketch()
    scatter(s)
    s.op("MatMul", s.tensor("scores", (1, 4), Kind.OUTPUT), s.tensor("q", (1, 8)), s.old)
    assert not s.verdict()


def test_a_scatter_of_rows_computed_from_the_old_value_is_not_sound() -> None:
    s = Sketch()
    rows = s.tensor("rows", (1, 8))
    s.op("StridedSlice", rows, s.old)
    s.op("ScatterNd", s.new, s.old, s.tensor("index", (1, 1), Kind.INPUT), rows)
    assert not s.verdict()


def test_a_scatter_into_something_else_by_the_old_value_is_not_sound() -> None:
    s = Sketch()
    base = s.tensor("base", kind=Kind.INPUT)
    s.op("ScatterNd", s.new, base, s.tensor("index", (1, 1), Kind.INPUT), s.old)
    assert not s.verdict()


def test_pointwise_chains_are_sound() -> None:
    s = Sketch()
    half = s.tensor("half")
    s.op("ElementWiseMultiply", half, s.old, s.tensor("c", (1,), Kind.STATIC))
    s.op("ElementWiseAdd", s.new, half, s.tensor("x", kind=Kind.INPUT))
    assert s.verdict()


def test_two_pointwise_paths_that_meet_are_sound() -> None:
    s = Sketch()
    left, right = s.tensor("left"), s.tensor("right")
    s.op("ElementWiseMultiply", left, s.old, s.old)
    s.op("Tanh", right, s.old)
    s.op("ElementWiseAdd", s.new, left, right)
    assert s.verdict()


def test_an_output_computed_from_the_old_value_is_not_sound() -> None:
    s = Sketch()
    s.op("ElementWiseAdd", s.new, s.old, s.tensor("x", kind=Kind.INPUT))
    s.op("ElementWiseMultiply", s.tensor("y", kind=Kind.OUTPUT), s.old, s.old)
    assert not s.verdict()


def test_a_shift_is_not_sound() -> None:
    s = Sketch()
    kept = s.tensor("kept", (3, 8))
    s.op("StridedSlice", kept, s.old)
    s.op("Concat", s.new, kept, s.tensor("row", (1, 8), Kind.INPUT))
    assert not s.verdict()


def test_a_reduction_of_the_old_value_is_not_sound() -> None:
    s = Sketch()
    total = s.tensor("total", (1, 1))
    s.op("ReduceSum", total, s.old)
    s.op("ElementWiseAdd", s.new, s.old, total)
    assert not s.verdict()


def test_a_value_that_does_not_depend_on_the_old_one_is_not_aliased_with_a_reader_of_it() -> None:
    s = Sketch()
    s.op("ElementWiseAdd", s.tensor("y", kind=Kind.OUTPUT), s.old, s.old)
    s.op("Relu", s.new, s.tensor("x", kind=Kind.INPUT))
    assert not s.verdict()


def test_another_layout_is_not_sound() -> None:
    s = Sketch()
    s.new.shape = (8, 4)
    s.op("Transpose", s.new, s.old)
    assert not s.verdict()
