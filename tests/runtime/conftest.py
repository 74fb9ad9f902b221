# SPDX-License-Identifier: BSD-3-Clause
"""The null provider, built when first asked for, and programs for it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cpu_ops import cosh_and_asinh_stay_on_the_cpu

from .programs import Method, Plan, Step, int32, make_program

__all__ = ["cosh_and_asinh_stay_on_the_cpu"]

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def null_qnn(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with stand-ins for the QNN libraries."""
    folder = tmp_path_factory.mktemp("null")
    for name in ("QnnHtp", "QnnSystem"):
        compiler = os.environ.get("CXX", "c++")
        command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", f"-I{ROOT / 'runtime'}"]
        command += [f"-I{ROOT / 'tests/cpp'}", str(ROOT / f"tests/cpp/null/{name}.cpp")]
        subprocess.run([*command, "-o", str(folder / f"lib{name}.so")], check=True)
    return str(folder)


@pytest.fixture(scope="session")
def program_file(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Makes (once for each name) the `.pte` of a plan, or of one `Step` method "forward"."""
    folder = tmp_path_factory.mktemp("programs")
    made: dict[str, Path] = {}

    def make(name: str = "counter", plan: Plan | None = None, sealed: bool = True) -> Path:
        if name not in made:
            plan = plan or Plan({"forward": Method(Step(), (int32(),))})
            made[name] = make_program(folder / f"{name}.pte", plan, sealed)
        return made[name]

    return make
