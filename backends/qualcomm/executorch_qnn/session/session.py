# SPDX-License-Identifier: BSD-3-Clause
"""Sessions: a loaded program with mutable buffers of its own."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.utils import _pytree as pytree

from .. import _native
from ..errors import IncompatiblePayload, StateError
from ._errors import loading, running
from ._values import DTYPES, empty, to_native, trimmed

META_KEY = "executorch_qnn.meta"

_STORED = {
    0x008: "int8",
    0x016: "int16",
    0x032: "int32",
    0x064: "int64",
    0x108: "uint8",
    0x116: "uint16",
    0x132: "uint32",
    0x216: "float16",
    0x232: "float32",
    0x264: "float64",
    0x308: "sfixed8",
    0x316: "sfixed16",
    0x332: "sfixed32",
    0x408: "ufixed8",
    0x416: "ufixed16",
    0x432: "ufixed32",
    0x508: "bool8",
}


@dataclass(frozen=True)
class StateInfo:
    """One mutable buffer of a session.

    Attributes:
        shape: as the model declares it.
        dtype: likewise; what `Session.read_state` returns and `Session.write_state` takes.
        nbytes: bytes in memory, as stored.
        address: where it is; moves with each call if `binding` is "double_buffer".
        encoding: (scale, offset) with real = (q + offset) * scale if it is stored quantized.
        stored: how an element is stored, for example "float16".
        binding: "in_place" (a graph reads and writes it at one address), "double_buffer",
            "read_only", "write_only", or "host" (ExecuTorch keeps it for ops on the CPU).
        input_address: what QNN was given for reading it, 0 if no graph does.
        output_address: for writing it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    address: int
    encoding: tuple[float, int] | None
    stored: str
    binding: str
    input_address: int
    output_address: int


@dataclass(frozen=True)
class _Method:
    """What a call needs to know of a method.

    Attributes:
        shapes: of its inputs; `None` for those that are no tensors.
        variants: the methods that are the same for inputs of other sizes.
    """

    shapes: tuple[tuple[int, ...] | None, ...]
    outputs: tuple[tuple[str, int, tuple[int, ...]], ...]
    in_spec: pytree.TreeSpec | None
    out_spec: pytree.TreeSpec | None
    variants: tuple[str, ...]


