# SPDX-License-Identifier: BSD-3-Clause
"""pytest plugin: runs the suite's tests with one flow, and writes down what came of each.

The suite picks its flows when its conftest is imported, from what is installed beside it, and takes
a new random seed for each process.  This plugin is loaded before that conftest, gives it the flow
of `--flow` alone and fixed seeds, and appends a line of JSON to `--results` as soon as a fact is
known, so that an abort of the process loses nothing but the test that it was in.

The models have random weights.  Their batch norms get the statistics of random input: with those
that they are made with, means of 0 and variances of 1, activations grow with each layer, past the
range of fp16 in some (6e11 in inception_v3).
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SEED = 20261201


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--flow", required=True)
    parser.addoption("--results", type=Path, required=True)


def declare_torchvision_ops() -> None:
    """Has torchvision imported where its compiled ops cannot be loaded.

    It describes two of them to the tracer when it is imported, which fails if they do not exist.
    """
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def take_statistics(model: torch.nn.Module, inputs: Sequence[torch.Tensor]) -> None:
    """Sets the batch norms of `model` to the statistics of random numbers in place of `inputs`."""
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.train()
        norm.momentum = 1.0
    with torch.no_grad():
        model(*(torch.randn(2, *x.shape[1:]) for x in inputs))
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.eval()
        norm.momentum = momentum


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
        from .flows import lowered

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
            lowered=lowered.pop() if lowered else None,
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.write(kind="collected", tests=[item.name for item in session.items])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            name = report.nodeid.rpartition("::")[2]
            self.write(kind="test", test=name, outcome=report.outcome, seconds=report.duration)


def pytest_runtest_setup() -> None:
    torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    from executorch.backends.test.suite import flow, reporting, runner

    options = early_config.known_args_namespace
    chosen = find_flow(options.flow)
    flow.all_flows = lambda: {chosen.name: chosen}
    recorder = Recorder(options.results)
    early_config.pluginmanager.register(recorder, "suite-recorder")
    reporting.begin_test_session(None, seed=SEED)
    declare_torchvision_ops()
    run_test = runner.run_test

    @functools.wraps(run_test)
    def recorded(model: torch.nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if type(model).__module__.startswith("torchvision."):
            take_statistics(model, inputs)
        summary = run_test(model, inputs, *args, **kwargs)
        recorder.subtest(summary)
        return summary

    runner.run_test = recorded
