# SPDX-License-Identifier: BSD-3-Clause
"""Delta updates: a graph puts out the rows it writes, and every value is still eager's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import executorch_qnn as qnn
from executorch_qnn.session import Session

from .models import Model

F = torch.nn.functional
LENGTH, HEADS, DEPTH = 24, 2, 8


def cache(*shape: int) -> Tensor:
    """Values that fp16 holds exactly, so that what is not overwritten must come back as it is."""
    return torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(1)) / 32


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randint(-64, 64, shape, generator=torch.Generator().manual_seed(seed)) / 64


def lowered(
    model: torch.nn.Module, inputs: tuple[Any, ...], folder: Path, libraries: str, **options: Any
) -> tuple[qnn.Program, Session]:
    program = qnn.lower(model.eval(), inputs, target="SM8650", qnn_libraries=libraries, **options)
    program.save(folder / "model.pte")
    return program, qnn.load(folder / "model.pte", qnn_libraries=libraries)


def bindings(program: qnn.Program, method: str = "forward") -> dict[str, str]:
    return {s.fqn: s.binding for s in program.report.methods[method].state}


def follow(session: Session, model: torch.nn.Module, calls: list[tuple[Any, ...]]) -> None:
    """Every call's results are close to eager's, and every buffer is eager's, bit for bit."""
    eager = copy.deepcopy(model)
    for i, inputs in enumerate(calls):
        with torch.no_grad():
            want = eager(*inputs)
        torch.testing.assert_close(session(*inputs), want, atol=5e-3, rtol=5e-3, msg=f"call {i}")
        for name, buffer in eager.named_buffers():
            assert torch.equal(session.read_state(name), buffer), f"{name} after call {i}"


