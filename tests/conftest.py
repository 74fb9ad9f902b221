# SPDX-License-Identifier: BSD-3-Clause
"""Options, markers and fixtures that all tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Two processes with two threads each are slower on two cores than one thread each.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the slow tests")
    parser.addoption("--long", action="store_true", help="run everything, which takes an hour")
    parser.addoption(
        "--qnn-libraries",
        metavar="PATH",
        help="folder of the QNN libraries to test with (default: what doctor finds)",
    )


def pytest_configure(config: pytest.Config) -> None:
    folder = config.getoption("--qnn-libraries")
    if folder:
        # What is loaded without an explicit folder, in child processes too, must be this release.
        os.environ["QNN_SDK_ROOT"] = str(Path(folder).resolve())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    every = config.getoption("--long")
    asked = {"slow": every or config.getoption("--slow"), "long": every}
    for item in items:
        if "qnn_libraries" in getattr(item, "fixturenames", ()):
            item.add_marker("qnn")
        for name, run in asked.items():
            if item.get_closest_marker(name) and not run:
                item.add_marker(pytest.mark.skip(reason=f"{name}; runs with --{name}"))


@pytest.fixture(scope="session")
def qnn_libraries(request: pytest.FixtureRequest) -> str:
    """The folder of the QNN libraries; a test that asks for it is marked `qnn`."""
    from executorch_qnn import libraries

    return str(libraries.find(request.config.getoption("--qnn-libraries")))
