# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn inspect FILE`: what a program, or a saved state, consists of."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import IncompatiblePayload, QnnError, StateError
from ..seal import program_sha256
from .output import Output, add_common_options, human_bytes, table

if TYPE_CHECKING:
    from ..compile.payload import IOEntry, Payload, StateEntry
    from .output import Commands
    from .pte import PteFile

_BACKEND = "QnnDelegate"
_STATE_MAGIC = b"ETQNNSTA"


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "inspect",
        help="tell what a .pte or a saved state consists of",
        description="Lists methods, delegates, state buffers and QNN contexts of a program, or the "
        "buffers in a file that --state-out wrote and the program that they belong to. "
        "Reading the contexts needs the QNN libraries; --no-contexts does without.",
    )
    parser.add_argument("file", metavar="FILE")
    parser.add_argument(
        "--no-contexts", action="store_true", help="do not look into the QNN context binaries"
    )
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


# ExecuTorch's element types: their names in a program, their numbers, and torch's names.
_SCALAR_TYPES = {
    "BYTE": (0, "uint8"),
    "CHAR": (1, "int8"),
    "SHORT": (2, "int16"),
    "INT": (3, "int32"),
    "LONG": (4, "int64"),
    "HALF": (5, "float16"),
    "FLOAT": (6, "float32"),
    "DOUBLE": (7, "float64"),
    "COMPLEX32": (8, "complex32"),
    "COMPLEX64": (9, "complex64"),
    "COMPLEX128": (10, "complex128"),
    "BOOL": (11, "bool"),
    "UINT16": (27, "uint16"),
}


def _scalar_type(number: int) -> str:
    names = dict(_SCALAR_TYPES.values())
    return names.get(number, f"scalar type {number}")


def _qnn_dtype(number: int) -> str:
    from ..compile.ir import DType

    try:
        return DType(number).name.lower()
    except ValueError:
        return f"0x{number:03x}"


def _io(entry: IOEntry) -> dict[str, Any]:
    return {
        "name": entry.name,
        "dtype": _scalar_type(entry.scalar_type),
        "shape": list(entry.shape),
        "qnn_dtype": _qnn_dtype(entry.dtype),
        "qnn_shape": list(entry.qnn_shape),
        "encoding": None if entry.encoding is None else list(entry.encoding),
    }


def _state(entry: StateEntry) -> dict[str, Any]:
    from ..compile.ir import DType
    from ..compile.payload import Binding

    count = 1
    for extent in entry.shape:
        count *= extent
    try:
        binding = Binding(entry.binding).name.lower()
        nbytes = count * DType(entry.dtype).itemsize
    except (ValueError, IndexError):
        raise IncompatiblePayload(f"state {entry.fqn} has an unknown type or binding") from None
    return {
        "fqn": entry.fqn,
        "dtype": _scalar_type(entry.scalar_type),
        "shape": list(entry.shape),
        "stored_as": _qnn_dtype(entry.dtype),
        "bytes": nbytes,
        "binding": binding,
        "input": entry.input_name,
        "output": entry.output_name,
        "initial": entry.initial_key or "zeros",
        "encoding": None if entry.encoding is None else list(entry.encoding),
    }


def _payload(payload: Payload) -> dict[str, Any]:
    return {
        "graph": payload.graph,
        "context": payload.context_key,
        "target": payload.target,
        "soc_model": payload.soc_model,
        "htp_arch": payload.htp_arch,
        "build_id": payload.build_id,
        "core_api": ".".join(map(str, payload.core_api)),
        "inputs": [_io(entry) for entry in payload.inputs],
        "outputs": [_io(entry) for entry in payload.outputs],
        "state": [_state(entry) for entry in payload.states],
    }


def _value(value: dict[str, Any]) -> Any:
    """A value of ExecuTorch's program: a tensor's facts, or the constant itself."""
    facts = value.get("val") or {}
    if value["val_type"] == "Tensor":
        name = facts["scalar_type"]
        _, dtype = _SCALAR_TYPES.get(name, (None, name.lower()))
        return {"dtype": dtype, "shape": facts["sizes"]}
    return next((facts[key] for key in facts if key.endswith("_val")), None)


