# SPDX-License-Identifier: BSD-3-Clause
"""A C program against the installed header and library, on the simulator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import executorch
import pytest
import torch

import executorch_qnn as qnn
from executorch_qnn import _native

from .test_simulator import Accumulator

PACKAGE = Path(_native.__file__).parent

PROGRAM = r"""
#include <executorch_qnn/state_api.h>
#include <stdio.h>
#include <string.h>

#define TRY(call)                                                                    \
  if ((call) != ETQNN_OK) {                                                          \
    fprintf(stderr, "%s: %s\n", #call, etqnn_last_error());                          \
    return 1;                                                                        \
  }

/* model.pte libraries steps state: adds one to the accumulator in each step. */
int main(int argc, char** argv) {
  etqnn_session_options options = {sizeof options};
  etqnn_session *session, *twin;
  etqnn_value x = {sizeof x}, y = {sizeof y};
  etqnn_state_info info = {sizeof info};
  float ones[4] = {1, 1, 1, 1}, twice[4], values[4];
  int steps, i;
  if (argc != 5 || sscanf(argv[3], "%d", &steps) != 1) return 2;
  options.qnn_libraries = argv[2];
  TRY(etqnn_session_open(argv[1], &options, &session));
  TRY(etqnn_session_input(session, "forward", 0, &x));
  x.data = ones;
  y.data = twice;
  for (i = 0; i < steps; ++i) {
    y.bytes = sizeof twice;
    TRY(etqnn_session_run(session, "forward", &x, 1, &y, 1));
  }
  TRY(etqnn_session_state_info(session, 0, &info));
  TRY(etqnn_session_read_state(session, info.name, values, sizeof values));
  printf("%s %s %d %zu %zu %g %g\n", info.name, info.binding, (int)info.rank, info.bytes,
         info.stored_bytes, values[3], twice[3]);
  TRY(etqnn_session_save_state(session, argv[4]));
  TRY(etqnn_session_fork(session, &twin));
  etqnn_session_close(session);
  TRY(etqnn_session_run(twin, "forward", &x, 1, &y, 1));
  printf("%g\n", twice[0]);
  etqnn_session_close(twin);
  return 0;
}
"""


@pytest.fixture(scope="module")
def accumulate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program above, as somebody else would build it."""
    folder = tmp_path_factory.mktemp("c")
    source, program = folder / "accumulate.c", folder / "accumulate"
    source.write_text(PROGRAM)
    runtime = Path(next(iter(executorch.__path__)), "lib")
    command = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Werror", str(source)]
    command += [f"-I{PACKAGE / 'include'}", f"-L{PACKAGE / 'lib'}", "-lexecutorch_qnn_delegate"]
    command += [f"-Wl,-rpath,{PACKAGE / 'lib'}", f"-Wl,-rpath-link,{runtime}", "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def test_a_c_program_runs_steps_and_exchanges_state_with_python(
    accumulate: Path, qnn_libraries: str, tmp_path: Path
) -> None:
    model, state = tmp_path / "model.pte", tmp_path / "state"
    inputs = (torch.zeros(1, 4),)
    lowered = qnn.lower(
        Accumulator(1, 4).eval(), inputs, target="SM8650", qnn_libraries=qnn_libraries
    )
    lowered.save(model)

    def run(steps: int, code: int = 0) -> str:
        command = [accumulate, model, qnn_libraries, str(steps), state]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == code, done.stderr
        return done.stdout if code == 0 else done.stderr

    session = qnn.load(model, qnn_libraries=qnn_libraries)
    info = session.state()["a"]
    assert run(3).splitlines() == [f"a {info.binding} 2 16 {info.nbytes} 3.5 7", "9"]
    session.load_state(state)
    assert session(torch.ones(1, 4)).tolist() == [[9.0] * 4]
    state.unlink()
    model.write_bytes(model.read_bytes()[:-100])
    assert "etqnn_session_open" in (words := run(1, code=1))
    assert "model.pte" in words


def test_the_header_is_c_and_c_plus_plus(tmp_path: Path) -> None:
    header = PACKAGE / "include" / "executorch_qnn" / "state_api.h"
    for name, compiler, standards in (
        ("x.c", os.environ.get("CC", "cc"), ("c99", "c11", "c17")),
        ("x.cpp", os.environ.get("CXX", "c++"), ("c++11", "c++17", "c++20")),
    ):
        source = tmp_path / name
        source.write_text(f'#include "{header}"\nint used = sizeof(etqnn_value);\n')
        for standard in standards:
            flags = ["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only"]
            subprocess.run([compiler, f"-std={standard}", *flags, str(source)], check=True)
