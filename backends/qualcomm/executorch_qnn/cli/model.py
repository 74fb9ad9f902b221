# SPDX-License-Identifier: BSD-3-Clause
"""What commands read of the user's: a model, and the inputs of calls."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import QnnError
from .output import UsageError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

CALLS = "[METHOD=]FILE.npz"
"""How an argument for `load_calls` is written."""


def function_of(reference: str) -> Callable[[], Any]:
    """What `module:function` or `file.py:function` names."""
    module_name, _, function_name = reference.rpartition(":")
    if not module_name or not function_name:
        raise UsageError(f"{reference!r} is not of the form MODULE:FUNCTION")
    if module_name.endswith(".py"):
        path = Path(module_name)
        spec = importlib.util.spec_from_file_location(path.stem, path)
        if not path.is_file() or spec is None or spec.loader is None:
            raise UsageError(f"no such file: {path}")
        sys.path.insert(0, str(path.resolve().parent))
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, str(Path.cwd()))
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there; what it imports is not
            raise UsageError(f"no module named {error.name!r}") from None
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UsageError(f"{module_name} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def model_and_inputs(returned: Any) -> tuple[Any, Any]:
    """The first two arguments of `lower` for what the user's function returned."""
    if isinstance(returned, dict):
        return returned, None
    if isinstance(returned, tuple) and len(returned) == 2:
        return returned
    raise UsageError(
        "the function must return (model, example_inputs) or {method: (model, example_inputs)}, "
        f"not {type(returned).__name__}"
    )


def load_arrays(path: str) -> list[npt.NDArray[np.generic]]:
    """The arrays of an `.npz` file in their order.

    Raises:
        QnnError: it is none.
    """
    import numpy as np

    try:
        archive = np.load(path, allow_pickle=False)
    except ValueError as error:
        raise QnnError(f"{path} is no .npz file: {error}") from None
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise QnnError(f"{path} holds a single array; write it with numpy.savez")
    with archive:
        return [archive[name] for name in archive.files]


def load_calls(files: Sequence[str], model: Any, inputs: Any) -> list[tuple[str, tuple[Any, ...]]]:
    """Method and inputs of consecutive calls, each given as `FILE.npz` or `METHOD=FILE.npz`.

    Args:
        model, inputs: what `model_and_inputs` gave: inputs nest as the examples do.

    Raises:
        UsageError: a call has no method, or one that the model has not.
        QnnError: a file is no `.npz`, or has not as many arrays as the method has inputs.
    """
    import torch
    from torch.utils import _pytree as pytree

    examples = {"forward": inputs}
    if isinstance(model, dict):
        examples = {name: given for name, (_, given) in model.items()}
    calls = []
    for file in files:
        method, named, path = file.partition("=")
        if not named or Path(file).exists():
            method, path = next(iter(examples)) if len(examples) == 1 else "forward", file
        if method not in examples:
            raise UsageError(
                f"{file}: there is no method {method!r}; the model has {', '.join(examples)}. "
                "Write METHOD=FILE.npz"
            )
        arrays, spec = load_arrays(path), pytree.tree_structure(tuple(examples[method]))
        if len(arrays) != spec.num_leaves:
            raise QnnError(
                f"{path} has {len(arrays)} arrays, and {method} has {spec.num_leaves} inputs"
            )
        calls.append((method, pytree.tree_unflatten([torch.from_numpy(a) for a in arrays], spec)))
    return calls


def load_calibration(
    files: Sequence[str] | None, model: Any, inputs: Any
) -> dict[str, list[tuple[Any, ...]]] | None:
    """The calls as `lower` takes them for calibration; None for None."""
    if files is None:
        return None
    batches: dict[str, list[tuple[Any, ...]]] = {}
    for method, given in load_calls(files, model, inputs):
        batches.setdefault(method, []).append(given)
    return batches
