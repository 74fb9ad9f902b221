# SPDX-License-Identifier: BSD-3-Clause
"""Buffers that a model replaces (`self.h = new`) instead of writing to them, as exports need them.

torch.export follows such an assignment only in the root module, and not what is written to the new
tensor afterwards; in a submodule the update is lost without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ..errors import LoweringError


@contextmanager
def assignments_written_back(module: nn.Module) -> Iterator[None]:
    """While this is active, a call of `module` ends with copies into the buffers it replaced.

    All new values are read before any of them is written, and what the call returns stays as it
    was: `old = self.h; self.h = new; return old` gives the old value.
    """
    forward = module.forward
    had_own = "forward" in module.__dict__

    @functools.wraps(forward)
    def with_copies(*args: Any, **kwargs: Any) -> Any:
        before = {
            (owner, name): (path, tensor)
            for path, owner in module.named_modules()
            for name, tensor in owner._buffers.items()
            if tensor is not None
        }
        with _plain_assignment():
            returned = forward(*args, **kwargs)
        olds, news = [], []
        for (owner, name), (path, old) in before.items():
            new = owner._buffers[name]
            if new is old:
                continue
            owner._buffers[name] = old
            _check(f"{path}.{name}".lstrip("."), old, new)
            assert new is not None
            olds.append(old)
            news.append(new.clone())
        replaced = {StorageWeakRef(old.untyped_storage()) for old in olds}

        def kept(value: Any) -> Any:
            shares = isinstance(value, Tensor) and (
                StorageWeakRef(value.untyped_storage()) in replaced
            )
            return value.clone() if shares else value

        returned = pytree.tree_map(kept, returned)
        for old, new in zip(olds, news, strict=True):
            old.copy_(new)
        return returned

    module.forward = with_copies
    try:
        yield
    finally:
        if had_own:
            module.forward = forward
        else:
            del module.forward


@contextmanager
def _plain_assignment() -> Iterator[None]:
    """Tensors are assigned to buffers past torch.export's own hook."""
    original = nn.Module.__setattr__

    def assign(self: nn.Module, name: str, value: Any) -> None:
        buffers = self.__dict__.get("_buffers", {})
        if isinstance(value, Tensor) and isinstance(buffers.get(name), Tensor):
            buffers[name] = value
        else:
            original(self, name, value)

    nn.Module.__setattr__ = assign  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.__setattr__ = original  # type: ignore[method-assign]


def _check(fqn: str, old: Tensor, new: Tensor | None) -> None:
    if new is None or new.shape != old.shape or new.dtype != old.dtype:
        became = "None" if new is None else f"{new.dtype}{list(new.shape)}"
        raise LoweringError(
            f"the model replaces its buffer {fqn}, {old.dtype}{list(old.shape)}, by {became}: "
            "state keeps its shape and type"
        )


__all__ = ["assignments_written_back"]
