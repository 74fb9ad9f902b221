# SPDX-License-Identifier: BSD-3-Clause
"""Running prepared models on data, without a trace in their state."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import LoweringError
from .cache import Cache
from .seq_mse import seq_mse


def calibrate(
    prepared: torch.nn.Module | Mapping[str, torch.nn.Module],
    batches: Iterable[Any] | Mapping[str, Iterable[Any]],
    *,
    progress: bool | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> int:
    """Shows prepared models their calibration data, and gives their buffers back their values.

    The batches are consecutive calls: state goes on from one to the next, as it does later.  What
    the observers have seen stays.  With `QuantRecipe(seq_mse=True)`, scales of weights are chosen
    after that.

    Args:
        prepared: what `prepare_pt2e` gave; `{method: module}` for several methods of one program.
        batches: inputs of each call, as a tuple; anything else stands for a tuple of one.
            `{method: batches}` for several methods.
        progress: tell on stderr how far it is, and how long it will take; if stderr is a terminal
            when None.
        cache: a folder for what is found.  The same models with the same data are not run again.

    Returns:
        The number of batches.

    Raises:
        LoweringError: a method has no data, or an input or a value on the way is NaN or infinite.
    """
    modules = prepared if isinstance(prepared, Mapping) else {"forward": prepared}
    data: Mapping[str, Any] = by_method(list(modules), batches)
    told = sys.stderr.isatty() if progress is None else progress
    again = any(getattr(o, "seq_mse", False) for m in modules.values() for o in m.modules())
    if again or cache is not None:
        data = {name: list(data[name]) for name in modules}
    kept = None if cache is None else Cache(cache, modules, data)
    if kept is not None and kept.restore():
        return sum(len(data[name]) for name in modules)
    count = sum(_calibrate(m, data[name], name, told) for name, m in modules.items())
    if again:
        if told:
            print("choosing the scales of weights", file=sys.stderr, flush=True)
        seq_mse(modules, data)
    if kept is not None:
        kept.write()
    return count


def by_method(methods: Sequence[str], batches: Any) -> Mapping[str, Iterable[Any]]:
    """Calibration data of each method.

    Raises:
        LoweringError: a method has none.
    """
    if batches is None:
        raise LoweringError(
            "quantization needs calibration=, an iterable of input tuples, or {method: iterable}"
        )
    if not isinstance(batches, Mapping):
        if len(methods) > 1:
            raise LoweringError(
                f"each of the methods {', '.join(methods)} needs calibration data of its own: "
                "{method: iterable of input tuples}"
            )
        return {methods[0]: batches}
    if missing := [m for m in methods if m not in batches]:
        raise LoweringError(f"there is no calibration data for method {', '.join(missing)}")
    return batches


def _calibrate(module: torch.nn.Module, batches: Iterable[Any], method: str, told: bool) -> int:
    try:
        total = len(batches)  # type: ignore[arg-type]
    except TypeError:
        total = None
    start, count = time.monotonic(), 0
    with buffers_kept(module), torch.no_grad():
        for batch in batches:
            inputs = batch if isinstance(batch, (tuple, list)) else (batch,)
            _check(inputs, count, method)
            module(*inputs)
            count += 1
            if told:
                _tell(method, count, total, time.monotonic() - start)
    if count == 0:
        raise LoweringError(
            f"the calibration data of method {method!r} is empty: give an iterable of input tuples"
        )
    return count


@contextmanager
def buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Gives a module's buffers their values back at the end; those of observers go on."""
    kept = {
        name: (buffer, buffer.detach().clone())
        for name, buffer in module.named_buffers()
        if not name.startswith("activation_post_process")
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in kept.values():
                buffer.copy_(value)


def _check(inputs: Sequence[Any], number: int, method: str) -> None:
    for i, t in enumerate(pytree.tree_leaves(tuple(inputs))):
        # Masks are made of minus infinity.
        if isinstance(t, torch.Tensor) and t.is_floating_point() and not (t < torch.inf).all():
            raise LoweringError(
                f"input {i} of calibration batch {number} of method {method!r} has NaN or infinity "
                "in it: no range can be found for it"
            )


def _tell(method: str, count: int, total: int | None, seconds: float) -> None:
    if total is None:
        text = f"{method}: {count} calibration batches, {seconds:.0f} s"
    else:
        left = seconds / count * (total - count)
        text = f"{method}: {count} of {total} calibration batches, {left:.0f} s left"
    print(text, file=sys.stderr, flush=True)