def _method(file: PteFile, plan: dict[str, Any], payloads: list[Payload]) -> dict[str, Any]:
    from ..compile.payload import unpack

    delegates = []
    for delegate in plan["delegates"]:
        data = file.delegate_data(delegate)
        facts: dict[str, Any] = {"id": delegate["id"], "bytes": len(data)}
        if delegate["id"] == _BACKEND:
            try:
                payload = unpack(data)
            except IncompatiblePayload as error:
                where = f"{file.path}, method {plan['name']}"
                raise IncompatiblePayload(f"{where}: {error}") from None
            payloads.append(payload)
            facts |= _payload(payload)
        delegates.append(facts)
    return {
        "name": plan["name"],
        "inputs": [_value(plan["values"][index]) for index in plan["inputs"]],
        "outputs": [_value(plan["values"][index]) for index in plan["outputs"]],
        "delegates": delegates,
        "cpu_ops": [
            ".".join(filter(None, (op["name"], op["overload"]))) for op in plan["operators"]
        ],
        "planned_bytes": sum(plan["non_const_buffer_sizes"][1:]),
    }


def _context(
    key: str, data: memoryview | None, payload: Payload, library: Any | None
) -> dict[str, Any]:
    """What is known of one context binary."""
    facts: dict[str, Any] = {"key": key, "bytes": payload.context_size}
    if data is None:
        return facts | {"error": "not in this file"}
    if hashlib.sha256(data).digest() != payload.context_sha256:
        return facts | {"error": "does not match the hash in the payload: the file is damaged"}
    if library is None:
        return facts
    from .. import _native

    try:
        described: dict[str, Any] = {**_native.inspect_context(library, data)}
    except _native.Error as error:
        return facts | {"error": str(error)}
    for name in ("core_api", "backend_api", "blob_version"):
        described[name] = ".".join(map(str, described[name]))
    graphs = [
        {name: _count(value) for name, value in graph.items()} for graph in described.pop("graphs")
    ]
    return facts | described | {"graphs": graphs}


def _count(value: Any) -> Any:
    """A graph's tensors as their number; they are listed with the delegate."""
    return len(value) if isinstance(value, (list, tuple)) else value


def examine(path: str, library: Any | None) -> dict[str, Any]:
    """Everything `inspect` knows of a file, as the document that --json prints.

    Args:
        path: the `.pte`.
        library: a `_native.Library` to look into the context binaries with, or None.

    Raises:
        QnnError: no program, or a damaged one.
    """
    try:
        return _examine(path, library)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise QnnError(f"{path} is damaged: {type(error).__name__} while reading it") from error


def _examine(path: str, library: Any | None) -> dict[str, Any]:
    from .pte import PteFile

    with PteFile(path) as file:
        payloads: list[Payload] = []
        methods = [_method(file, plan, payloads) for plan in file.program["execution_plan"]]
        constants = {}
        for method in list(methods):
            if not method["inputs"] and not method["delegates"] and not method["cpu_ops"]:
                values = method["outputs"]
                constants[method["name"]] = values[0] if len(values) == 1 else values
                methods.remove(method)
        named = file.named_data()
        contexts = {
            payload.context_key: _context(
                payload.context_key, named.get(payload.context_key), payload, library
            )
            for payload in payloads
        }
        state: dict[str, dict[str, Any]] = {}
        for payload in payloads:
            for entry in payload.states:
                state.setdefault(entry.fqn, _state(entry) | {"graphs": []})
                state[entry.fqn]["graphs"].append(payload.graph)
        return {
            "file": str(path),
            "bytes": file.size,
            "sha256": program_sha256(path),
            "methods": methods,
            "constants": constants,
            "contexts": list(contexts.values()),
            "state": list(state.values()),
            "named_data": [{"key": key, "bytes": len(data)} for key, data in named.items()],
        }


def _shaped(fact: Any) -> str:
    if isinstance(fact, dict):
        return f"{fact['dtype']}{fact['shape']}"
    return str(fact)


def _signature(method: dict[str, Any]) -> str:
    inputs = ", ".join(map(_shaped, method["inputs"]))
    outputs = ", ".join(map(_shaped, method["outputs"]))
    return f"{method['name']}({inputs}) -> {outputs or 'nothing'}"