# -- forms of writing, each read by attention --------------------------------------------------


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def by_index_put(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    return attend(x, s.k, s.v)


def by_index_copy(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k.index_copy_(2, at, x)
    s.v.index_copy_(2, at, x * 0.5)
    return F.scaled_dot_product_attention(x, s.k, s.v)


def by_scatter(s: Model, x: Tensor, at: Tensor) -> Tensor:
    places = at.reshape(1, 1, -1, 1).expand_as(x)
    s.k.scatter_(2, places, x)
    s.v.scatter_(2, places, x * 0.5)
    return attend(x, s.k, s.v)


def by_int32_index(s: Model, x: Tensor, at: Tensor) -> Tensor:
    at = at.to(torch.int32)
    torch.ops.aten.index_put_(s.k, [None, None, at], x)
    torch.ops.aten.index_put_(s.v, [None, None, at], x * 0.5)
    return attend(x, s.k, s.v)


def rows_before_heads(s: Model, x: Tensor, at: Tensor) -> Tensor:
    """Caches of [1, S, H, D], as some models keep them."""
    s.k[:, at] = x.transpose(1, 2)
    s.v[:, at] = x.transpose(1, 2) * 0.5
    return attend(x, s.k.transpose(1, 2), s.v.transpose(1, 2))


def through_a_view(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k.view(HEADS, LENGTH, DEPTH)[:, at] = x[0]
    s.v.squeeze(0)[:, at] = x[0] * 0.5
    return attend(x, s.k, s.v)


def keys_on_the_left(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    scores = (s.k @ x.transpose(-1, -2)).transpose(-1, -2)
    return torch.softmax(scores, -1) @ s.v


def written_twice(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k[:, :, at] = x
    s.k[:, :, (at + 1) % LENGTH] = x * 0.25
    s.v[:, :, at] = x * 0.5
    return attend(x, s.k, s.v)


def computed_positions(s: Model, x: Tensor, at: Tensor) -> Tensor:
    """A ring: positions wrap around."""
    at = (at * 7 + 3) % LENGTH
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    return attend(x, s.k, s.v)


def only_written(s: Model, x: Tensor, at: Tensor) -> Tensor:
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    return x * 2


def old_value_read(s: Model, x: Tensor, at: Tensor) -> Tensor:
    before = attend(x, s.k, s.v)
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    return before + attend(x, s.k, s.v)


def read_as_a_whole(s: Model, x: Tensor, at: Tensor) -> Tensor:
    """What no product reads has to be computed: scatter is as good, and `auto` takes it."""
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    return torch.tanh(s.k) + s.v


def grouped(s: Model, x: Tensor, at: Tensor) -> Tensor:
    """Two query heads on each cache head, repeated as `repeat_kv` does it."""
    s.k[:, :, at] = x
    s.v[:, :, at] = x * 0.5
    shape = (1, HEADS, 2, LENGTH, DEPTH)
    k, v = (t[:, :, None].expand(shape).reshape(1, -1, LENGTH, DEPTH) for t in (s.k, s.v))
    return attend(x.repeat(1, 2, 1, 1), k, v)


FORMS: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (by_index_put, by_index_copy, by_scatter, by_int32_index, rows_before_heads,
              through_a_view, keys_on_the_left, written_twice, computed_positions, only_written,
              old_value_read, read_as_a_whole, grouped)
}  # fmt: skip


def model_of(form: str) -> Model:
    by_rows = form == "rows_before_heads"
    shape = (1, LENGTH, HEADS, DEPTH) if by_rows else (1, HEADS, LENGTH, DEPTH)
    return Model(FORMS[form], k=cache(*shape), v=cache(*shape) * 0.5)


def call(seed: int, rows: int) -> tuple[Tensor, Tensor]:
    at = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(seed))[:rows]
    return noise(seed, 1, HEADS, rows, DEPTH), at


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("form", FORMS)
def test_rows_placed_equal_eager(form: str, rows: int, tmp_path: Path, qnn_libraries: str) -> None:
    model = model_of(form)
    program, session = lowered(model, call(0, rows), tmp_path, qnn_libraries, state_update="delta")
    assert bindings(program) == {"k": "delta", "v": "delta"}
    follow(session, model, [call(i, rows) for i in range(6)])


@pytest.mark.parametrize("form", ["by_index_put", "read_as_a_whole"])
def test_scatter_can_be_asked_for(form: str, tmp_path: Path, qnn_libraries: str) -> None:
    model = model_of(form)
    program, session = lowered(model, call(0, 2), tmp_path, qnn_libraries, state_update="scatter")
    assert bindings(program) == {"k": "in_place", "v": "in_place"}
    follow(session, model, [call(i, 2) for i in range(4)])


@settings(max_examples=4, deadline=None)
@given(st.data())
def test_any_sequence_of_positions_and_chunks(
    qnn_libraries: str, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Chunks of several sizes are methods over one cache; negative positions count from the end."""
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=2, max_size=3, unique=True))
    model = model_of("by_index_put").eval()
    methods = {f"chunk_{n}": (model, call(n, n)) for n in sizes}
    program = qnn.lower(methods, target="SM8650", qnn_libraries=qnn_libraries, state_update="delta")
    path = tmp_path_factory.mktemp("delta") / "model.pte"
    program.save(path)
    session = qnn.load(path, qnn_libraries=qnn_libraries)
    eager = copy.deepcopy(model)
    for seed in range(12):
        n = data.draw(st.sampled_from(sizes))
        at = data.draw(st.lists(st.integers(0, LENGTH - 1), min_size=n, max_size=n, unique=True))
        wrap = data.draw(st.lists(st.booleans(), min_size=n, max_size=n))
        index = torch.tensor([p - LENGTH * w for p, w in zip(at, wrap, strict=True)])
        x = noise(seed, 1, HEADS, n, DEPTH)
        with torch.no_grad():
            want = eager(x, index)
        got = session.run(f"chunk_{n}", x, index)
        torch.testing.assert_close(got, want, atol=5e-3, rtol=5e-3)
    for name, buffer in eager.named_buffers():
        assert torch.equal(session.read_state(name), buffer)


def test_of_equal_positions_the_last_row_counts_and_attention_sees_it_once(
    tmp_path: Path, qnn_libraries: str
) -> None:
    model = model_of("by_index_put")
    _, session = lowered(model, call(0, 4), tmp_path, qnn_libraries, state_update="delta")
    x = noise(3, 1, HEADS, 4, DEPTH)
    at = torch.tensor([7, 2, 7, 7])
    eager = copy.deepcopy(model)
    with torch.no_grad():  # index_put leaves the order open; one after the other does not
        for i in range(4):
            eager.k[:, :, at[i]] = x[:, :, i]
            eager.v[:, :, at[i]] = x[:, :, i] * 0.5
        want = attend(x, eager.k, eager.v)
    torch.testing.assert_close(session(x, at), want, atol=5e-3, rtol=5e-3)
    for name in ("k", "v"):
        assert torch.equal(session.read_state(name), getattr(eager, name))


@pytest.mark.parametrize("position", [LENGTH, -LENGTH - 1, 2**31 - 1])
def test_a_position_outside_of_the_cache_is_an_error_and_changes_nothing(
    position: int, tmp_path: Path, qnn_libraries: str
) -> None:
    model = model_of("by_index_put")
    _, session = lowered(model, call(0, 1), tmp_path, qnn_libraries, state_update="delta")
    before = {name: session.read_state(name) for name in ("k", "v")}
    with pytest.raises(qnn.QnnError, match="outside of"):
        session(noise(1, 1, HEADS, 1, DEPTH), torch.tensor([position]))
    assert all(torch.equal(session.read_state(name), value) for name, value in before.items())
    follow(session, model, [call(i, 1) for i in range(2)])


# -- the choice --------------------------------------------------------------------------------


def big(update: Callable[..., Any]) -> Model:
    return Model(update, k=cache(1, 4, 512, 64), v=cache(1, 4, 512, 64) * 0.5)


def one_row(seed: int, rows: int = 1) -> tuple[Tensor, Tensor]:
    at = torch.randperm(512, generator=torch.Generator().manual_seed(seed))[:rows]
    return noise(seed, 1, 4, rows, 64), at


@pytest.mark.parametrize(
    ("form", "rows", "expected"),
    [("by_index_put", 1, "delta"), ("by_index_put", 400, "in_place"),
     ("read_as_a_whole", 1, "in_place"), ("only_written", 1, "delta")],
)  # fmt: skip
def test_auto_writes_what_is_fewer_bytes(
    form: str, rows: int, expected: str, tmp_path: Path, qnn_libraries: str
) -> None:
    model = big(FORMS[form])
    program, session = lowered(model, one_row(0, rows), tmp_path, qnn_libraries)
    expected = "write_only" if expected == "in_place" and form == "only_written" else expected
    assert set(bindings(program).values()) == {expected}
    follow(session, model, [one_row(i, rows) for i in range(3)])


def test_bytes_written_do_not_grow_with_the_cache(tmp_path: Path, qnn_libraries: str) -> None:
    written: dict[tuple[str, int], int] = {}
    for strategy in ("delta", "scatter"):
        for length in (256, 1024):
            model = Model(by_index_put, k=cache(1, 2, length, 64), v=cache(1, 2, length, 64))
            inputs = (noise(0, 1, 2, 1, 64), torch.tensor([3]))
            program, _ = lowered(model, inputs, tmp_path, qnn_libraries, state_update=strategy)
            (delegate,) = program.report.methods["forward"].delegates
            written[strategy, length] = delegate.ddr_write_bytes
    assert written["delta", 256] == written["delta", 1024] <= 16384
    assert written["scatter", 1024] - written["scatter", 256] == 2 * (1024 - 256) * 2 * 64 * 2
