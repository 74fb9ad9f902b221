# SPDX-License-Identifier: BSD-3-Clause
"""Running a prepared model on data, without a trace in its state."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..errors import LoweringError
from .functional import mutated_buffers


def calibrate(
    prepared: torch.nn.Module,
    batches: Iterable[Any],
    *,
    progress: bool = False,
    method: str = "forward",
) -> int:
    """Shows a prepared model its calibration data, and gives its buffers back their values.

    The batches are consecutive calls: state goes on from one to the next, as it does later.  What
    the observers have seen stays.

    Args:
        prepared: what `prepare_pt2e` gave.
        batches: inputs of each call, as a tuple; a single tensor stands for a tuple of one.
        progress: tell on stderr how far it is, and how long it will take.
        method: name for messages.

    Returns:
        The number of batches.

    Raises:
        LoweringError: there are no batches, or one has NaN or infinity in it.
    """
    kept = {name: b.detach().clone() for name, b in prepared.named_buffers()}
    mutable = [name for name in kept if not _is_observers(prepared, name)]
    total = len(batches) if isinstance(batches, Sequence) else None
    start, count = time.monotonic(), 0
    constant = _observers_of_constants(prepared)
    try:
        for batch in batches:
            inputs = batch if isinstance(batch, (tuple, list)) else (batch,)
            _check(inputs, count, method)
            with torch.no_grad():
                prepared(*inputs)
            if count == 0:  # what does not change need not be looked at again
                for observer in constant:
                    observer.forward = _same
            count += 1
            if progress:
                _tell(method, count, total, time.monotonic() - start)
    finally:
        for observer in constant:
            observer.__dict__.pop("forward", None)
        buffers = dict(prepared.named_buffers())
        for name in mutable:
            buffers[name].copy_(kept[name])
    if count == 0:
        raise LoweringError(
            f"the calibration data of method {method!r} is empty: give an iterable of input tuples"
        )
    return count


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _observers_of_constants(prepared: torch.nn.Module) -> list[torch.nn.Module]:
    """The observers of weights, which torchao has look at all of them in every call."""
    if not isinstance(prepared, torch.fx.GraphModule):
        return []
    buffers = mutated_buffers(prepared)
    return [
        prepared.get_submodule(str(node.target))
        for node in prepared.graph.find_nodes(op="call_module")
        if all(n.op == "get_attr" and str(n.target) not in buffers for n in node.all_input_nodes)
        and node.all_input_nodes
    ]


def _is_observers(module: torch.nn.Module, name: str) -> bool:
    return "activation_post_process" in name


def _check(inputs: Sequence[Any], number: int, method: str) -> None:
    for i, t in enumerate(pytree.tree_leaves(tuple(inputs))):
        if isinstance(t, torch.Tensor) and t.is_floating_point() and not t.isfinite().all():
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
