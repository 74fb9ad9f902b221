# SPDX-License-Identifier: BSD-3-Clause
"""What a command prints and where: results on stdout, everything else on stderr."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO, TypeAlias

from ..errors import UnsupportedOp
from ..text import table

__all__ = ["Output", "UsageError", "add_common_options", "human_bytes", "table"]

if TYPE_CHECKING:
    Commands: TypeAlias = argparse._SubParsersAction[argparse.ArgumentParser]

_SHOW_STAGE_AFTER_S = 2.0


class UsageError(Exception):
    """The command line parsed, but makes no sense; exit code 2."""


def add_common_options(parser: argparse.ArgumentParser, *, library: bool = False) -> None:
    """Adds the options that every command has; `library` adds where the QNN libraries are."""
    if library:
        parser.add_argument(
            "--qnn-libraries",
            metavar="PATH",
            help="folder of the QNN libraries, or the root of a Qualcomm AI Runtime SDK",
        )
    parser.add_argument("--json", action="store_true", help="print one JSON document on stdout")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more on stderr")


@contextlib.contextmanager
def standard_output() -> Iterator[TextIO]:
    """A stream on the real stdout; until it closes, file descriptor 1 itself leads to stderr.

    QNN's libraries print to file descriptor 1. Results must not be mixed with that.
    """
    stdout = sys.stdout
    try:
        fd = stdout.fileno()
    except (AttributeError, OSError, io.UnsupportedOperation):
        fd = -1
    if fd != 1:  # captured by a test or by the caller: nothing native writes there
        yield stdout
        return
    stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    stream = open(kept, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = stream
    try:
        yield stream
    finally:
        with contextlib.suppress(BrokenPipeError):
            stream.flush()
        sys.stdout = stdout
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def library_warnings(*, shown: bool) -> Iterator[None]:
    """Unless they are `shown`, keeps the warnings of the libraries that we use off stderr."""
    if shown:
        yield
        return
    import logging
    import warnings

    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def check_folder(file: Path) -> None:
    """Refuses a file that no folder is there for, before any work is done."""
    folder = file.resolve().parent
    if not folder.is_dir():
        raise UsageError(f"no such folder: {folder}")


def human_bytes(count: int) -> str:
    """`1536` as `1.5 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"


class Output:
    """Where a command writes."""

    def __init__(self, stdout: TextIO, *, json: bool, verbose: bool) -> None:
        self.json = json
        self.verbose = verbose
        self._stdout = stdout

    def result(self, document: dict[str, Any], text: str) -> None:
        """The command's answer: the document with --json, else the text."""
        if self.json:
            json.dump(document, self._stdout, indent=1, ensure_ascii=False)
            self._stdout.write("\n")
        elif text:
            self._stdout.write(text + "\n")
        self._stdout.flush()

    def write(self, text: str) -> None:
        """Streams part of a text answer as it comes; nothing with --json."""
        if not self.json:
            self._stdout.write(text)
            self._stdout.flush()

    def log(self, message: str) -> None:
        """One line for people, on stderr."""
        sys.stderr.write(message + "\n")
        sys.stderr.flush()

    def debug(self, message: str) -> None:
        """As `log`, with --verbose only."""
        if self.verbose:
            self.log(message)

    def error(self, error: BaseException, message: str) -> None:
        """Reports a failure: one message on stderr, and a document with --json."""
        name = type(error).__name__
        self.log(f"executorch-qnn: {name}: {message}")
        if self.json:
            document = {"type": name, "message": message}
            nodes = {"nodes": error.nodes} if isinstance(error, UnsupportedOp) else {}
            self.result({"error": document | nodes}, "")

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[Callable[[str], None]]:
        """Shows what is going on, and for how long, on stderr once it has taken two seconds.

        Yields a function that renames the stage; the clock starts anew with each name.
        """
        ticker = _Ticker(name)
        try:
            yield ticker.rename
        finally:
            ticker.stop()


class _Ticker:
    """A thread that keeps one line on stderr current."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Any = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def rename(self, name: str) -> None:
        with self._lock:
            self._close_line()
            self._name = name
            self._started = time.monotonic()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            self._close_line()

    def _run(self) -> None:
        while not self._ended.wait(0.25):
            with self._lock:
                elapsed = time.monotonic() - self._started
                if self._terminal and elapsed >= _SHOW_STAGE_AFTER_S:
                    self._draw(elapsed)

    def _draw(self, elapsed: float) -> None:
        if self._bar is None:
            from tqdm import tqdm

            self._bar = tqdm(
                bar_format="{desc}: {elapsed}", desc=self._name, file=sys.stderr, leave=True
            )
            self._bar.start_t -= elapsed
        self._bar.refresh()

    def _close_line(self) -> None:
        elapsed = time.monotonic() - self._started
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        elif not self._terminal and elapsed >= _SHOW_STAGE_AFTER_S:
            sys.stderr.write(f"{self._name}: {elapsed:.1f} s\n")
            sys.stderr.flush()
