# SPDX-License-Identifier: BSD-3-Clause
"""pytest plugin: runs the suite's tests with one flow, and writes down what came of each.

The suite picks its flows when its conftest is imported, from what is installed beside it, and takes
a new random seed for each process.  This plugin is loaded before that conftest, gives it the flow
of `--flow` alone and a fixed seed, and appends a line of JSON to `--results` as soon as a fact is
known, so that an abort of the process loses nothing but the test that it was in.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import pytest

SEED = 20261201


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flow", required=True)
    parser.addoption("--results", type=Path, required=True)


def find_flow(name: str) -> Any:
    """A flow of ours, or of the suite.

    Raises:
        pytest.UsageError: there is none of this name.
    """
    from executorch.backends.test.suite.flow import all_flows

    from .flows import FLOWS

    flow = FLOWS.get(name) or all_flows().get(name)
    if flow is None:
        raise pytest.UsageError(f"no flow {name!r}; ours: {', '.join(FLOWS)}")
    return flow


class Recorder:
    """Appends records to a file, whole lines at a time."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, **record: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def subtest(self, summary: Any) -> None:
        self.write(
            kind="subtest",
            test=summary.name,
            index=summary.subtest_index,
            result=summary.result.name,
            error=str(summary.error or "")[:2000],
            delegated=dict(summary.delegated_op_counts or {}),
            undelegated=dict(summary.undelegated_op_counts or {}),
            lower_s=summary.lower_time.total_seconds() if summary.lower_time else None,
            sqnr_db=[float(s.sqnr) for s in summary.tensor_error_statistics],
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(kind="collected", tests=[item.name for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            self.write(kind="test", test=name, outcome=report.outcome, seconds=report.duration)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    from executorch.backends.test.suite import flow, reporting, runner

    options = early_config.known_args_namespace
    chosen = find_flow(options.flow)
    flow.all_flows = lambda: {chosen.name: chosen}
    recorder = Recorder(options.results)
    early_config.pluginmanager.register(recorder, "suite-recorder")
    reporting.begin_test_session(None, seed=SEED)
    run_test = runner.run_test

    @functools.wraps(run_test)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        summary = run_test(*args, **kwargs)
        recorder.subtest(summary)
        return summary

    runner.run_test = recorded
