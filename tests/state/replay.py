# SPDX-License-Identifier: BSD-3-Clause
"""Runs the source of a stateful model on the simulator and in eager, call by call.

python -m tests.state.replay FILE.py [--state-update scatter] [--two-regions]
"""

from __future__ import annotations

import argparse
import copy
import random
import tempfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import executorch_qnn as qnn

CALLS = 20


class WrongValue(AssertionError):
    """The program does not do what eager does."""


class Invalid(Exception):
    """Not even eager runs the model."""


class Method(nn.Module):
    """One method of a core."""

    def __init__(self, core: nn.Module, name: str) -> None:
        super().__init__()
        self.core = core
        self.name = name

    def forward(self, *inputs: Tensor) -> Any:
        return getattr(self.core, self.name)(*inputs)


class _Fp16(TorchDispatchMode):
    """Rounds the float results of every op to fp16: how much of a difference is rounding."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in pytree.tree_leaves(result):
            if isinstance(value, Tensor) and value.dtype is torch.float32 and _dense(value):
                value.copy_(value.half().float())
        return result


def _dense(t: Tensor) -> bool:
    return all(n == 1 or step for n, step in zip(t.shape, t.stride(), strict=True))


class _Eager:
    """The model in PyTorch, in fp32 and beside it with every op rounded to fp16."""

    def __init__(self, core: nn.Module) -> None:
        self.core = core
        self.rounded = copy.deepcopy(core)
        self.noise = 0.0

    def copy(self) -> _Eager:
        return copy.deepcopy(self)

    def call(self, method: str, inputs: Sequence[Tensor]) -> tuple[list[Tensor], float]:
        """The method's outputs, and the largest deviation that rounding has made so far."""
        with torch.no_grad():
            want = _outputs(getattr(self.core, method)(*inputs))
            with _Fp16():
                rounded = _outputs(getattr(self.rounded, method)(*inputs))
        ours, theirs = dict(self.core.named_buffers()), dict(self.rounded.named_buffers())
        pairs = [*zip(want, rounded, strict=True), *((ours[n], theirs[n]) for n in ours)]
        for w, r in pairs:
            if w.is_floating_point() and w.numel():
                self.noise = max(self.noise, float((w - r).abs().max()))
        return want, self.noise


def _outputs(returned: Any) -> list[Tensor]:
    return [t.clone() for t in pytree.tree_leaves(returned)]


def make_input(spec: tuple[Any, ...], g: torch.Generator) -> Tensor:
    """A value for an entry of a model's `INPUTS`."""
    kind, *rest = spec
    if kind == "index":  # k different numbers below n, some of them counted from the end
        n, k, wraps = rest
        index = torch.randperm(n, generator=g)[:k]
        negative = torch.randint(0, 2, (k,), generator=g) if wraps else 0
        return index - n * negative
    if kind == "places":  # numbers below n, different along dimension d
        shape, d, n = rest
        wide = [n if i == d else s for i, s in enumerate(shape)]
        return torch.rand(wide, generator=g).argsort(d).narrow(d, 0, shape[d]).contiguous()
    (shape,) = rest
    if kind == "float32":
        return torch.randn(shape, generator=g).half().float()
    if kind == "bool":
        return torch.rand(shape, generator=g) > 0.5
    return torch.randint(-9, 10, shape, generator=g, dtype=getattr(torch, kind))