def _text(found: dict[str, Any]) -> str:
    lines = [f"{found['file']}: {human_bytes(found['bytes'])}, SHA-256 {found['sha256']}"]
    for method in found["methods"]:
        lines += ["", _signature(method)]
        for delegate in method["delegates"]:
            about = human_bytes(delegate["bytes"])
            if delegate["id"] == _BACKEND:
                about = (
                    f"graph {delegate['graph']} for {delegate['target']} "
                    f"(v{delegate['htp_arch']}), {len(delegate['inputs'])} inputs, "
                    f"{len(delegate['outputs'])} outputs, {len(delegate['state'])} state buffers, "
                    f"QAIRT {delegate['build_id']}"
                )
            lines.append(f"  delegate {delegate['id']}: {about}")
        names = method["cpu_ops"]
        lines.append(f"  on the CPU: {', '.join(names) if names else 'nothing'}")
    if found["constants"]:
        lines += ["", "constants"]
        lines += [f"  {name} = {_shaped(value)}" for name, value in found["constants"].items()]
    if found["state"]:
        total = sum(entry["bytes"] for entry in found["state"])
        lines += ["", f"state: {len(found['state'])} buffers, {human_bytes(total)}"]
        rows = [
            (
                "  " + entry["fqn"],
                _shaped(entry),
                f"as {entry['stored_as']}",
                entry["binding"],
                "zeros" if entry["initial"] == "zeros" else "initial value",
            )
            for entry in found["state"]
        ]
        lines.append(table(rows))
    if found["contexts"]:
        lines += ["", "QNN contexts"]
    for context in found["contexts"]:
        lines.append(f"  {context['key']}: {human_bytes(context['bytes'])}")
        if "error" in context:
            lines.append(f"    {context['error']}")
        elif "build_id" in context:
            lines.append(
                f"    QAIRT {context['build_id']}, SoC {context['soc_model']}, "
                f"v{context['htp_arch']}, blob {context['blob_version']}"
            )
        lines += [
            f"    graph {graph['name']}: {graph['inputs']} inputs, {graph['outputs']} outputs, "
            f"VTCM {human_bytes(graph['vtcm_bytes'])}, "
            f"constants {human_bytes(graph['const_bytes'] + graph['shared_weight_bytes'])}, "
            f"spill and fill {human_bytes(graph['spill_fill_bytes'])}"
            for graph in context.get("graphs", ())
        ]
    return "\n".join(lines)


def _is_state_file(path: str) -> bool:
    with Path(path).open("rb") as file:
        return file.read(len(_STATE_MAGIC)) == _STATE_MAGIC


def examine_state(path: str) -> dict[str, Any]:
    """Everything `inspect` knows of a saved state, as the document that --json prints.

    Raises:
        StateError: damaged, or of another version.
    """
    from .. import _native

    try:
        info = _native.inspect_state(path)
    except _native.Error as error:
        raise StateError(str(error)) from None
    return {
        "file": path,
        "bytes": info["nbytes"],
        "format": ".".join(map(str, info["version"])),
        "program_sha256": info["program_sha256"],
        "state": [
            {
                "fqn": buffer["fqn"],
                "dtype": _scalar_type(buffer["scalar_type"]),
                "shape": list(buffer["shape"]),
                "stored_as": _qnn_dtype(buffer["stored_dtype"]),
                "bytes": buffer["nbytes"],
                "encoding": None if buffer["encoding"] is None else list(buffer["encoding"]),
            }
            for buffer in info["state"]
        ],
    }


def _encoding(encoding: list[float] | None) -> str:
    return "" if encoding is None else f"scale {encoding[0]:.6g}, offset {encoding[1]}"


def _state_text(found: dict[str, Any]) -> str:
    rows = [
        (
            "  " + entry["fqn"],
            _shaped(entry),
            f"as {entry['stored_as']}",
            human_bytes(entry["bytes"]),
            _encoding(entry["encoding"]),
        )
        for entry in found["state"]
    ]
    lines = [
        f"{found['file']}: saved state, format {found['format']}, {human_bytes(found['bytes'])}",
        f"of the program with SHA-256 {found['program_sha256']}",
        f"{len(rows)} buffers",
    ]
    return "\n".join([*lines, table(rows)] if rows else lines)


def _run(args: argparse.Namespace, out: Output) -> int:
    if _is_state_file(args.file):
        state = examine_state(args.file)
        out.result(state, _state_text(state))
        return 0
    library = None
    if not args.no_contexts:
        from .. import _native, libraries

        folder = libraries.find(args.qnn_libraries)
        try:
            library = _native.Library(str(folder))
        except _native.Error as error:
            raise QnnError(str(error)) from None
    with out.stage(f"reading {args.file}"):
        found = examine(args.file, library)
    out.result(found, _text(found))
    return 1 if any("error" in context for context in found["contexts"]) else 0
