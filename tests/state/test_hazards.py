# SPDX-License-Identifier: BSD-3-Clause
"""Every form of update, with readers of the old value, the new one and both, at real sizes.

The compiler does not know that a state's input and output are one address, and errors are silent.
So each graph runs with one buffer and with two, on random data: not a bit may differ.  The
simulator stages small tensors whole, which hides every hazard: slots here are 0.5 to 8 MB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import executorch_qnn as qnn

from .replay import Method

Shape = tuple[int, ...]
Inputs = Callable[[torch.Generator, Shape], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Form:
    """A way of updating the buffer `a` (and `b`), from the inputs that `inputs` makes.

    Attributes:
        rows: rows at a position are written, so that `delta` applies.
        in_place: what the report must say of `a` when nobody reads the old value, if it matters.
        quick: also in the normal suite.
    """

    update: Callable[..., None]
    inputs: Inputs
    dtype: torch.dtype = torch.float32
    rows: bool = False
    in_place: bool | None = None
    quick: bool = False
    twins: bool = False


def _whole(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    return (torch.randn(shape, generator=g),)


def _numbers(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    return (torch.randint(-1000, 1000, shape, generator=g, dtype=torch.int32),)


def _flags(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    return (torch.rand(shape, generator=g) > 0.5,)


def _masked(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    return *_whole(g, shape), *_flags(g, shape)


def _some(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    """Rows for the next-to-last dimension, and where they go."""
    places = torch.randperm(shape[-2], generator=g)[:3]
    return torch.randn(*shape[:-2], 3, shape[-1], generator=g), places


def _one(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    row, places = _some(g, shape)
    return row[..., :1, :].contiguous(), places[:1]


def _part(rows: slice, columns: slice = slice(None)) -> Inputs:
    def inputs(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
        return (torch.randn(shape, generator=g)[..., rows, columns].contiguous(),)

    return inputs


def _elements(g: torch.Generator, shape: Shape) -> tuple[Tensor, ...]:
    """Places along the next-to-last dimension that differ from column to column."""
    first = torch.randint(0, shape[-2], (*shape[:-2], 1, shape[-1]), generator=g)
    places = torch.cat([(first + k) % shape[-2] for k in (0, 5)], -2)
    return torch.randn(places.shape, generator=g), places


def gru(s: Any, x: Tensor) -> None:
    z = torch.sigmoid(s.a + x)
    s.a.copy_((1.0 - z) * s.a + z * torch.tanh(x * 0.5 + s.a))


def delay(s: Any, x: Tensor) -> None:
    s.b.copy_(s.a)
    s.a.copy_(x)


def swap(s: Any, x: Tensor) -> None:
    a = s.a.clone()
    s.a.copy_(s.b + x)
    s.b.copy_(a)


def fed(s: Any, x: Tensor) -> None:
    s.a.add_(x)
    s.b.mul_(0.5).add_(s.a)


def twice(s: Any, x: Tensor) -> None:
    s.a.add_(x)
    s.a.mul_(s.a * 0.125)


def row_and_scale(s: Any, row: Tensor, at: Tensor) -> None:
    s.a.mul_(0.875)
    s.a.index_copy_(-2, at, row)


def two_rows(s: Any, row: Tensor, at: Tensor) -> None:
    s.a.index_copy_(-2, at, row)
    s.a.index_copy_(-2, (at + 1) % s.a.shape[-2], row * 2.0)


def row_of_old(s: Any, row: Tensor, at: Tensor) -> None:
    s.a.index_copy_(-2, at, torch.tanh(s.a[..., :1, :] + row))


def _do(call: Callable[..., Any]) -> Callable[..., None]:
    def update(s: Any, *inputs: Tensor) -> None:
        call(s.a, *inputs)

    return update


INT, BOOL = torch.int32, torch.bool
FORMS: dict[str, Form] = {
    "add": Form(_do(lambda a, x: a.add_(x)), _whole, in_place=True, quick=True),
    "subtracted": Form(_do(lambda a, x: a.copy_(x - a)), _whole, in_place=True),
    "mul": Form(_do(lambda a, x: a.mul_(torch.tanh(x))), _whole, in_place=True),
    "divided": Form(_do(lambda a, x: a.div_(x.abs() + 1.0)), _whole, in_place=True),
    "blend": Form(_do(lambda a, x: a.mul_(0.875).add_(x)), _whole, in_place=True),
    "lerp": Form(_do(lambda a, x: a.lerp_(x, 0.25)), _whole),
    "maximum": Form(_do(lambda a, x: a.copy_(torch.maximum(a, x))), _whole, in_place=True),
    "clamped": Form(_do(lambda a, x: a.add_(x).clamp_(-1.0, 1.0)), _whole),
    "tanh": Form(_do(lambda a, x: a.add_(x).tanh_()), _whole, in_place=True),
    "relu": Form(_do(lambda a, x: a.copy_(torch.relu(a - x))), _whole, in_place=True),
    "negated": Form(_do(lambda a, x: a.neg_().add_(x)), _whole, in_place=True),
    "gru": Form(gru, _whole, in_place=True),
    "twice": Form(twice, _whole, in_place=True),
    "where": Form(_do(lambda a, x, m: a.copy_(torch.where(m, x, a))), _masked, in_place=True,
                  quick=True),
    "masked fill": Form(_do(lambda a, x, m: a.add_(x).masked_fill_(m, 0.5)), _masked),
    "stored": Form(_do(lambda a, x: a.copy_(x)), _whole),
    "filled": Form(_do(lambda a, x: a.fill_(0.5)), _whole),
    "index_copy": Form(_do(lambda a, r, i: a.index_copy_(-2, i, r)), _some, rows=True,
                       in_place=True, quick=True),
    "index_copy of one": Form(_do(lambda a, r, i: a.index_copy_(-2, i, r)), _one, rows=True),
    "index_put": Form(
        _do(lambda a, r, i: torch.ops.aten.index_put_(a, [*(None,) * (a.dim() - 2), i], r)), _some,
        rows=True),
    "index_put added": Form(
        _do(lambda a, r, i: torch.ops.aten.index_put_(a, [*(None,) * (a.dim() - 2), i], r, True)),
        _some),
    "index_add": Form(_do(lambda a, r, i: a.index_add_(-2, i, r)), _some),
    "index_fill": Form(_do(lambda a, r, i: a.index_fill_(-2, i, 0.25)), _some, rows=True),
    "scatter": Form(_do(lambda a, v, i: a.scatter_(-2, i, v)), _elements),
    "scatter_add": Form(_do(lambda a, v, i: a.scatter_add_(-2, i, v)), _elements),
    "rows": Form(_do(lambda a, x: a[..., 3:20, :].copy_(x)), _part(slice(3, 20)), rows=True,
                 quick=True),
    "every other row": Form(_do(lambda a, x: a[..., ::2, :].copy_(x)), _part(slice(0, None, 2))),
    "columns": Form(_do(lambda a, x: a[..., 3:20].copy_(x)), _part(slice(None), slice(3, 20))),
    "rows added": Form(_do(lambda a, x: a[..., 3:20, :].add_(x)), _part(slice(3, 20))),
    "a transposed part": Form(
        _do(lambda a, x: a.transpose(-1, -2)[..., 3:20, :].mul_(0.5).add_(x.transpose(-1, -2))),
        _part(slice(None), slice(3, 20))),
    "a row of the old": Form(row_of_old, _one, rows=True),
    "scaled, then a row": Form(row_and_scale, _one),
    "two rows": Form(two_rows, _one, rows=True),
    "shift": Form(_do(lambda a, x: a.copy_(torch.cat([a[..., 16:, :], x], -2))),
                  _part(slice(0, 16)), in_place=False, quick=True),
    "shift the other way": Form(_do(lambda a, x: a.copy_(torch.cat([x, a[..., :-16, :]], -2))),
                                _part(slice(0, 16)), in_place=False),
    "roll": Form(_do(lambda a, x: a.copy_(torch.roll(a, 1, -2) + x)), _whole, in_place=False),
    "flip": Form(_do(lambda a, x: a.copy_(a.flip(-2) + x)), _whole, in_place=False),
    "cumsum": Form(_do(lambda a, x: a.copy_((a * 0.01).cumsum(-1) + x)), _whole, in_place=False),
    "softmax": Form(_do(lambda a, x: a.copy_(torch.softmax(a + x, -1))), _whole, in_place=False),
    "normalised": Form(_do(lambda a, x: a.copy_(x - a.mean(-1, keepdim=True))), _whole),
    "delay": Form(delay, _whole, twins=True, quick=True),
    "swap": Form(swap, _whole, twins=True),
    "one feeds the other": Form(fed, _whole, twins=True),
    "int add": Form(_do(lambda a, x: a.add_(x)), _numbers, INT, in_place=True),
    "int maximum": Form(_do(lambda a, x: a.copy_(torch.maximum(a, x))), _numbers, INT),
    "int rows": Form(_do(lambda a, x: a[..., 3:20, :].copy_(x[..., 3:20, :])), _numbers, INT),
    "int shift": Form(_do(lambda a, x: a.copy_(torch.cat([a[..., 16:, :], x[..., :16, :]], -2))),
                      _numbers, INT, in_place=False),
    "bool or": Form(_do(lambda a, x: a.logical_or_(x)), _flags, BOOL),
    "bool xor": Form(_do(lambda a, x: a.bitwise_xor_(x)), _flags, BOOL),
    "bool rows": Form(_do(lambda a, x: a[..., 3:20, :].copy_(x[..., 3:20, :])), _flags, BOOL),
}  # fmt: skip
READERS = ("nobody", "new", "both")
SHAPES: dict[str, Shape] = {
    "0.5 MB": (1, 8, 512, 64),
    "2 MB": (1024, 1024),
    "8 MB": (1, 8, 8192, 64),
}


class Stateful(nn.Module):
    """Updates its buffers, and reads them as a decoder does: whole, by a matmul and by a sum.

    One method for each kind of readers: of nobody but the update, of the new value, and of the old
    value too, which the graph may compute in any order.
    """

    def __init__(self, form: Form, shape: Shape) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(1)
        values = {
            torch.float32: torch.randn(shape, generator=g).half().float(),
            INT: torch.randint(-1000, 1000, shape, generator=g, dtype=INT),
            BOOL: torch.rand(shape, generator=g) > 0.5,
        }
        self.update = form.update
        self.register_buffer("a", values[form.dtype])
        if form.twins:
            self.register_buffer("b", -values[form.dtype])
        self.register_buffer("w", torch.randn(shape[-1], 8, generator=g) / math.sqrt(shape[-1]))

    def nobody(self, *inputs: Tensor) -> list[Tensor]:
        self.update(self, *inputs)
        return [inputs[0].float().reshape(-1)[:8] + 1.0]

    def new(self, *inputs: Tensor) -> list[Tensor]:
        self.update(self, *inputs)
        return self._read(self.a)

    def both(self, *inputs: Tensor) -> list[Tensor]:
        old = self.a.clone()
        self.update(self, *inputs)
        return [*self._read(old), *self._read(self.a)]

    def _read(self, a: Tensor) -> list[Tensor]:
        if a.dtype is BOOL:
            a = a.to(torch.float32)
        if a.dtype is INT:
            return [a[..., ::7, :].sum(-1)]
        return [a @ self.w, (a * 0.5).mean(-1)]


@dataclass(frozen=True)
class _Running:
    session: qnn.Session
    bindings: dict[str, dict[str, str]]
    """Method to buffer to binding."""


def _run(form: Form, shape: Shape, folder: Path, qnn_libraries: str, **options: Any) -> _Running:
    model = Stateful(form, shape)
    inputs = form.inputs(torch.Generator().manual_seed(2), shape)
    program = qnn.lower(
        {readers: (Method(model, readers).eval(), inputs) for readers in READERS},
        target="SM8650",
        qnn_libraries=qnn_libraries,
        **options,
    )
    path = folder / f"{len(list(folder.iterdir()))}.pte"
    program.save(path)
    bindings = {
        name: {s.fqn: s.binding for s in method.state}
        for name, method in program.report.methods.items()
    }
    return _Running(qnn.load(path, qnn_libraries=qnn_libraries), bindings)


def _cases() -> list[Any]:
    cases = []
    for name, form in FORMS.items():
        for size, shape in SHAPES.items():
            quick = form.quick and size == "0.5 MB"
            if size == "8 MB" and not form.quick:
                continue
            marks = () if quick else (pytest.mark.long,)
            cases.append(pytest.param(form, shape, id=f"{name}, {size}", marks=marks))
    # The smallest shape in which a product with one address for old and new was read wrongly.
    cases.append(pytest.param(FORMS["mul"], (512, 256), id="mul, 0.25 MB"))
    return cases


@pytest.mark.parametrize(("form", "shape"), _cases())
def test_one_buffer_equals_two(
    form: Form, shape: Shape, tmp_path: Path, qnn_libraries: str
) -> None:
    ways: dict[str, Any] = {"state_update": "scatter"}
    if form.dtype is torch.float32:  # sums in fp32 are added up outside of the graph
        ways["state_dtype"] = {f"core.{n}": torch.float16 for n in ("ab" if form.twins else "a")}
    one = _run(form, shape, tmp_path, qnn_libraries, **ways)
    two = _run(form, shape, tmp_path, qnn_libraries, **ways, in_place=False)
    delta = _run(form, shape, tmp_path, qnn_libraries, state_update="delta") if form.rows else None
    assert not any("in_place" in of.values() for of in two.bindings.values())
    if form.in_place is not None:
        assert (one.bindings["nobody"]["core.a"] == "in_place") == form.in_place, one.bindings
    eager = Stateful(form, shape).eval()
    g = torch.Generator().manual_seed(3)
    calls = ("new", "nobody", "both", "both", "new")
    for call, method in enumerate(calls):
        where = f"call {call}, {method}, {one.bindings}"
        inputs = form.inputs(g, shape)
        with torch.no_grad():
            want = getattr(eager, method)(*inputs)
        got, other = _outputs(one, method, inputs), _outputs(two, method, inputs)
        state = {name: one.session.read_state(name) for name in one.session.state()}
        for i, (x, y) in enumerate(zip(got, other, strict=True)):
            assert torch.equal(x, y), f"{where}, output {i}: {_differs(x, y)}"
        for name, x in state.items():
            y = two.session.read_state(name)
            assert torch.equal(x, y), f"{where}, {name}: {_differs(x, y)}"
        _assert_close(got, want, where)
        if delta is not None:  # the same rows, other sums
            _assert_close(_outputs(delta, method, inputs), want, f"delta, {where}")
            for name, x in state.items():
                y = delta.session.read_state(name)
                assert torch.equal(x, y), f"delta, {where}, {name}: {_differs(x, y)}"
    for name, x in state.items():
        _assert_close([x], [getattr(eager, name.removeprefix("core."))], name)


def _outputs(running: _Running, method: str, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    return list(pytree.tree_leaves(running.session.run(method, *inputs)))


def _differs(x: Tensor, y: Tensor) -> str:
    places = (x != y).nonzero()
    return f"{len(places)} of {x.numel()} elements differ, the first at {places[0].tolist()}"


def _assert_close(got: list[Tensor], want: list[Tensor], where: str) -> None:
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        if w.is_floating_point():
            noise = float((g - w).norm() / w.norm().clamp_min(1e-6))
            assert noise < 1e-2, f"{where}, value {i}: relative error {noise}"
        else:
            assert torch.equal(g, w), f"{where}, value {i}: {_differs(g, w)}"
