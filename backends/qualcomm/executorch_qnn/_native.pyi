# SPDX-License-Identifier: BSD-3-Clause
"""The native half of executorch_qnn.  Every failure in it raises `Error`."""

from collections.abc import Sequence
from os import PathLike
from typing import Any, Literal, TypeAlias, TypedDict

import numpy.typing as npt
from typing_extensions import Buffer

_Data: TypeAlias = Buffer | npt.NDArray[Any]
"""C-contiguous memory."""

class Error(RuntimeError):
    """A failure, with QNN's own log text in the message.

    Attributes:
        kind: what kind of failure.
        code: QNN's error code (ExecuTorch's for kind "runtime"), or 0.
    """

    kind: Literal["library_not_found", "incompatible", "invalid", "qnn", "state", "io", "runtime"]
    code: int

# ---------------------------------------------------------------- libraries

_Version: TypeAlias = tuple[int, int, int]

def find_library(path: str | None = None, extra: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Every folder of QNN libraries, best first, as (how it was found, folder).

    `path` is a folder of libraries or the root of an SDK; when given, no other place is looked at.
    Else: `QNN_SDK_ROOT`, the folders in `extra` ("package"), `LD_LIBRARY_PATH` and the loader's own
    folders ("system").
    """

def locate_library(path: str | None = None, extra: Sequence[str] = ()) -> tuple[str, str]:
    """The first of `find_library`, or an `Error` that lists the places and says how to get one."""

class Library:
    """A loaded pair of QNN libraries; one per folder and process, never unloaded."""

    def __init__(self, folder: str) -> None: ...
    @property
    def folder(self) -> str: ...
    @property
    def build_id(self) -> str:
        """For example "v2.51.0.260929181845"."""
    @property
    def provider(self) -> str: ...
    @property
    def core_api(self) -> _Version: ...
    @property
    def backend_api(self) -> _Version: ...
    @property
    def system_api(self) -> _Version | None:
        """None without libQnnSystem.so: then context binaries cannot be inspected or loaded."""

def log_to(path: str | None) -> None:
    """Appends what QNN logs and prints to a file as it comes, so that it outlives a crash.

    None ends it.
    """

# ---------------------------------------------------------------- compiling

_Encoding: TypeAlias = (
    tuple[float, int]
    | tuple[Literal["axis"], int, Sequence[float], Sequence[int] | None]
    | tuple[Literal["bits"], int, float, int]
    | tuple[Literal["bits_axis"], int, int, Sequence[float], Sequence[int] | None]
    | tuple[Literal["blockwise"], int, int, Sequence[float], int, _Data]
)
"""real = (q + offset) * scale.

(scale, offset) | ("axis", axis, scales, offsets) | ("bits", bits, scale, offset)
| ("bits_axis", bits, axis, scales, offsets)
| ("blockwise", scale_bits, axis, channel_scales, blocks_per_channel, block_factors: uint8)
"""

_Tensor: TypeAlias = tuple[str, int, int, Sequence[int], _Encoding | None, _Data | None]
"""(name, kind, dtype, shape, encoding, data)"""

_Scalar: TypeAlias = tuple[str, Literal["scalar"], int, float | int | bool]
"""(name, "scalar", dtype, value)"""

_Node: TypeAlias = tuple[
    str,
    str,
    Sequence[_Tensor],
    Sequence[_Tensor],
    Sequence[_Scalar | tuple[str, Literal["tensor"], _Tensor]],
]
"""(name, type, inputs, outputs, params), with tensors in place."""

class _GraphOptions(TypedDict, total=False):
    precision: Literal["float16", "default"]
    """Of float computation; "float16" unless given."""
    vtcm_mb: int
    """0 for all that the SoC has; QNN's default is 4 on every SoC."""
    optimization_level: int
    """1 to 3."""
    hvx_threads: int
    share_io: bool
    """Let the compiler analyse whether outputs may overlay inputs."""

class _ContextOptions(TypedDict, total=False):
    share_weights: bool
    """Store equal static tensors of several graphs once.  The x86 simulator cannot load it."""

class _Ddr(TypedDict):
    read: int
    write: int
    spill: int
    fill: int

class _FinalizeReport(TypedDict):
    log: str
    """The compiler's stages."""
    ddr: _Ddr
    """Bytes of memory traffic per execution, deterministic."""
    seconds: float

class Backend:
    """QNN's HTP backend with a device for one SoC (57 is SM8650).

    Log lines down to `log_level` (1 error ... 5 debug) go to stderr.
    """

    def __init__(self, library: Library, soc_model: int, log_level: int = 1) -> None: ...
    @property
    def soc_model(self) -> int: ...
    def validate(self, node: _Node) -> str | None:
        """None if QNN accepts the op, else its reason.

        Tensor parameters need their data; static inputs may come without.
        """

class Context:
    """A context that graphs are compiled into."""

    def __init__(self, backend: Backend, options: _ContextOptions = ...) -> None: ...
    def graph(self, name: str, options: _GraphOptions = ...) -> Graph: ...
    def write_binary(self, path: str | PathLike[str]) -> int:
        """Writes the context binary without a copy in memory; returns its size in bytes."""
    def binary(self) -> bytes: ...

class Graph:
    """A graph under construction."""

    @property
    def name(self) -> str: ...
    def add_tensor(
        self,
        name: str,
        kind: int,
        dtype: int,
        shape: Sequence[int],
        encoding: _Encoding | None = None,
        data: _Data | None = None,
    ) -> int:
        """Returns the tensor's index.

        `data`, for a static tensor only, is C-contiguous and of exactly the tensor's size. QNN
        copies it from where it is; it may be a read-only mapping.
        """
    def add_node(
        self,
        name: str,
        type: str,
        inputs: Sequence[int],
        outputs: Sequence[int],
        params: Sequence[_Scalar | tuple[str, Literal["tensor"], int]] = (),
    ) -> None:
        """Validates the op and adds it.  Tensors are given by index, nodes in topological order."""
    def finalize(self) -> _FinalizeReport:
        """Compiles the graph."""

# ---------------------------------------------------------------- inspection

class _TensorInfo(TypedDict):
    name: str
    id: int
    dtype: int
    shape: tuple[int, ...]
    encoding: _Encoding | None

class _GraphInfo(TypedDict):
    name: str
    inputs: list[_TensorInfo]
    outputs: list[_TensorInfo]
    spill_fill_bytes: int
    vtcm_bytes: int
    optimization_level: int
    hvx_threads: int
    io_bytes: int
    op_bytes: int
    const_bytes: int
    ddr_bytes: int
    shared_weight_bytes: int
    safe_share_io: bool

class _ContextInfo(TypedDict):
    build_id: str
    core_api: _Version
    backend_api: _Version
    blob_version: _Version
    soc_model: int
    htp_arch: int
    graphs: list[_GraphInfo]

class LoadedContext:
    """A context binary, loaded: its graphs can be run without a program around them."""

    def __init__(self, backend: Backend, binary: _Data) -> None: ...
    def execute(self, graph: str, inputs: dict[str, _Data]) -> dict[str, bytes]:
        """Runs a graph once on inputs by name, in the types and shapes of the graph."""

def inspect_context(library: Library, source: str | PathLike[str] | _Data) -> _ContextInfo:
    """What a context binary, given as a path or in memory, says about itself."""

# ---------------------------------------------------------------- running programs

_ValueMeta: TypeAlias = tuple[
    Literal["tensor", "int", "float", "bool", "none", "other"], int, tuple[int, ...]
]

class _MethodMeta(TypedDict):
    """Inputs and outputs as (kind, scalar type, shape): the last two for tensors only.

    Scalar types are the numbers of c10::ScalarType; shapes are upper bounds where dynamic.
    """

    inputs: list[_ValueMeta]
    outputs: list[_ValueMeta]
    backends: list[str]

class Program:
    """A .pte file, mapped and checked; shared by its sessions."""

    def __init__(
        self, path: str | PathLike[str], qnn_folder: str = "", *, mlock: bool = False
    ) -> None: ...
    @property
    def path(self) -> str: ...
    @property
    def methods(self) -> list[str]: ...
    def method_meta(self, name: str) -> _MethodMeta: ...
    def named_data(self, key: str) -> bytes: ...
    @property
    def sha256(self) -> str:
        """The program's name, in hexadecimal digits: of the file without its seal."""

class _StateInfo(TypedDict):
    fqn: str
    shape: tuple[int, ...]
    scalar_type: int
    stored_dtype: int
    nbytes: int
    binding: str
    address: int
    input_address: int
    output_address: int
    encoding: tuple[float, int] | None

class Session:
    """All methods of a program, loaded, and their mutable buffers."""

    def __init__(self, program: Program) -> None: ...
    def run(
        self,
        method: str,
        inputs: Sequence[tuple[int, int, int, Sequence[int]] | int | float | bool | None],
        outputs: Sequence[tuple[int, int] | None],
    ) -> list[Any]:
        """Runs a method once, with the GIL released.

        `inputs` are tensors as (address, bytes, scalar type, shape), dense, or scalars; `outputs`
        are (address, bytes) of the memory for each output tensor, None for other outputs.  Returns
        (scalar type, shape) for each tensor, else the value.  The memory must stay until then.
        """

    def state(self) -> list[_StateInfo]: ...
    def read_state(self, fqn: str) -> bytes:
        """Dense values of the buffer's scalar type."""

    def write_state(self, fqn: str, values: Buffer) -> None: ...
    def reset_state(self) -> None: ...
    def save_state(self, path: str | PathLike[str]) -> None: ...
    def load_state(self, path: str | PathLike[str]) -> None: ...
    def fork(self) -> Session: ...
    @property
    def state_bytes_copied(self) -> int:
        """Bytes of delegate-owned state that were copied so far; an execution adds none."""

class _SavedBuffer(TypedDict):
    fqn: str
    shape: tuple[int, ...]
    scalar_type: int
    stored_dtype: int
    nbytes: int
    encoding: tuple[float, int] | None

class _StateFileInfo(TypedDict):
    version: tuple[int, int]
    program_sha256: str
    nbytes: int
    state: list[_SavedBuffer]

def inspect_state(path: str | PathLike[str]) -> _StateFileInfo:
    """What a file that `Session.save_state` wrote says about itself."""

def configure_delegate(qnn_folder: str = "", package_folder: str = "") -> None:
    """Where delegates look for QNN when their load does not say.

    `qnn_folder` is the only place if given; `package_folder` comes after `QNN_SDK_ROOT`.
    """

def registration_error() -> int:
    """ExecuTorch's error number of the backend's registration; 0 is success."""
