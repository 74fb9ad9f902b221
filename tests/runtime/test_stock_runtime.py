# SPDX-License-Identifier: BSD-3-Clause
"""Our sessions and ExecuTorch's own runtime in one process, whichever is imported first."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from .programs import Method, OnBothSides, Plan, int32

STOCK = "from executorch.runtime import Runtime; import torch"
OURS = "import executorch_qnn as qnn; session = qnn.load(sys.argv[1], qnn_libraries=sys.argv[2])"
CHECK = """
x = torch.tensor([[2, 3, 4, 5]], dtype=torch.int32)
want = [[[8, 4, 10, 8]], [[4, 2, 5, 4]]]
qnn.register(sys.argv[2])
names = Runtime.get().backend_registry.registered_backend_names
assert {"QnnDelegate", "QnnBackend", "XnnpackBackend"} <= set(names), names

assert [t.tolist() for t in session(x)] == want
program = Runtime.get().load_program(sys.argv[1])
method = program.load_method("forward")
for _ in range(3):
    assert [t.tolist() for t in method.execute([x])] == want
assert [t.tolist() for t in session(x)] == want
assert session.read_state("n")[0] == 2, "the stock runtime has a state of its own"
print("done")
"""


@pytest.mark.parametrize("order", [(STOCK, OURS), (OURS, STOCK)], ids=["stock first", "ours first"])
def test_both_runtimes_work_in_one_process(
    order: tuple[str, str], program_file: Callable[..., Path], null_qnn: str
) -> None:
    file = program_file("mixed", Plan({"forward": Method(OnBothSides(), (int32(),))}))
    script = "\n".join(["import sys", *order, CHECK])
    run = subprocess.run(
        [sys.executable, "-c", script, str(file), null_qnn], capture_output=True, text=True
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr
    assert "register_pal" not in run.stderr


def test_importing_the_runtime_module_registers_the_backend() -> None:
    script = (
        "import executorch_qnn.runtime; from executorch.runtime import Runtime;"
        "print(Runtime.get().backend_registry.is_available('QnnDelegate'))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout == "True\n"


def test_a_stock_load_that_fails_says_why_on_stderr(
    program_file: Callable[..., Path], tmp_path: Path
) -> None:
    script = (
        "import sys, executorch_qnn; executorch_qnn.register(sys.argv[2])\n"
        "from executorch.runtime import Runtime\n"
        "Runtime.get().load_program(sys.argv[1]).load_method('forward')"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(program_file()), str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert run.returncode != 0
    assert "QnnDelegate: no QNN libraries" in run.stderr
