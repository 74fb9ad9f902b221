# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executorch_qnn import _native

from .graphs import SM8650, relu_node


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QNN_SDK_ROOT", "/nowhere/sdk")
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)


def _pretend(folder: Path) -> str:
    folder.mkdir(parents=True)
    (folder / "libQnnHtp.so").touch()
    return str(folder)


def test_libraries_are_found_in_the_documented_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = _pretend(tmp_path / "sdk")
    package = _pretend(tmp_path / "package")
    system = _pretend(tmp_path / "system")
    monkeypatch.setenv("QNN_SDK_ROOT", sdk)
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{system}")
    assert _native.find_library(extra=["/no/package", package]) == [
        ("QNN_SDK_ROOT", sdk),
        ("package", package),
        ("system", system),
    ]
    assert _native.locate_library(extra=[package]) == ("QNN_SDK_ROOT", sdk)
    assert _native.find_library(package) == [("argument", package)]
    assert _native.find_library("/nowhere", [package]) == []


@pytest.mark.usefixtures("no_library")
def test_no_library_is_an_error_that_says_where_and_how_to_get_one() -> None:
    with pytest.raises(_native.Error) as caught:
        _native.locate_library(extra=["/no/package"])
    assert caught.value.kind == "library_not_found"
    assert caught.value.code == 0
    for part in (
        "QNN_SDK_ROOT: /nowhere/sdk",
        "package: /no/package",
        'pip install "onnxruntime-qnn>=2.3,<2.8"',
        "--qnn-libraries PATH",
    ):
        assert part in str(caught.value)


@pytest.mark.usefixtures("no_library")
@pytest.mark.parametrize("folder", ["", "/nowhere"])
def test_a_folder_without_libraries_is_not_found(folder: str) -> None:
    with pytest.raises(_native.Error, match=r"libQnnHtp\.so") as caught:
        _native.Library(folder)
    assert caught.value.kind == "library_not_found"


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    with pytest.raises(_native.Error, match=r"cannot load .*libQnnHtp\.so"):
        _native.Library(_pretend(tmp_path / "broken"))


def test_a_library_tells_its_versions(qnn_libraries: str) -> None:
    library = _native.Library(qnn_libraries)
    assert library.folder == os.path.realpath(qnn_libraries)
    assert library.provider == "HTP_QTI_AISW"
    major, minor, _ = library.core_api
    assert (major, minor) >= (2, 36)
    # QAIRT 2.47 has core API 2.36, and both count up together.
    assert library.build_id.startswith(f"v2.{minor + 11}.")
    assert library.backend_api[:2] == (5, minor + 11)
    assert library.system_api is not None
    assert library.system_api[0] == 1


def test_an_unknown_soc_is_an_error(qnn_libraries: str) -> None:
    library = _native.Library(qnn_libraries)
    with pytest.raises(_native.Error, match="SoC model 9999") as caught:
        _native.Backend(library, 9999)
    assert caught.value.kind == "qnn"
    assert caught.value.code == 14001


def test_validation_gives_qnns_own_reason(qnn_libraries: str) -> None:
    backend = _native.Backend(_native.Library(qnn_libraries), SM8650)
    assert backend.validate(relu_node()) is None
    reason = backend.validate(relu_node(rows_out=63))
    assert reason is not None
    assert "op relu (Relu)" in reason
    assert "64 != 63" in reason
    assert backend.validate(relu_node()) is None


@pytest.mark.parametrize(
    "node",
    [
        (),
        ("relu", "Relu", [], []),
        ("relu", "Relu", [("x", 0)], [], []),
        ("relu", "Relu", [], [], [("axis", "vector", 1)]),
        ("relu", "Relu", [], [], [("axis", "scalar")]),
    ],
)
def test_a_malformed_node_is_an_error(qnn_libraries: str, node: tuple[object, ...]) -> None:
    backend = _native.Backend(_native.Library(qnn_libraries), SM8650)
    with pytest.raises((_native.Error, IndexError, TypeError, RuntimeError)):
        backend.validate(node)  # type: ignore[arg-type]


def test_libraries_may_be_used_in_any_order_of_destruction(qnn_libraries: str) -> None:
    library = _native.Library(qnn_libraries)
    backend = _native.Backend(library, SM8650)
    context = _native.Context(backend)
    graph = context.graph("g")
    del library, backend, context
    graph.add_tensor("x", 0, 0x216, [1, 64])
    del graph


_QUIET = """
import sys
from executorch_qnn import _native
from tests.native.graphs import relu_graph
library = _native.Library(sys.argv[1])
context = _native.Context(_native.Backend(library, 57))
report = relu_graph(context).finalize()
context.binary()
assert report["ddr"]["read"] > 0, report
if not sys.argv[2:]:
    print("only this")
"""


def _run_quietly(*arguments: str, prologue: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", prologue + _QUIET, *arguments]
    return subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)


def test_nothing_of_qnn_reaches_stdout_or_stderr(qnn_libraries: str) -> None:
    ran = _run_quietly(qnn_libraries)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "only this\n", "")


def test_stdout_may_be_closed(qnn_libraries: str) -> None:
    ran = _run_quietly(qnn_libraries, "closed", prologue="import os; os.close(1)")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == ""
