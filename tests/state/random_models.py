# SPDX-License-Identifier: BSD-3-Clause
"""Random small models with mutable buffers, as Python source.

A model is the text of a module with a class `Core`, whose methods read and write its buffers, and
tables of what each method is called with and of how it is lowered.  `replay` runs such a text; a
failure is a file that can be read, edited and run again:

    python -m tests.state.replay FILE.py

Values stay in a range where fp16 is good enough to tell right from wrong: floats decay or grow
slowly, and nothing discrete (a mask, an index, an integer) depends on a float that was computed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from hypothesis import strategies as st

T = TypeVar("T")
Shape = tuple[int, ...]

FLOAT, INT64, INT32, BOOL = "float32", "int64", "int32", "bool"

_SHAPES: tuple[Shape, ...] = (
    (4,), (3, 4), (), (1,), (1, 5, 4), (2, 6, 3), (1, 2, 4, 3), (2, 2, 3, 4), (7,), (1, 1), (5, 1),
    (33,), (2, 40), (1, 8, 2, 16), (1, 1, 9), (3, 1, 2, 5),
)  # fmt: skip

_LOWERINGS: tuple[dict[str, object], ...] = (
    {}, {}, {"state_update": "delta"}, {"state_update": "scatter"}, {"in_place": False},
)  # fmt: skip

_OWNERS = {"inner": "nn.Module()", "items": "nn.ModuleList([nn.Module(), nn.Module()])"}

_HEAD = """\
import torch
from torch import nn


def noise(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half().float()


def number(seed, *shape):
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed))


class Core(nn.Module):
    def __init__(self):
        super().__init__()
