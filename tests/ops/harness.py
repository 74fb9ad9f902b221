# SPDX-License-Identifier: BSD-3-Clause
"""Runs functions on the HTP simulator through the op table and judges them against PyTorch.

Exporting and compiling cost much more than a small op: `check_all` puts many functions, each with
inputs of its own, into one graph.
"""

from __future__ import annotations

import functools
import math
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.utils import _pytree as pytree

from executorch_qnn import _native
from executorch_qnn.compile.build import IO, Built, build
from executorch_qnn.compile.compiler import CompileWorker
from executorch_qnn.compile.ir import NUMPY, DType
from executorch_qnn.errors import LoweringError
from executorch_qnn.lowering.decompose import Opener, copied, functionalise, to_core
from executorch_qnn.lowering.fold import drop_empty_pieces
from executorch_qnn.ops.builder import to_array
from executorch_qnn.ops.registry import table
from executorch_qnn.target import Target

Function = Callable[..., Any]


class _Module(torch.nn.Module):
    def __init__(self, fn: Function) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


class _Simulator:
    """A compile worker, whose crashes do no harm, and a device in this process to run on."""

    def __init__(self, target: str) -> None:
        self.worker = CompileWorker(Target(target))
        self.backend = _native.Backend(
            _native.Library(self.worker.folder), self.worker.target.soc_model
        )

    def run(self, built: Built, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "context.bin"
            self.worker.compile([built.graph], str(path))
            context = _native.LoadedContext(self.backend, path.read_bytes())
        feeds: dict[str, Any] = {
            io.name: to_array(t, io.dtype)
            for io, t in zip(built.inputs, inputs, strict=True)
            if io.name
        }
        for state in built.states:
            if state.input:
                zeros = np.zeros(state.shape, NUMPY[state.dtype])
                feeds[state.input] = zeros if state.initial is None else state.initial
        outputs = context.execute(built.graph.name, feeds)
        return [_as_tensor(io, outputs[io.name]) for io in built.outputs]


def _as_tensor(io: IO, data: bytes) -> torch.Tensor:
    array = np.frombuffer(bytearray(data), NUMPY[io.dtype])
    return torch.from_numpy(array).reshape(io.shape).to(io.torch_dtype)


@functools.cache
def simulator(target: str) -> _Simulator:
    return _Simulator(target)


def lowered(fn: Function, *inputs: torch.Tensor) -> Built:
    """The graph of `fn`, a function or module, as the op table makes it.

    Raises:
        LoweringError: an op of it is refused.
    """
    module = fn if isinstance(fn, torch.nn.Module) else _Module(fn)
    with torch.no_grad():
        ep = torch.export.export(module.eval(), inputs, strict=False)
    ep, _ = functionalise(copied(ep))
    to_core(ep, Opener(op for op, row in table().items() if row.keep))
    drop_empty_pieces(ep)
    return build(ep, "graph")


def op_types(fn: Function, *inputs: torch.Tensor) -> list[str]:
    """The QNN ops that `fn` becomes."""
    return [node.type for node in lowered(fn, *inputs).graph.nodes]


def refusal(fn: Function, *inputs: torch.Tensor) -> str:
    """Why the op table refuses `fn`; empty if it does not."""
    try:
        lowered(fn, *inputs)
    except LoweringError as e:
        return str(e)
    return ""


def run(fn: Function, *inputs: torch.Tensor, target: str = "SM8650") -> list[torch.Tensor]:
    """The outputs of `fn`, computed by the real QNN library."""
    torch.set_num_threads(1)
    return simulator(target).run(lowered(fn, *inputs), inputs)


@dataclass(frozen=True)
class Case:
    """A function, its inputs, and how close it must come to PyTorch.

    Attributes:
        min_sqnr: signal to quantization noise in dB, over all finite values of an output.
        exact: every value must be equal; always so for integers and bools.
    """

    name: str
    fn: Function
    inputs: tuple[torch.Tensor, ...]
    min_sqnr: float = 45.0
    exact: bool = False


def check(fn: Function, *inputs: torch.Tensor, min_sqnr: float = 45.0, exact: bool = False) -> None:
    """Asserts that `fn` gives on the simulator what it gives in PyTorch."""
    check_all([Case("it", fn, inputs, min_sqnr, exact)])


def check_all(cases: Sequence[Case], target: str = "SM8650") -> None:
    """Asserts the same of many functions, in one graph."""
    torch.set_num_threads(1)
    cases = [Case(c.name, c.fn, _representable(c.inputs), c.min_sqnr, c.exact) for c in cases]
    with torch.no_grad():
        wants = [pytree.tree_leaves(c.fn(*c.inputs)) for c in cases]
    flat = [t for c in cases for t in c.inputs]

    def everything(*args: torch.Tensor) -> list[Any]:
        left = list(args)
        results = []
        for c in cases:
            mine, left = left[: len(c.inputs)], left[len(c.inputs) :]
            results += pytree.tree_leaves(c.fn(*mine))
        return results

    module = _Module(everything)
    module.parts = torch.nn.ModuleList(c.fn for c in cases if isinstance(c.fn, torch.nn.Module))
    got = run(module, *flat, target=target)
    assert len(got) == sum(map(len, wants))
    problems = []
    for c, want in zip(cases, wants, strict=True):
        mine, got = got[: len(want)], got[len(want) :]
        for i, (g, w) in enumerate(zip(mine, want, strict=True)):
            if problem := difference(g, w, c.min_sqnr, c.exact):
                problems.append(f"{c.name}[{i}]: {problem}")
    assert not problems, "\n".join(problems)


def check_samples(strategy: SearchStrategy[Case], count: int = 24, graphs: int = 2) -> None:
    """Asserts the same of `count` cases that hypothesis draws, in each of some graphs.

    The cases are the same each time.  The variable `ETQNN_GRAPHS` asks for more graphs.
    """
    drawn: list[list[Case]] = []

    @settings(
        max_examples=int(os.environ.get("ETQNN_GRAPHS", graphs)),
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.lists(strategy, min_size=count, max_size=count))
    def draw(cases: list[Case]) -> None:
        drawn.append(cases)

    draw()
    for cases in drawn:
        check_all(cases)


def _representable(inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """The inputs as they arrive in the graph, so that only the ops' own errors count."""
    return tuple(
        torch.from_numpy(to_array(t, DType.FLOAT16)).reshape(t.shape).to(t.dtype)
        if t.is_floating_point()
        else t.clone()  # torch.export gives what another input is a view of sizes of its own
        for t in inputs
    )


def difference(got: torch.Tensor, want: torch.Tensor, min_sqnr: float, exact: bool) -> str:
    """What is wrong with `got`, in words; empty if nothing is."""
    if got.shape != want.shape or got.dtype is not want.dtype:
        return f"{got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
    if exact or not want.is_floating_point():
        bad = ~((got == want) | ((got != got) & (want != want)))
        return f"{int(bad.sum())} values differ: {_some(got, want, bad)}" if bad.any() else ""
    g, w = got.double(), want.double()
    finite = torch.isfinite(w)
    odd = torch.where(finite, ~torch.isfinite(g), ~((g == w) | (g.isnan() & w.isnan())))
    if odd.any():
        return f"{int(odd.sum())} values are not finite or should not be: {_some(g, w, odd)}"
    db = sqnr(g[finite], w[finite])
    if db < min_sqnr:
        worst = torch.zeros(finite.shape, dtype=torch.bool)
        error = torch.where(finite, (g - w).abs(), torch.tensor(-1.0, dtype=torch.float64))
        worst.view(-1)[error.flatten().argmax()] = True
        return f"SQNR {db:.1f} dB, less than {min_sqnr}; worst {_some(g, w, worst)}"
    return ""


def sqnr(got: torch.Tensor, want: torch.Tensor) -> float:
    """Signal to noise ratio in dB."""
    noise = float(((got.double() - want.double()) ** 2).sum())
    signal = float((want.double() ** 2).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _some(got: torch.Tensor, want: torch.Tensor, which: torch.Tensor) -> str:
    places = which.reshape(-1).nonzero().flatten()[:6].tolist()
    pairs = [(got.reshape(-1)[i].item(), want.reshape(-1)[i].item()) for i in places]
    return ", ".join(f"got {a} want {b} at {i}" for i, (a, b) in zip(places, pairs, strict=True))
