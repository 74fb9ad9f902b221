# SPDX-License-Identifier: BSD-3-Clause
"""Indexing on the simulator: every element must come out as PyTorch gives it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Case, check_all, check_samples, lowered, op_types, refusal
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import executorch_qnn as qnn
from executorch_qnn.compile.build import Binding

Function = Callable[..., Any]

index = torch.ops.aten.index.Tensor
index_put = torch.ops.aten.index_put


def data(dtype: torch.dtype, *shape: int, seed: int = 0) -> Tensor:
    """Values that fp16 holds exactly, and sums of a few of them too."""
    g = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=g).bool()
    values = torch.randint(-100, 100, shape, generator=g)
    return values / 8 if dtype.is_floating_point else values.to(dtype)


def places(n: int, *shape: int, low: int = 0, dtype: torch.dtype = torch.int64) -> Tensor:
    """Places on an axis of length `n`; with `low` = -n they count from both ends."""
    g = torch.Generator().manual_seed(n + len(shape))
    return torch.randint(low, n, shape, generator=g, dtype=dtype)


def different(n: int, k: int) -> Tensor:
    """`k` different places."""
    return torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k]


def columns(n: int, k: int, *beside: int) -> Tensor:
    """`k` different places per column, along axis -2."""
    flat = [different(n, k).roll(i) for i in range(torch.Size(beside).numel())]
    return torch.stack(flat).reshape(*beside, k).transpose(-1, -2).contiguous()


def reads(d: torch.dtype) -> list[Case]:
    x = data(d, 2, 3, 8, 4)
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("first", lambda x, i: x[i], (x, places(2, 3, low=-2))),
        ("second", lambda x, i: x[:, i], (x, places(3, 4, low=-3))),
        ("rows of a cache", lambda x, i: x[:, :, i], (x, places(8, 3, low=-8))),
        ("by a matrix", lambda x, i: x[:, :, i], (x, places(8, 2, 3, low=-8))),
        ("last", lambda x, i: x[..., i], (x, places(4, 5, low=-4))),
        ("int32", lambda x, i: x[:, i], (x, places(3, 4, low=-3, dtype=torch.int32))),
        ("0-d", lambda x, i: index(x, [None, i]), (x, torch.tensor(-1))),
        ("constant", lambda x: x[:, [0, -1]], (x,)),
        ("rank 5", lambda x, i: x[None][:, i], (x, places(2, 3, low=-2))),
        ("rank 5 behind", lambda x, i: x[None][:, :, :, i], (x, places(8, 3, low=-8))),
        ("two in front", lambda x, i, j: x[i, j], (x, places(2, 4, low=-2), places(3, 4, low=-3))),
        ("two in the middle", lambda x, i, j: x[:, i, j], (x, places(3, 4), places(8, 4, low=-8))),
        ("two apart", lambda x, i, j: x[:, i, :, j], (x, places(3, 5), places(4, 5, low=-4))),
        ("first and third", lambda x, i, j: x[i, :, j], (x, places(2, 5), places(8, 5, low=-8))),
        ("a grid", lambda x, i, j: x[:, i, j], (x, places(3, 2, 1), places(8, 3))),
        ("three", lambda x, i, j: x[i, j, i], (x, places(2, 2, 1), places(3, 3))),
        ("all axes", lambda x, i, j: x[i, j, i, j], (x, places(2, 5), places(3, 5))),
        ("half constant", lambda x, i: x[[0, 1], i], (x, places(3, 2))),
        ("index_select", lambda x, i: x.index_select(2, i), (x, places(8, 3))),
        ("gather", lambda x, i: x.gather(2, i), (x, places(8, 2, 3, 5, 4))),
        ("gather a part", lambda x, i: x.gather(2, i), (x, places(8, 1, 2, 5, 3))),
        ("gather in front", lambda x, i: x.gather(0, i), (x, places(2, 3, 3, 8, 4))),
        ("gather rows of each", lambda x, i: x.gather(2, i[..., None].expand(2, 3, 5, 4)),
         (x, places(8, 2, 3, 5))),
        ("gather rank 1", lambda x, i: x[0, 0, :, 0].gather(0, i), (x, places(8, 5))),
        ("gather rank 5", lambda x, i: x[None].gather(3, i), (x, places(8, 1, 2, 3, 5, 4))),
        ("gather whole rows", lambda x, i: x.gather(2, i[:, None].expand(2, 3, 5, 4)),
         (x, places(8, 5))),
        ("take_along_dim", lambda x, i: torch.take_along_dim(x, i, 2), (x, places(8, 1, 1, 3, 4))),
    ]  # fmt: skip
    if not d.is_floating_point:
        table = [row for row in table if row[0] != "take_along_dim"]
    return [Case(name, fn, inputs, exact=True) for name, fn, inputs in table]


def writes(d: torch.dtype) -> list[Case]:
    x, one = data(d, 2, 3, 8, 4), data(d, 1)[0]
    row = data(d, 2, 3, 3, 4, seed=1)
    two, pair = torch.tensor([-1, 2]), torch.tensor([2, -3])
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("index_copy", lambda x, i, y: x.index_copy(2, i, y), (x, different(8, 3), row)),
        ("index_copy 0-d", lambda x, i, y: x.index_copy(2, i, y[:, :, :1]),
         (x, torch.tensor(3), row)),
        ("index_copy constant", lambda x, y: x.index_copy(2, torch.tensor([5, 0, 7]), y), (x, row)),
        ("index_fill", lambda x, i: x.index_fill(1, i, 1), (x, different(3, 2))),
        ("index_fill value", lambda x, i, v: x.index_fill(1, i, v), (x, different(3, 2), one)),
        ("first", lambda x, i, y: index_put(x, [i], y[:1]), (x, torch.tensor([-1]), x)),
        ("cache", lambda x, i, y: index_put(x, [None, None, i], y[:, :, :2]), (x, two, row)),
        ("cache, int32", lambda x, i, y: index_put(x, [None, None, i], y[:, :, :2]),
         (x, two.int(), row)),
        ("cache, 0-d", lambda x, i, y: index_put(x, [None, None, i], y[:, :, 0]),
         (x, torch.tensor(-2), row)),
        ("cache, broadcast", lambda x, i, y: index_put(x, [None, None, i], y[0, :, :1]),
         (x, two, row)),
        ("cache, number", lambda x, i, v: index_put(x, [None, None, i], v), (x, two, one)),
        ("0-d", lambda x, i, y: index_put(x, [i], y[0]), (x, torch.tensor(-2), x)),
        ("last", lambda x, i, y: index_put(x, [None, None, None, i], y[..., :2]), (x, two, x)),
        ("two in front", lambda x, i, j, y: index_put(x, [i, j], y[:, 0]),
         (x, torch.tensor([0, 1]), pair, x)),
        ("two apart", lambda x, i, j, y: index_put(x, [None, i, None, j], y[:, :2, :, 0]),
         (x, torch.tensor([0, 1]), pair, x)),
        ("first and third", lambda x, i, j, y: index_put(x, [i, None, j], y[:, :, 0]),
         (x, torch.tensor([0, 1]), pair, x)),
        ("a grid", lambda x, i, j, y: index_put(x, [None, i, j], y[:, :2]),
         (x, torch.tensor([[0], [2]]), torch.tensor([2, -3, 1]), row)),
        ("constant", lambda x, y: index_put(x, [None, torch.tensor([0, -1])], y[:, :2]), (x, x)),
        ("mask", lambda x, m, v: index_put(x, [m], v), (x, data(torch.bool, 2, 3, 8, 4), one)),
        ("mask of two axes", lambda x, m, v: index_put(x, [None, m], v),
         (x, data(torch.bool, 3, 8), one)),
        ("rank 5", lambda x, i, y: index_put(x[None], [None, None, None, i], y[None, :, :, :2]),
         (x, two, row)),
        ("scatter", lambda x, i, y: x.scatter(2, i, y[:, :, :5]), (x, columns(8, 5, 2, 3, 4), x)),
        ("scatter a part", lambda x, i, y: x.scatter(2, i, y), (x, columns(8, 5, 1, 2, 4), x)),
        ("scatter value", lambda x, i: x.scatter(2, i, 1), (x, places(8, 2, 3, 5, 4))),
        ("scatter rows of each", lambda x, i, y: x.scatter(2, i[..., :1].expand(2, 3, 3, 4), y),
         (x, columns(8, 3, 2, 3, 1), row)),
        ("scatter rank 1", lambda x, i, y: x[0, 0, :, 0].scatter(0, i, y[0, 0, :3, 1]),
         (x, different(8, 3), x)),
        ("scatter rank 5", lambda x, i, y: x[None].scatter(3, i[None], y[None, :, :, :5]),
         (x, columns(8, 5, 2, 3, 4), x)),
        ("scatter whole rows", lambda x, i, y: x.scatter(2, i[:, None].expand(2, 3, 3, 4), y),
         (x, different(8, 3), row)),
        ("slice_scatter", lambda x, y: x.slice_scatter(y, 2, 1, 4), (x, row)),
        ("slice_scatter to the end", lambda x, y: x.slice_scatter(y, 2, 5, 99), (x, row)),
        ("slice_scatter in steps", lambda x, y: x.slice_scatter(y, 2, 1, 8, 3), (x, row)),
        ("slice_scatter inside", lambda x, y: x.flip(2).slice_scatter(y, 2, 1, 4), (x, row)),
        ("slice_scatter everything", lambda x, y: x.slice_scatter(y.flip(2), 2, 0, 8), (x, x)),
        ("select_scatter", lambda x, y: x.select_scatter(y[:, 0], 1, -1), (x, x)),
        ("select_scatter inside", lambda x, y: x.flip(2).select_scatter(y[0], 0, 1), (x, x)),
    ]  # fmt: skip
    return [Case(name, fn, inputs, exact=True) for name, fn, inputs in table]


def sums(d: torch.dtype) -> list[Case]:
    x, row = data(d, 2, 3, 8, 4), data(d, 2, 3, 3, 4, seed=1)
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("index_add", lambda x, i, y: x.index_add(2, i, y), (x, places(8, 3), row)),
        ("index_add twice", lambda x, i, y: x.index_add(2, i, y, alpha=2), (x, places(8, 3), row)),
        ("accumulate", lambda x, i, y: index_put(x, [None, None, i], y, True),
         (x, torch.tensor([-1, 2, -1]), row)),
        ("scatter_add", lambda x, i, y: x.scatter_add(2, i, y), (x, places(8, 2, 3, 5, 4), x)),
        ("scatter_add a part", lambda x, i, y: x.scatter_add(1, i, y),
         (x, places(3, 2, 2, 5, 4), x)),
        ("scatter_reduce", lambda x, i, y: x.scatter_reduce(2, i, y, "sum"),
         (x, places(8, 2, 3, 5, 4), x)),
    ]  # fmt: skip
    return [Case(name, fn, inputs, exact=True) for name, fn, inputs in table]


@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_reads_are_exact(dtype: torch.dtype) -> None:
    check_all(reads(dtype))


@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool], ids=str)
def test_writes_are_exact(dtype: torch.dtype) -> None:
    check_all(writes(dtype))


@pytest.mark.usefixtures("qnn_libraries")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_sums_are_exact(dtype: torch.dtype) -> None:
    check_all(sums(dtype))


@pytest.mark.usefixtures("qnn_libraries")
def test_embeddings_are_exact() -> None:
    table = data(torch.float32, 10, 6)
    cases = [(2, 5), (1, 1), (), (2, 3, 2)]
    check_all(
        [
            Case(str(s), lambda i: F.embedding(i, table, padding_idx=1), (places(10, *s),), 0, True)
            for s in cases
        ]
    )


@st.composite
def accesses(draw: st.DrawFn) -> Case:
    """Reads and writes by several index tensors and masks, of tensors of any shape."""
    dtype = draw(st.sampled_from([torch.float32, torch.int64, torch.bool]))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    rank = len(shape)
    axes = sorted(draw(st.sets(st.integers(0, rank - 1), min_size=1)))
    x = data(dtype, *shape)
    area = [shape[a] for a in axes]
    count = draw(st.integers(1, min(6, torch.Size(area).numel())))
    own = (count // 2, 2) if count % 2 == 0 and draw(st.booleans()) else (count,)
    flat = different(torch.Size(area).numel(), count).reshape(own)  # no place twice
    index = list(torch.unravel_index(flat, area))
    if draw(st.booleans()):  # from the end
        index = [i - n for i, n in zip(index, area, strict=True)]

    def at(*given: Tensor) -> list[Tensor | None]:
        found: list[Tensor | None] = [None] * (axes[-1] + 1)
        for a, i in zip(axes, given, strict=True):
            found[a] = i
        return found

    values = x.new_empty(index_of(x, at(*index)).shape)
    broadcast = draw(st.integers(0, values.dim()))
    values = data(dtype, *values.shape, seed=1)[(0,) * broadcast]
    cover = draw(st.integers(1, rank))  # a mask of so many leading axes
    mask = data(torch.bool, *shape[:cover], seed=2)
    held = int(mask.sum())
    rest = shape[cover:]
    narrow = data(torch.bool, *(n if k < cover else 1 for k, n in enumerate(shape)), seed=2)
    table: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        (f"read {axes} {own}", lambda x, *i: index_of(x, at(*i)), (x, *index)),
        (f"write {axes} {own} {broadcast}", lambda x, v, *i: index_put(x, at(*i), v),
         (x, values, *index)),
        (f"known places {axes} {own}", lambda x, v: index_put(x, at(*index), v), (x, values)),
        (f"mask of {cover} axes", lambda x, m, v: index_put(x, [m], v),
         (x, mask, data(dtype, *rest, seed=1))),
        (f"masked_scatter {cover}", lambda x, m, v: x.masked_scatter(m, v),
         (x, narrow, data(dtype, *shape, seed=1))),
    ]  # fmt: skip
    if held:
        rows = data(dtype, held, *rest, seed=1)
        table.append(
            (f"rows for {held} places", lambda x, m, v: index_put(x, [m], v), (x, mask, rows))
        )
    if dtype is not torch.bool:
        twice = [torch.cat([i, i]) for i in index]
        double = torch.cat(
            [data(dtype, *index_of(x, at(*index)).shape, seed=3)] * 2, twice_at(axes)
        )
        table += [
            (f"accumulate {axes} {own}", lambda x, v, *i: index_put(x, at(*i), v, True),
             (x, double, *twice)),
            ("accumulate where masked", lambda x, m, v: index_put(x, [m], v, True),
             (x, mask, data(dtype, *rest, seed=1))),
        ]  # fmt: skip
    name, fn, inputs = draw(st.sampled_from(table))
    return Case(f"{name} of {dtype} {shape}", fn, inputs, exact=True)


def index_of(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    return index(x, indices)


def twice_at(axes: list[int]) -> int:
    """Where the axis of the places is: at the first indexed axis, if they are neighbours."""
    return axes[0] if axes == list(range(axes[0], axes[-1] + 1)) else 0


@pytest.mark.usefixtures("qnn_libraries")
def test_any_access_is_exact() -> None:
    check_samples(accesses(), 20, 3)


@pytest.mark.usefixtures("qnn_libraries")
def test_image_tokens_are_put_among_those_of_text() -> None:
    """What multimodal models do with `masked_scatter`; of the mask only rows are counted."""
    text, images = data(torch.float32, 1, 20, 64), data(torch.float32, 3, 4, 64)
    tokens = torch.arange(20)[None] % 3
    tokens[0, 12:] = 1

    def merged(text: Tensor, tokens: Tensor, images: Tensor) -> Tensor:
        return text.masked_scatter((tokens == 2).unsqueeze(-1).expand_as(text), images)

    check_all([Case("merged", merged, (text, tokens, images), exact=True)])
    assert Counter(op_types(merged, text, tokens, images))["Gather"] == 1


@pytest.mark.slow
@pytest.mark.usefixtures("qnn_libraries")
def test_a_megabyte_is_read_and_written_exactly() -> None:
    """What QNN computes in one piece when it is small, it cuts into tiles when it is large."""
    x, table = data(torch.float32, 1, 8, 1024, 64), data(torch.float32, 2048, 320)
    cases: list[tuple[str, Function, tuple[Tensor, ...]]] = [
        ("rows", lambda x, i: x[:, :, i], (x, places(1024, 7))),
        ("index_select", lambda x, i: x.index_select(2, i), (x, places(1024, 300))),
        ("rows of a table", lambda x, i: x[i], (table, places(2048, 50))),
        ("columns of a table", lambda x, i: x[:, i], (table, places(320, 33))),
        ("two axes", lambda x, i, j: x[:, i, j], (x, places(8, 40), places(1024, 40))),
        ("gather", lambda x, i: x.gather(2, i), (x, places(1024, 1, 8, 16, 64))),
        ("gather rows", lambda x, i: x.gather(2, i[..., None].expand(1, 8, 16, 64)),
         (x, places(1024, 1, 8, 16))),
        ("gather in front", lambda x, i: x.gather(0, i), (table, places(2048, 64, 320))),
        ("scatter", lambda x, i, y: x.scatter(2, i, y[:, :, :16]),
         (x, columns(1024, 16, 1, 8, 64), x)),
        ("scatter_add", lambda x, i, y: x.scatter_add(0, i, y[:64]),
         (table, places(2048, 64, 320), table)),
        ("index_copy", lambda x, i, y: x.index_copy(2, i, y[:, :, :5]), (x, different(1024, 5), x)),
    ]  # fmt: skip
    check_all([Case(name, fn, inputs, exact=True) for name, fn, inputs in cases])


@pytest.mark.parametrize(
    ("fn", "inputs", "reason"),
    [
        (
            lambda x, m, v: index_put(x, [None, m], v),
            (torch.ones(2, 3), torch.tensor([True, False, True]), torch.ones(2, 2)),
            "inner axis",
        ),
    ],
)
def test_what_qnn_cannot_do_is_refused_with_the_reason(
    fn: Function, inputs: tuple[Tensor, ...], reason: str
) -> None:
    assert reason in refusal(fn, *inputs)


# -- caches ------------------------------------------------------------------------------------


class Cache(nn.Module):
    """A buffer, a way to write to it, and a reader of its new value."""

    def __init__(self, write: Function, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.write = write
        self.register_buffer("mem", torch.zeros(shape, dtype=dtype))

    def forward(self, row: Tensor, at: Tensor) -> Tensor:
        self.write(self.mem, row, at)
        return self.mem.sum(-1)


def assign(*before: slice | int) -> Function:
    def write(mem: Tensor, row: Tensor, at: Tensor) -> None:
        mem[(*before, at)] = row

    return write


def fixed(*where: slice | int) -> Function:
    def write(mem: Tensor, row: Tensor, at: Tensor) -> None:
        mem[where] = row

    return write


def twice(mem: Tensor, row: Tensor, at: Tensor) -> None:
    mem[:, :2] = row
    mem[:, 5:7] = 2 * row


ALL = slice(None)
put = torch.ops.aten.index_put_
WRITES: list[tuple[str, Function, tuple[int, ...], tuple[int, ...]]] = [
    ("index_copy_", lambda m, r, at: m.index_copy_(2, at, r), (1, 8, 512, 64), (1, 8, 1, 64)),
    ("index_copy_ of many", lambda m, r, at: m.index_copy_(2, at, r),
     (1, 8, 512, 64), (1, 8, 16, 64)),
    ("index_copy_ rank 3", lambda m, r, at: m.index_copy_(1, at, r), (1, 1024, 256), (1, 4, 256)),
    ("index_copy_ rank 2", lambda m, r, at: m.index_copy_(0, at, r), (1024, 256), (1, 256)),
    ("index_put_", lambda m, r, at: put(m, [None, None, at], r), (1, 8, 512, 64), (1, 8, 1, 64)),
    ("index_put_ rank 3", lambda m, r, at: put(m, [None, at], r), (1, 1024, 256), (1, 4, 256)),
    ("index_put_ by rows", lambda m, r, at: put(m, [None, at], r), (1, 512, 8, 64), (1, 1, 8, 64)),
    ("index_put_ rank 2", lambda m, r, at: put(m, [at], r), (1024, 256), (4, 256)),
    ("accumulating", lambda m, r, at: put(m, [None, None, at], r, True),
     (1, 8, 512, 64), (1, 8, 2, 64)),
    ("m[:, :, at] = r", assign(ALL, ALL), (1, 8, 512, 64), (1, 8, 1, 64)),
    ("m[:, at] = r", assign(ALL), (1, 1024, 256), (1, 4, 256)),
    ("m[at] = r", assign(), (1024, 256), (4, 256)),
    ("m[0, :, at] = r", assign(0, ALL), (1, 8, 512, 64), (8, 1, 64)),
    ("m[0, at] = r", assign(0), (1, 1024, 256), (4, 256)),
    ("m[:1, :, at] = r", assign(slice(0, 1), ALL), (1, 8, 512, 64), (1, 8, 1, 64)),
    ("m[:, :, 3:5] = r", fixed(ALL, ALL, slice(3, 5)), (1, 8, 512, 64), (1, 8, 2, 64)),
    ("m[:, :, -1] = r", fixed(ALL, ALL, -1), (1, 8, 512, 64), (1, 8, 64)),
    ("m[:, ::4] = r", fixed(ALL, slice(None, None, 4)), (1, 1024, 256), (1, 256, 256)),
    ("m[:, :2] = r; m[:, 5:7] = 2 * r", twice, (1, 1024, 256), (1, 2, 256)),
    ("scatter_ of rows", lambda m, r, at: m.scatter_(1, at[:, None].expand(1, 4, 256), r),
     (1, 1024, 256), (1, 4, 256)),
]  # fmt: skip


def inputs_of(write: str, buffer: tuple[int, ...], row: tuple[int, ...], step: int = 0) -> Any:
    """A row and its positions, as many as the axis that differs has of them."""
    padded = (1,) * (len(buffer) - len(row)) + row
    differ = [a for a, b in zip(padded, buffer, strict=True) if a != b]
    n = differ[0] if differ else 1
    return data(torch.float32, *row, seed=step), torch.arange(n) + step * n


@pytest.mark.parametrize(("name", "write", "buffer", "row"), WRITES, ids=[w[0] for w in WRITES])
def test_a_write_is_one_op_on_the_buffer_itself(
    name: str, write: Function, buffer: tuple[int, ...], row: tuple[int, ...]
) -> None:
    built = lowered(Cache(write, *buffer), *inputs_of(name, buffer, row))
    (state,) = built.states
    assert state.binding is Binding.IN_PLACE, state.why
    (op,) = [n for n in built.graph.nodes if n.inputs[0].name == state.input]
    assert op.type == "ScatterNd"
    assert op.outputs[0].name == state.output or write is twice


@pytest.mark.slow
@pytest.mark.parametrize(("name", "write", "buffer", "row"), WRITES, ids=[w[0] for w in WRITES])
def test_in_place_equals_two_regions_and_pytorch(
    name: str,
    write: Function,
    buffer: tuple[int, ...],
    row: tuple[int, ...],
    tmp_path: Path,
    qnn_libraries: str,
) -> None:
    """Buffers of 0.5 MB: smaller ones are staged whole and would hide a hazard."""
    sessions = []
    for in_place in (True, False):
        program = qnn.lower(
            Cache(write, *buffer).eval(),
            inputs_of(name, buffer, row),
            target="SM8650",
            qnn_libraries=qnn_libraries,
            in_place=in_place,
        )
        program.save(tmp_path / f"{in_place}.pte")
        sessions.append(qnn.load(tmp_path / f"{in_place}.pte", qnn_libraries=qnn_libraries))
    one, two = sessions
    assert [s.binding for s in one.state().values()] == ["in_place"]
    eager = Cache(write, *buffer).eval()
    for step in range(3):
        inputs = inputs_of(name, buffer, row, step)
        with torch.no_grad():
            want = eager(*inputs)
        (got,), (other,) = (pytree.tree_leaves(s(*inputs)) for s in sessions)
        assert torch.equal(got, other)
        assert torch.allclose(got, want, rtol=1e-2, atol=0.1)
        assert torch.equal(one.read_state("mem"), eager.mem)
        assert torch.equal(two.read_state("mem"), eager.mem)


def test_all_layers_share_the_preparation_of_an_index() -> None:
    class Layers(nn.Module):
        def __init__(self, n: int) -> None:
            super().__init__()
            for i in range(n):
                self.register_buffer(f"k{i}", torch.zeros(1, 2, 16, 8))
                self.register_buffer(f"v{i}", torch.zeros(1, 2, 16, 8))

        def forward(self, x: Tensor, at: Tensor) -> Tensor:
            for i, mem in enumerate(self.buffers()):
                mem.index_copy_(2, at, x * i)
                x = x + mem[:, :, :1]
            return x

    def counts(n: int) -> Counter[str]:
        return Counter(op_types(Layers(n), data(torch.float32, 1, 2, 1, 8), torch.tensor([3])))

    one, three = counts(1), counts(3)
    assert (one["ScatterNd"], three["ScatterNd"]) == (2, 6)
    for op in ("Reshape", "Tile", "Concat"):
        assert one[op] == three[op] == 1
