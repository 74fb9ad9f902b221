# SPDX-License-Identifier: BSD-3-Clause
"""What observers have found, kept in files, for models that are calibrated again unchanged.

A file is named after a hash of all that calibration depends on: the prepared graphs with their
observers, the weights and buffers, the data, and the versions of torch and of this package.  It
has the observers' buffers, as `torch.save` writes them, behind their SHA-256.
"""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..files import replaced

_FORMAT = 1
_DIGEST_BYTES = 32
_PLAIN = (bool, int, float, str, tuple, torch.dtype, torch.qscheme, type(None))


class Cache:
    """The file of one calibration.

    Args:
        folder: made if it is not there.
        modules: method to its prepared module, before calibration.
        data: method to its calibration data.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        modules: Mapping[str, torch.nn.Module],
        data: Mapping[str, Any],
    ) -> None:
        self.modules = modules
        self.file = Path(folder) / f"{_key(modules, data)}.calibration"

    def restore(self) -> bool:
        """Has the observers found what is in the file; False if there is no sound one."""
        try:
            content = self.file.read_bytes()
        except FileNotFoundError:
            return False
        payload = content[_DIGEST_BYTES:]
        if hashlib.sha256(payload).digest() != content[:_DIGEST_BYTES]:
            warnings.warn(
                f"{self.file} is damaged: the model is calibrated, and the file written again",
                stacklevel=2,
            )
            return False
        found = torch.load(io.BytesIO(payload), weights_only=True)
        for name, observer in self._observers():
            for buffer, value in found[name].items():
                setattr(observer, buffer, value)
        return True

    def write(self) -> None:
        """Keeps what the observers have found; another file is only replaced by a complete one."""
        found = {name: dict(o.named_buffers(recurse=False)) for name, o in self._observers()}
        payload = io.BytesIO()
        torch.save(found, payload)
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with replaced(self.file, 0o600) as f:
            f.write(hashlib.sha256(payload.getbuffer()).digest())
            f.write(payload.getbuffer())

    def _observers(self) -> Iterator[tuple[str, torch.nn.Module]]:
        for method, module in self.modules.items():
            for name, observer in module.named_modules():
                if hasattr(observer, "calculate_qparams"):
                    yield f"{method}/{name}", observer


def _key(modules: Mapping[str, torch.nn.Module], data: Mapping[str, Any]) -> str:
    digest = hashlib.sha256()

    def add(*values: Any) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                add(value.dtype, tuple(value.shape))
                plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                digest.update(plain.numpy().data)
            else:
                digest.update(repr(value).encode() + b"\0")

    add(_FORMAT, torch.__version__, version("torchao"), version("executorch-qnn"))
    for method, module in modules.items():
        add(method)
        for name, part in module.named_modules():
            add(name, type(part).__name__)
            if isinstance(part, torch.fx.GraphModule):
                add(str(part.graph))
            elif hasattr(part, "calculate_qparams"):
                add(sorted((k, v) for k, v in vars(part).items() if isinstance(v, _PLAIN)))
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            add(name, tensor)
        for batch in data[method]:
            add(*pytree.tree_leaves(batch))
    return digest.hexdigest()
