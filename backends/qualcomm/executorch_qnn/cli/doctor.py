# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn doctor`: what is installed, whether it fits together, and what to do if not."""

from __future__ import annotations

import argparse
import platform
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import libraries
from ..errors import LibraryNotFound, QnnError
from ..target import Target
from .output import Output, add_common_options, table

if TYPE_CHECKING:
    from .output import Commands

# What a program needs beyond our own metadata, and what brings it.
_OPTIONAL = {"onnxruntime-qnn": ">=2.3,<2.8"}
_SHOWN = ("executorch-qnn", "executorch", "torch", "torchao", "numpy", "onnxruntime-qnn")


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser(
        "doctor", help="tell what is installed, whether it fits, and how to get what is missing"
    )
    parser.add_argument("--target", default="SM8650", metavar="SOC", help="default: %(default)s")
    add_common_options(parser, library=True)
    parser.set_defaults(run=_run)


def _numbers(text: str) -> tuple[int, ...]:
    """`2.13.0+cpu` as (2, 13, 0)."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:4])


def fits(installed: str, specifier: str) -> bool:
    """Whether a version fits a specifier such as `>=0.18,<0.19`; knows ==, !=, >=, <=, > and <."""
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = re.fullmatch(r"(==|!=|>=|<=|>|<)\s*([\w.+]+)", clause)
        if match is None:
            raise ValueError(f"cannot read the version specifier {specifier!r}")
        operator, wanted = match.groups()
        have, want = _numbers(installed), _numbers(wanted)
        length = max(len(have), len(want))
        have += (0,) * (length - len(have))
        want += (0,) * (length - len(want))
        if not {
            "==": have == want,
            "!=": have != want,
            ">=": have >= want,
            "<=": have <= want,
            ">": have > want,
            "<": have < want,
        }[operator]:
            return False
    return True


def _pins() -> dict[str, str]:
    """Version specifiers by package, from our own metadata."""
    from importlib.metadata import PackageNotFoundError, requires

    pins = dict(_OPTIONAL)
    try:
        requirements = requires("executorch-qnn") or []
    except PackageNotFoundError:
        return pins
    for requirement in requirements:
        text, _, marker = requirement.partition(";")
        match = re.match(r"([\w.-]+)(?:\[[^\]]*\])?\s*\(?([^)]*)\)?\s*$", text)
        if match and "extra" not in marker:
            pins[match[1]] = match[2].strip()
    return pins


def _packages() -> list[dict[str, Any]]:
    from importlib.metadata import PackageNotFoundError, version

    pins = _pins()
    found = []
    for name in _SHOWN:
        try:
            installed = version(name)
        except PackageNotFoundError:
            installed = None
        wanted = pins.get(name, "")
        ok = installed is not None and fits(installed, wanted)
        found.append({"name": name, "version": installed, "required": wanted, "ok": ok})
    return found


def _native_module() -> dict[str, Any]:
    try:
        from .. import _native
    except ImportError as error:
        return {"ok": False, "error": str(error)}
    folder = Path(_native.__file__ or "").parent
    delegate = folder / "lib" / "libexecutorch_qnn_delegate.so"
    facts: dict[str, Any] = {"module": str(_native.__file__), "delegate": str(delegate)}
    if not delegate.is_file():
        return {"ok": False, "error": f"no such file: {delegate}", **facts}
    return {"ok": True, **facts}


def examine(target: Target, path: str | None = None) -> dict[str, Any]:
    """Everything `doctor` knows, as the document that --json prints."""
    problems: list[dict[str, str]] = []

    def problem(what: str, fix: str) -> None:
        problems.append({"problem": what, "fix": fix})

    def failed(error: QnnError) -> None:
        what, _, fix = str(error).rpartition("\n")  # the last line is what to do
        problem(f"{type(error).__name__}: {what}", fix)

    packages = _packages()
    for package in packages:
        name, installed, wanted = package["name"], package["version"], package["required"]
        if name in _OPTIONAL or package["ok"]:
            continue
        what = f"{name} {installed} does not fit {wanted}" if installed else f"{name} is missing"
        problem(what, f'pip install "{name}{wanted}"')

    native = _native_module()
    searched: list[libraries.Candidate] = []
    probed: dict[str, dict[str, Any]] = {}
    if not native["ok"]:
        problem(
            f"the native module cannot be used: {native['error']}",
            "install the package again with pip; from a clone: pip install .",
        )
    else:
        from .probe import probe

        searched = libraries.candidates(path)
        try:
            folder = libraries.find(path)
        except LibraryNotFound as missing:
            failed(missing)
        else:
            probed = probe(folder, target.soc_model)
            fixes = {
                "library": f'pip install "onnxruntime-qnn{_OPTIONAL["onnxruntime-qnn"]}"',
                "device": "choose another --target, or another QNN release with --qnn-libraries",
                "delegate": 'pip install "executorch==1.5.1", then install this package again',
            }
            for step, facts in probed.items():
                if "error" in facts:
                    problem(f"{step}: {facts['error']}", fixes[step])

    return {
        "ok": not problems,
        "python": {"version": platform.python_version(), "executable": sys.executable},
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "native": native,
        "libraries": {
            "candidates": [
                {"how": how, "folder": str(folder), "used": index == 0}
                for index, (how, folder) in enumerate(searched)
            ],
            "used": probed.get("library"),
        },
        "target": {
            "name": target.name,
            "soc_model": target.soc_model,
            "htp_arch": target.htp_arch,
            "ok": "device" in probed and "error" not in probed["device"],
        },
        "delegate": probed.get("delegate"),
        "problems": problems,
    }


_HOW = {
    "argument": "--qnn-libraries",
    "QNN_SDK_ROOT": "QNN_SDK_ROOT",
    "package": "package onnxruntime-qnn",
    "system": "system library path",
}


def _text(found: dict[str, Any]) -> str:
    rows: list[tuple[str, str, str]] = []

    def row(ok: bool | None, name: str, value: str) -> None:
        rows.append(("--" if ok is None else "ok" if ok else "NO", name, value))

    row(True, "python", f"{found['python']['version']}  {found['python']['executable']}")
    for package in found["packages"]:
        optional = package["name"] in _OPTIONAL and package["version"] is None
        wanted = f"  (needs {package['required']})" if package["required"] else ""
        shown = package["version"] or "not installed"
        row(None if optional else package["ok"], package["name"], shown + wanted)
    native = found["native"]
    row(native["ok"], "native module", native.get("module") or native["error"])
    for found_at in found["libraries"]["candidates"]:
        used = found_at["used"]
        how = _HOW.get(found_at["how"], found_at["how"]) + ("" if used else ", not used")
        row(True if used else None, "QNN libraries", f"{found_at['folder']}  ({how})")
    if not found["libraries"]["candidates"]:
        row(False, "QNN libraries", "not found")
    if (library := found["libraries"]["used"]) and "error" not in library:
        apis = "core {core_api}, backend {backend_api}, system {system_api}".format(**library)
        row(True, "QNN release", f"{library['build_id']}  ({apis})")
    target = found["target"]
    row(
        target["ok"],
        "target",
        f"{target['name']}, SoC {target['soc_model']}, v{target['htp_arch']}",
    )
    if delegate := found["delegate"]:
        row("error" not in delegate, "delegate", delegate.get("id") or delegate["error"])
    lines = [table(rows)]
    for problem in found["problems"]:
        lines += ["", f"problem: {problem['problem']}", f"fix:     {problem['fix']}"]
    lines += ["", "usable" if found["ok"] else "NOT usable"]
    return "\n".join(lines)


def _run(args: argparse.Namespace, out: Output) -> int:
    target = Target(args.target)
    with out.stage("looking around"):
        found = examine(target, args.qnn_libraries)
    out.result(found, _text(found))
    return 0 if found["ok"] else 1