"""


class Chooser(Protocol):
    """Where decisions come from; small numbers mean simple models."""

    def upto(self, n: int) -> int:
        """A number of 0 to n."""


@dataclass(frozen=True)
class Value:
    """Something that a method can read.

    Attributes:
        exact: not computed from floats: an input, or no float at all.
        of: the buffer that it is, or may be a view of.
    """

    text: str
    dtype: str
    shape: Shape
    exact: bool = True
    of: str = ""


@dataclass
class _Method:
    name: str
    inputs: list[tuple[object, ...]] = field(default_factory=list)
    scope: list[Value] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    fresh: int = 0


def generate(choose: Chooser) -> str:
    """The source of a random model."""
    return _Generator(choose).run()


class _Drawn:
    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw

    def upto(self, n: int) -> int:
        return self.draw(st.integers(0, n))


@st.composite
def models(draw: st.DrawFn) -> str:
    """The source of a random model; it shrinks to few buffers, statements and methods."""
    return generate(_Drawn(draw))


class _Generator:
    def __init__(self, choose: Chooser) -> None:
        self.choose = choose
        self.buffers: list[Value] = []
        self.weights: dict[int, str] = {}
        self.islands = False
        self.method = _Method("")

    # -- decisions -----------------------------------------------------------------------------

    def upto(self, n: int) -> int:
        return self.choose.upto(n) if n > 0 else 0

    def one(self, options: Sequence[T]) -> T:
        return options[self.upto(len(options) - 1)]

    def maybe(self, percent: int) -> bool:
        return self.upto(99) >= 100 - percent

    # -- the model -----------------------------------------------------------------------------

    def run(self) -> str:
        shapes = [self.one(_SHAPES) for _ in range(1 + self.upto(2))]
        lines = self._make_buffers(shapes)
        self.islands = self.maybe(40)
        names = ["forward", "second", "third"][: self.one((1, 1, 2, 2, 3))]
        wrapped = len(names) > 1 and self.maybe(50)
        methods = []
        for name in names:
            self._make_method(_Method(name))
            methods.append(self.method)
        text = [_HEAD, *(f"        {line}\n" for line in lines)]
        text += [
            f'        self.register_buffer("{w}", noise({n}, {n}, {n}).div({n}).half().float())\n'
            for n, w in self.weights.items()
        ]
        for m in methods:
            arguments = "".join(f", x{i}" for i in range(len(m.inputs)))
            text.append(f"\n    def {m.name}(self{arguments}):\n")
            text += [f"        {line}\n" for line in m.lines]
        text.append(f"\n\nWRAPPED = {wrapped}  # the methods see `core.b0` instead of `b0`\n")
        text.append(f"LOWERING = {self.one(_LOWERINGS)}\n")
        text.append("INPUTS = {\n")
        text += [f'    "{m.name}": {m.inputs},\n' for m in methods]
        text.append("}\n")
        return "".join(text)

    def _make_buffers(self, shapes: list[Shape]) -> list[str]:
        lines = []
        for i in range(6):
            if i and not self.maybe(65):
                break
            dtype = self.one((FLOAT, FLOAT, FLOAT, FLOAT, INT64, INT32, BOOL))
            shape = self.one(shapes)
            where = self.one(("", "", "", "inner.", f"items[{self.upto(1)}]."))
            owner = where.partition(".")[0].partition("[")[0]
            if owner and (line := f"self.{owner} = {_OWNERS[owner]}") not in lines:
                lines.append(line)
            persistent = ", persistent=False" if self.maybe(20) else ""
            initial = self._initial(dtype, shape, i)
            lines.append(f'self.{where}register_buffer("b{i}", {initial}{persistent})')
            text = f"self.{where}b{i}"
            self.buffers.append(Value(text, dtype, shape, dtype != FLOAT, text))
        return lines

    def _initial(self, dtype: str, shape: Shape, seed: int) -> str:
        zeros = f"torch.zeros({shape}, dtype=torch.{dtype})"
        numbers = ", ".join(map(str, (seed, *shape)))
        random = {
            FLOAT: f"noise({numbers})",
            INT64: f"number({numbers})",
            INT32: f"number({numbers}).to(torch.int32)",
            BOOL: f"number({numbers}) > 0",
        }
        return self.one((zeros, random[dtype], random[dtype]))

    # -- methods -------------------------------------------------------------------------------

    def _make_method(self, method: _Method) -> None:
        self.method = method
        # Every method sees a subset of the buffers.
        method.scope = [b for b in self.buffers if not self.maybe(20)] or self.buffers[:1]
        for _ in range(6):
            if not self.maybe(80):
                break
            self._statement()
        outputs = [self._output()]
        while len(outputs) < 4 and self.maybe(50):
            outputs.append(self._output())
        method.lines.append("return " + ", ".join(outputs))

    def _statement(self) -> None:
        kind = self.one((self._update, self._update, self._update, self._local, self._pair))
        kind()

    def _say(self, line: str) -> None:
        self.method.lines.append(line)

    def _name(self, value: Value) -> None:
        text = f"v{self.method.fresh}"
        self.method.fresh += 1
        self._say(f"{text} = {value.text}")
        self.method.scope.append(Value(text, value.dtype, value.shape, value.exact, value.of))

    def _mine(self) -> list[Value]:
        """The buffers of this method."""
        return [v for v in self.method.scope if v.text.startswith("self.")]

    def _local(self) -> None:
        source = self.one(self.method.scope)
        form = self.upto(3)
        if form == 0:  # the value as it is now
            self._name(Value(f"{source.text}.clone()", source.dtype, source.shape, source.exact))
        elif form == 1:  # sees later writes, if it is a buffer
            self._name(self._view(source))
        else:
            shape = source.shape
            text = self._any(source.dtype, shape, 2)
            self._name(Value(text, source.dtype, shape, source.dtype != FLOAT))

    def _pair(self) -> None:
        """Statements about two buffers of one type and shape."""
        a = self.one(self._mine())
        others = [v for v in self._mine() if (v.dtype, v.shape) == (a.dtype, a.shape) and v != a]
        if not others:
            self._update()
            return
        b = self.one(others)
        form = self.upto(2)
        if form == 0:  # one value for both
            text = self._any(a.dtype, a.shape, 1)
            name = f"v{self.method.fresh}"
            self._name(Value(text, a.dtype, a.shape, a.dtype != FLOAT))
            self._say(f"{a.text}.copy_({name})")
            self._say(f"{b.text}.copy_({name})")
        elif form == 1:  # swapped
            name = f"v{self.method.fresh}"
            self._name(Value(f"{a.text}.clone()", a.dtype, a.shape, a.exact))
            self._say(f"{a.text}.copy_({b.text})")
            self._say(f"{b.text}.copy_({name})")
        else:  # a delay line
            text = self._any(a.dtype, a.shape, 1)
            self._say(f"{b.text}.copy_({a.text})")
            self._say(f"{a.text}.copy_({text})")

    def _output(self) -> str:
        source = self.one(self.method.scope)
        form = self.upto(4)
        if form == 0:
            return source.text
        if form == 1:
            return self._view(source).text
        return self._any(source.dtype, source.shape, 2)

    # -- updates -------------------------------------------------------------------------------

    def _update(self) -> None:
        """One write to a buffer, or to a view of it."""
        buffer = self.one(self._mine())
        if self.maybe(8):  # a new tensor in the buffer's place
            text = self._any(buffer.dtype, buffer.shape, 2)
            self._say(f"{buffer.text} = ({text}).contiguous().clone()")
            scope = self.method.scope
            scope[:] = [v for v in scope if v.of != buffer.text or v == buffer]
            return
        target = buffer
        for _ in range(2):
            if self.maybe(30):
                target = self._view(target)
        if target.shape and self.maybe(40):
            self._indexed(target)
        elif target.shape and self.maybe(15):
            self._moved(target)
        else:
            self._whole(target)

    def _whole(self, t: Value) -> None:
        """Every element of `t` is written, or those of a mask."""
        shape = t.shape
        if t.dtype == FLOAT:
            forms = (
                lambda: f"{t.text}.copy_({self._float(shape, 2)})",
                lambda: f"{t.text}.add_(torch.tanh({self._float(shape, 2)}))",
                lambda: f"{t.text}.mul_(0.5).add_({self._float(shape, 2)})",
                lambda: f"{t.text}.sub_(torch.tanh({self._float(shape, 1)}))",
                lambda: f"{t.text}.mul_(torch.tanh({self._float(shape, 1)}))",
                lambda: f"{t.text}.mul_(0.75)",
                lambda: f"{t.text}.lerp_({self._float(shape, 1)}, 0.25)",
                lambda: f"{t.text}.clamp_(-1.5, 1.5)",
                lambda: f"{t.text}.tanh_()",
                lambda: f"{t.text}.neg_()",
            )  # fmt: skip
            number = self.one(("0.5", "-1.0", "0.0"))
        elif t.dtype == BOOL:
            forms = (
                lambda: f"{t.text}.copy_({self._bool(shape, 2)})",
                lambda: f"{t.text}.logical_or_({self._bool(shape, 1)})",
                lambda: f"{t.text}.logical_and_({self._bool(shape, 1)})",
                lambda: f"{t.text}.bitwise_xor_({self._bool(shape, 1)})",
                lambda: f"{t.text}.logical_not_()",
            )  # fmt: skip
            number = self.one(("True", "False"))
        else:
            forms = (
                lambda: f"{t.text}.add_(1)",
                lambda: f"{t.text}.copy_({self._any(t.dtype, shape, 2)})",
                lambda: f"{t.text}.add_(({self._int(t.dtype, shape, 1)}) % 7)",
                lambda: f"{t.text}.sub_(({self._int(t.dtype, shape, 1)}) % 5)",
                lambda: f"{t.text}.mul_(3).remainder_(31)",
                lambda: f"{t.text}.clamp_(-20, 20)",
            )
            number = self.one(("0", "3", "-2"))
        general = (
            lambda: f"{t.text}.fill_({number})",
            lambda: f"{t.text}.zero_()",
            lambda: f"{t.text}.masked_fill_({self._bool(shape, 1)}, {number})",
            lambda: (
                f"{t.text}.copy_(torch.where({self._bool(shape, 1)}, "
                f"{self._any(t.dtype, shape, 1)}, {t.text}))"
            ),
        )
        form = self.one((*forms, *forms, *general))
        self._say(form())

    def _moved(self, t: Value) -> None:
        """Elements change places."""
        d = self.upto(len(t.shape) - 1)
        n = t.shape[d]
        colons = ":, " * d
        k = 1 + self.upto(n - 1)
        part = self._any(t.dtype, (*t.shape[:d], k, *t.shape[d + 1 :]), 1)
        rest = f"{t.text}[{colons}{k}:]" if self.upto(1) == 0 else f"{t.text}[{colons}:{n - k}]"
        order = f"{rest}, {part}" if f"{k}:]" in rest else f"{part}, {rest}"
        forms = [
            f"{t.text}.copy_(torch.cat([{order}], {d}))",
            f"{t.text}.copy_(torch.roll({t.text}, {1 + self.upto(2)}, {d}))",
            f"{t.text}.copy_({t.text}.flip({d}))",
        ]
        self._say(self.one(forms))

    def _indexed(self, t: Value) -> None:
        """Some elements of `t` along one dimension are written."""
        d = self.upto(len(t.shape) - 1)
        n = t.shape[d]
        k = 1 + self.upto(min(n, 3) - 1)
        rows = (*t.shape[:d], k, *t.shape[d + 1 :])
        put, nones = "torch.ops.aten.index_put_", "None, " * d
        colons = ":, " * d
        value = self.one(
            {FLOAT: ("0.5", "-1.0"), BOOL: ("True", "False")}.get(t.dtype, ("7", "-3"))
        )

        def source() -> str:
            return self._any(t.dtype, rows, 1)

        def add() -> str:
            text = source()
            return f"torch.tanh({text})" if t.dtype == FLOAT else f"({text}) % 7"

        forms = [
            lambda: f"{t.text}.index_copy_({d}, {self._index(n, k)}, {source()})",
            lambda: f"{t.text}[{colons}{self._index(n, k, wraps=True)}] = {source()}",
            lambda: f"{put}({t.text}, [{nones}{self._index(n, k, wraps=True)}], {source()})",
            lambda: f"{t.text}.scatter_({d}, {self._places(rows, d, n)}, {source()})",
            lambda: f"{t.text}.index_fill_({d}, {self._index(n, k)}, {value})",
            lambda: f"{t.text}.scatter_({d}, {self._places(rows, d, n)}, {value})",
            lambda: f"{t.text}[{colons}{self._index(n, k)}] = {value}",
        ]
        if t.dtype != BOOL:
            forms += [
                lambda: f"{t.text}.index_add_({d}, {self._index(n, k)}, {add()})",
                lambda: f"{t.text}.scatter_add_({d}, {self._places(rows, d, n)}, {add()})",
                lambda: f"{put}({t.text}, [{nones}{self._index(n, k)}], {add()}, True)",
            ]
        self._say(self.one(forms)())

    # -- values --------------------------------------------------------------------------------

    def _view(self, v: Value) -> Value:
        """A view of `v`, or `v`."""
        forms = [(v.text, v.shape)]
        if v.shape:
            d = self.upto(len(v.shape) - 1)
            n = v.shape[d]
            start = self.upto(n - 1)
            end = start + 1 + self.upto(n - start - 1)
            colons = ":, " * d
            head, tail = v.shape[:d], v.shape[d + 1 :]
            size = end - start
            forms += [
                (f"{v.text}[{colons}{start}:{end}]", (*head, size, *tail)),
                (f"{v.text}.narrow({d}, {start}, {size})", (*head, size, *tail)),
                (f"{v.text}.select({d}, {start})", (*head, *tail)),
                (f"{v.text}[{colons}{start}]", (*head, *tail)),
                (f"{v.text}[{colons}::2]", (*head, -(-n // 2), *tail)),
            ]
        if len(v.shape) > 1:
            a, b = self.one([(0, 1), (0, -1), (-2, -1)])
            swapped = list(v.shape)
            swapped[a], swapped[b] = swapped[b], swapped[a]
            forms.append((f"{v.text}.transpose({a}, {b})", tuple(swapped)))
        if len(v.shape) != 1 and v.text == v.of:
            forms.append((f"{v.text}.view(-1)", (math.prod(v.shape),)))
        if len(v.shape) < 4:
            forms.append((f"{v.text}.unsqueeze(0)", (1, *v.shape)))
        text, shape = self.one(forms)
        return Value(text, v.dtype, shape, v.exact, v.of)

    def _input(self, spec: tuple[object, ...]) -> str:
        """A new input of the method."""
        self.method.inputs.append(spec)
        return f"x{len(self.method.inputs) - 1}"

    def _index(self, n: int, k: int, *, wraps: bool = False) -> str:
        """int64[k], each in 0..n-1 and different; with `wraps` some are negative."""
        counters = [v for v in self.method.scope if v.dtype == INT64]
        form = self.upto(5)
        if form == 1 and k == 1 and counters:
            return f"({self.one(counters).text}.reshape(-1)[:1] % {n})"
        if form == 2:
            return f"torch.tensor({sorted({(i * 2) % n for i in range(k)} | set(range(k)))[:k]})"
        return self._input(("index", n, k, wraps))

    def _places(self, shape: Shape, d: int, n: int) -> str:
        """int64 of `shape`, each in 0..n-1, and different along `d`."""
        return self._input(("places", shape, d, n))

    def _any(self, dtype: str, shape: Shape, depth: int) -> str:
        if dtype == FLOAT:
            return self._float(shape, depth)
        if dtype == BOOL:
            return self._bool(shape, depth)
        text = self._int(dtype, shape, depth)
        return f"({text}) % 97" if depth else text

    def _leaf(self, dtype: str, shape: Shape) -> str:
        same = [v for v in self.method.scope if (v.dtype, v.shape) == (dtype, shape)]
        other = [v for v in self.method.scope if v not in same and self._converts(v, dtype)]
        form = self.upto(9)
        if same and form < 5:
            v = self.one(same)
            # An in-place op whose operand overlaps what it writes in part gives anything in eager.
            return f"{v.text}.clone()" if v.of and v.text != v.of else v.text
        if other and form < 8:
            return self._converted(self.one(other), dtype, shape)
        if len(self.method.inputs) < 5:
            text = self._input((dtype, shape))
            self.method.scope.append(Value(text, dtype, shape))
            return text
        return self._constant(dtype, shape)

    def _constant(self, dtype: str, shape: Shape) -> str:
        value = {FLOAT: "0.25", BOOL: "True"}.get(dtype, "2")
        return f"torch.full({shape}, {value}, dtype=torch.{dtype})"

    def _converts(self, v: Value, dtype: str) -> bool:
        return v.dtype != FLOAT or dtype == FLOAT or (dtype == BOOL and v.exact)

    def _converted(self, v: Value, dtype: str, shape: Shape) -> str:
        text = f"{v.text}.clone()" if v.of and v.shape != shape else v.text
        if v.dtype != dtype:
            if dtype == FLOAT and v.dtype == BOOL:
                text = f"{text}.to(torch.float32)"
            elif dtype == FLOAT:
                text = f"({text}.clamp(-100, 100).to(torch.float32) * 0.01)"
            elif dtype == BOOL:
                compared = {FLOAT: "{} > 0.25"}.get(v.dtype, self.one(("{} > 3", "{} % 2 == 0")))
                text = f"({compared.format(text)})"
            else:
                text = f"{text}.to(torch.{dtype})"
        if v.shape == shape:
            return text
        if math.prod(v.shape) == math.prod(shape):
            return f"{text}.reshape({shape})"
        trailing = shape[len(shape) - len(v.shape) :]
        if len(v.shape) <= len(shape) and all(
            a in (1, b) for a, b in zip(v.shape, trailing, strict=True)
        ):
            return f"{text}.expand({shape})"
        whole = {FLOAT: f"{text}.mean()", BOOL: f"{text}.any()"}.get(dtype, f"({text}.sum() % 53)")
        if dtype in (INT64, INT32):
            whole = f"({text}.sum(dtype=torch.{dtype}) % 53)"
        at = self.upto(math.prod(v.shape) - 1)
        one = self.one((f"{text}.reshape(-1)[{at}]", whole))
        return f"{one}.expand({shape})"

    def _float(self, shape: Shape, depth: int) -> str:
        if depth == 0 or self.maybe(30):
            return self._leaf(FLOAT, shape)

        def a() -> str:
            return self._float(shape, depth - 1)

        forms = [
            lambda: f"({a()} + {a()}) * 0.5",
            lambda: f"({a()} - {a()}) * 0.5",
            lambda: f"({a()}) * 0.5",
            lambda: f"torch.tanh({a()})",
            lambda: f"torch.tanh({a()}) * ({a()})",
            lambda: f"torch.maximum({a()}, {a()})",
            lambda: f"torch.where({self._bool(shape, depth - 1)}, {a()}, {a()})",
            lambda: f"({a()}).abs()",
            lambda: f"torch.relu({a()})",
            lambda: f"({a()}).clamp(-2.0, 1.0)",
            lambda: f"torch.sigmoid({a()})",
        ]
        if shape:
            d = self.upto(len(shape) - 1)
            forms += [
                lambda: f"({a()}).flip({d})",
                lambda: f"torch.roll({a()}, 1, {d})",
                lambda: f"(({a()}).mean({d}, keepdim=True) + {a()}) * 0.5",
                lambda: f"({a()}).cumsum({d}) * {1 / max(2, shape[d]):.3f}",
                lambda: f"torch.softmax({a()}, {d})",
            ]
        if len(shape) > 1:
            forms += [lambda: f"({a()}) @ {self._weight(shape[-1])}"] * 2
        if self.islands:
            forms += [
                lambda: f"torch.asinh({a()})",
                lambda: f"torch.atan2({a()}, ({a()}).abs() + 1.5)",
                lambda: f"torch.sinh(torch.tanh({a()}))",
            ] * 3
        return self.one(forms)()

    def _weight(self, n: int) -> str:
        self.weights.setdefault(n, f"w{n}")
        return f"self.w{n}"

    def _int(self, dtype: str, shape: Shape, depth: int) -> str:
        if depth == 0 or self.maybe(30):
            return self._leaf(dtype, shape)

        def a() -> str:
            return self._int(dtype, shape, depth - 1)

        forms = [
            lambda: f"({a()} + {a()})",
            lambda: f"({a()} - {a()})",
            lambda: f"({a()}) * 2",
            lambda: f"torch.maximum({a()}, {a()})",
            lambda: f"torch.where({self._bool(shape, depth - 1)}, {a()}, {a()})",
            lambda: f"({a()}).abs()",
            lambda: f"({a()}) % 11",
        ]
        if shape:
            d = self.upto(len(shape) - 1)
            forms += [lambda: f"({a()}).flip({d})", lambda: f"torch.roll({a()}, 1, {d})"]
        if self.islands:
            forms += [lambda: f"torch.bitwise_left_shift(({a()}) % 64, 1)"] * 4
        return self.one(forms)()

    def _bool(self, shape: Shape, depth: int) -> str:
        if depth == 0 or self.maybe(30):
            return self._leaf(BOOL, shape)

        def a() -> str:
            return self._bool(shape, depth - 1)

        def i() -> str:
            return self._int(INT64, shape, depth - 1)

        forms = [
            lambda: f"({a()} & {a()})",
            lambda: f"({a()} | {a()})",
            lambda: f"(~{a()})",
            lambda: f"({a()} ^ {a()})",
            lambda: f"({i()} > {i()})",
            lambda: f"({i()} == 3)",
            lambda: f"({self._exact_float(shape)} > 0.25)",
        ]
        if self.islands:
            forms += [lambda: f"(torch.bitwise_left_shift(({i()}) % 8, 1) > 7)"] * 3
        return self.one(forms)()

    def _exact_float(self, shape: Shape) -> str:
        known = [v for v in self.method.scope if v.exact and (v.dtype, v.shape) == (FLOAT, shape)]
        if known:
            return self.one(known).text
        text = self._input((FLOAT, shape))
        self.method.scope.append(Value(text, FLOAT, shape))
        return text