class Session:
    """A program, loaded, and its mutable buffers, which start from their initial values.

    Calls on one session wait for each other.  Sessions of one file share its weights and never
    state; they may be used from different threads at the same time.  Made by `load`.
    """

    def __init__(self, native: _native.Session, program: _native.Program) -> None:
        self._native = native
        self._program = program
        about = _about(program)
        self._methods: dict[str, _Method] = {}
        for name in program.methods:
            meta = program.method_meta(name)
            in_spec, out_spec, variants = about.get(name, (None, None, ()))
            shapes = tuple(s if kind == "tensor" else None for kind, _, s in meta["inputs"])
            outputs = tuple(meta["outputs"])
            if out_spec is not None and out_spec.num_leaves != len(outputs):
                out_spec = None
            self._methods[name] = _Method(shapes, outputs, in_spec, out_spec, variants)

    def __call__(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the method `forward`; see `run`."""
        return self.run("forward", *inputs, **kwargs)

    @property
    def methods(self) -> list[str]:
        """The names of the program's methods."""
        return list(self._methods)

    def run(self, method: str, *inputs: Any, **kwargs: Any) -> Any:
        """Runs a method once.

        Args:
            method: its name.
            inputs: what the model was exported with: tensors, numbers, and lists, tuples and dicts
                of them.  Tensors are dense, on the CPU, and of the very dtype and shape; nothing is
                converted, moved or copied on the way.  Of a method that was lowered with `Sizes`,
                the one for the inputs' sizes runs.
            kwargs: likewise, for what was exported by keyword.

        Returns:
            What the model returns, in fresh tensors.  If the program does not say how the outputs
            are nested: the one output, or a tuple.

        Raises:
            StateError: there is no such method, or an input does not fit; names the input, what is
                expected and what came.  The state is untouched.
            DeviceError: QNN failed.
        """
        if method not in self._methods:
            raise StateError(f"no method {method!r}; the program has {', '.join(self._methods)}")
        about = self._methods[method]
        leaves = _leaves(inputs, kwargs, about.in_spec)
        if about.variants:
            method = self._of_these_sizes(method, leaves)
            about = self._methods[method]
        lent = [to_native(leaf, f"input {i} of {method}") for i, leaf in enumerate(leaves)]
        tensors = [
            empty(scalar_type, shape) if kind == "tensor" else None
            for kind, scalar_type, shape in about.outputs
        ]
        room = [None if t is None else (t.data_ptr(), t.nbytes) for t in tensors]
        with running():
            results = self._native.run(method, lent, room)
        outputs = [
            result if tensor is None else trimmed(tensor, result[1])
            for tensor, result in zip(tensors, results, strict=True)
        ]
        if about.out_spec is not None:
            return pytree.tree_unflatten(outputs, about.out_spec)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def state(self) -> dict[str, StateInfo]:
        """Every mutable buffer by its fully qualified name."""
        return {
            info["fqn"]: StateInfo(
                shape=info["shape"],
                dtype=DTYPES[info["scalar_type"]],
                nbytes=info["nbytes"],
                address=info["address"],
                encoding=info["encoding"],
                stored=_STORED.get(info["stored_dtype"], "unknown"),
                binding=info["binding"],
                input_address=info["input_address"],
                output_address=info["output_address"],
            )
            for info in self._native.state()
        }

    def read_state(self, fqn: str) -> torch.Tensor:
        """A copy of a buffer's present value, in the shape and dtype that the model declares.

        Raises:
            StateError: there is no such buffer.
        """
        info = self._info(fqn)
        with running():
            values = bytearray(self._native.read_state(fqn))
        return torch.frombuffer(values, dtype=info.dtype).reshape(info.shape)

    def write_state(self, fqn: str, values: torch.Tensor) -> None:
        """Sets a buffer.  Values that the stored type cannot hold exactly are rounded to it.

        Args:
            values: of the buffer's shape and dtype, on the CPU.

        Raises:
            StateError: there is no such buffer, or `values` does not fit it.
        """
        info = self._info(fqn)
        if tuple(values.shape) != info.shape or values.dtype != info.dtype:
            raise StateError(
                f"buffer {fqn} is {info.dtype}{list(info.shape)}, "
                f"got {values.dtype}{list(values.shape)}"
            )
        if values.device.type != "cpu":
            raise StateError(f"the values for {fqn} are on {values.device}: move them to the CPU")
        dense = values.detach().contiguous().numpy()
        with running():
            self._native.write_state(fqn, dense.data)

    def reset_state(self) -> None:
        """Gives every buffer its initial value again."""
        with running():
            self._native.reset_state()

    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Writes all buffers to a file, which appears complete or not at all."""
        with running():
            self._native.save_state(os.fspath(path))

    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Reads what `save_state` of the same program wrote.

        Raises:
            StateError: the file is damaged or of another program; the state is untouched.
        """
        with running():
            self._native.load_state(os.fspath(path))

    def fork(self) -> Session:
        """A second session that starts from a copy of this one's state and shares the rest."""
        with running():
            return Session(self._native.fork(), self._program)

    def _of_these_sizes(self, method: str, leaves: list[Any]) -> str:
        """The method itself or the variant of it that takes inputs of the sizes of `leaves`."""
        shapes = tuple(
            tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else None for leaf in leaves
        )
        names = [method, *self._methods[method].variants]
        for name in names:
            if self._methods[name].shapes == shapes:
                return name
        known = "; ".join(_listed(self._methods[name].shapes) for name in names)
        raise StateError(f"{method} was lowered for inputs of {known}, not of {_listed(shapes)}")

    def _info(self, fqn: str) -> StateInfo:
        state = self.state()
        if fqn not in state:
            known = ", ".join(state) or "none"
            raise StateError(f"no mutable buffer {fqn!r}; the program has {known}")
        return state[fqn]


def load(
    path: str | os.PathLike[str],
    qnn_libraries: str | os.PathLike[str] | None = None,
    *,
    mlock: bool = False,
) -> Session:
    """Loads a `.pte` file.

    Args:
        path: the file; it is mapped, so it must stay as it is while the session lives.
        qnn_libraries: folder of the QNN libraries or root of an SDK; None searches `QNN_SDK_ROOT`,
            the installed onnxruntime-qnn package and the system's library path.
        mlock: keep the file in memory.

    Raises:
        IncompatiblePayload: the file is damaged, or made for newer libraries or another target.
        LibraryNotFound: the program needs QNN, and there is none.
        QnnError: the file cannot be read, or the runtime lacks something the program needs.
    """
    from .._delegate import ensure_registered

    ensure_registered()
    with loading():
        folder = "" if qnn_libraries is None else os.fspath(qnn_libraries)
        program = _native.Program(os.fspath(path), folder, mlock=mlock)
        return Session(_native.Session(program), program)


_About: TypeAlias = tuple[pytree.TreeSpec | None, pytree.TreeSpec | None, tuple[str, ...]]


def _about(program: _native.Program) -> dict[str, _About]:
    """How inputs and outputs of each method nest, and its variants, as far as the program says."""
    try:
        meta = program.named_data(META_KEY)
    except _native.Error:
        return {}

    def spec(about: dict[str, str], key: str) -> pytree.TreeSpec | None:
        text = about.get(key)
        return None if text is None else pytree.treespec_loads(text)

    def variants(about: dict[str, Any]) -> tuple[str, ...]:
        names = tuple(about.get("variants", ()))
        if unknown := set(names) - set(program.methods):
            raise ValueError(f"there is no method {unknown}")
        return names

    try:
        methods = json.loads(meta).get("methods", {})
        return {
            name: (spec(m, "in_spec"), spec(m, "out_spec"), variants(m))
            for name, m in methods.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise IncompatiblePayload(f"{program.path}: {META_KEY} is damaged: {error}") from None


def _listed(shapes: tuple[tuple[int, ...] | None, ...]) -> str:
    return ", ".join("a number" if s is None else str(list(s)) for s in shapes)


def _leaves(
    inputs: tuple[Any, ...], kwargs: dict[str, Any], in_spec: pytree.TreeSpec | None
) -> list[Any]:
    """The inputs in the order in which the method takes them."""
    if kwargs and in_spec is not None:
        from torch.export._tree_utils import reorder_kwargs

        try:
            kwargs = reorder_kwargs(kwargs, in_spec)
        except ValueError as error:
            raise StateError(f"the keyword arguments do not fit: {error}") from None
    return list(pytree.tree_leaves((inputs, kwargs)))