def replay(
    source: str, folder: Path, *, calls: int = CALLS, seed: int | None = None, **options: Any
) -> qnn.Program:
    """Lowers the model in `source` and compares `calls` calls in random order with eager.

    Between the calls the state is reset, saved, loaded and forked now and then.

    Args:
        folder: for files.
        seed: of inputs and order; follows from the source if `None`.
        options: for `lower`.

    Raises:
        Invalid: the model does not run in eager.
        WrongValue: an output or a buffer is not what eager has.
        QnnError: the model cannot be lowered or run.
    """
    torch.set_num_threads(1)
    text: dict[str, Any] = {"__name__": "random_model"}
    exec(compile(source, "<model>", "exec"), text)
    specs: dict[str, Sequence[Any]] = text["INPUTS"]
    seed = zlib.crc32(source.encode()) if seed is None else seed
    g = torch.Generator().manual_seed(seed)
    core = text["Core"]().eval()
    start = copy.deepcopy(core)
    wrapped = {name: Method(core, name).eval() for name in specs}
    modules = {
        name: core if name == "forward" and not text["WRAPPED"] else wrapped[name] for name in specs
    }
    examples = {name: tuple(make_input(s, g) for s in of) for name, of in specs.items()}
    _try_in_eager(start, specs)
    program = qnn.lower(
        {name: (modules[name], examples[name]) for name in specs},
        target="SM8650",
        **text.get("LOWERING", {}),
        **options,
    )
    path = folder / "model.pte"
    program.save(path)
    session = qnn.load(path, qnn_libraries=options.get("qnn_libraries"))
    eager = _Eager(start)
    initial = eager.copy()
    saved: _Eager | None = None
    order = random.Random(seed)
    log: list[str] = []
    for i in range(calls):
        event = order.choice(("", "", "", "", "reset", "save", "load", "fork", "twin"))
        if i and event == "reset":
            session.reset_state()
            eager = initial.copy()
        elif event == "save":
            session.save_state(folder / "state")
            saved = eager.copy()
        elif event == "load" and saved is not None:
            session.load_state(folder / "state")
            eager = saved.copy()
        elif event == "fork":  # go on with the fork
            session = session.fork()
        elif event == "twin":  # a call of a fork must not be seen
            method = order.choice(list(specs))
            inputs = [make_input(s, g) for s in specs[method]]
            log.append(f"{method} of a fork")
            _compare(session.fork(), eager.copy(), method, inputs, log)
        if event not in ("", "twin"):
            log.append(event)
        method = order.choice(list(specs))
        log.append(method)
        _compare(session, eager, method, [make_input(s, g) for s in specs[method]], log)
    return program


def _try_in_eager(core: nn.Module, specs: dict[str, Sequence[Any]]) -> None:
    core, g = copy.deepcopy(core), torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for name, of in specs.items():
                getattr(core, name)(*(make_input(s, g) for s in of))
    except RuntimeError as e:  # for example a copy between overlapping views
        raise Invalid(str(e)) from None


def _compare(
    session: qnn.Session, eager: _Eager, method: str, inputs: list[Tensor], log: list[str]
) -> None:
    before = {n: t.clone() for n, t in eager.core.named_buffers(remove_duplicate=False)}
    got = _outputs(session.run(method, *inputs))
    want, noise = eager.call(method, inputs)
    where = f"call {len(log)} ({', '.join(log)})"
    if len(got) != len(want):
        raise WrongValue(f"{where}: {len(got)} outputs instead of {len(want)}")
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        _check(g, w, noise, f"{where}: output {i}")
    state = session.state()
    for name, value in eager.core.named_buffers(remove_duplicate=False):
        slot = next((n for n in (name, f"core.{name}") if n in state), None)
        if slot is None:
            if not torch.equal(value, before[name]):
                raise WrongValue(f"{where}: buffer {name} has no slot; there are {list(state)}")
            continue
        _check(session.read_state(slot), value, noise, f"{where}: buffer {name}")


def _check(got: Tensor, want: Tensor, noise: float, where: str) -> None:
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        raise WrongValue(
            f"{where}: {got.dtype}{list(got.shape)} instead of {want.dtype}{list(want.shape)}"
        )
    if want.is_floating_point():
        off = (got - want).abs() - (6e-3 + 4e-3 * want.abs() + 8 * noise)
        wrong = not bool((off <= 0).all())
    else:
        wrong = not torch.equal(got, want)
    if wrong:
        raise WrongValue(f"{where}, rounding makes {noise:.2g}:\n{got}\ninstead of\n{want}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Replays the model in a file.")
    parser.add_argument("file", type=Path)
    parser.add_argument("--qnn-libraries")
    parser.add_argument("--calls", type=int, default=CALLS)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = replay(
            args.file.read_text(),
            Path(folder),
            calls=args.calls,
            qnn_libraries=args.qnn_libraries,
        )
    print(program.report.to_text())
    print("as in eager")


if __name__ == "__main__":
    main()
