# SPDX-License-Identifier: BSD-3-Clause
"""The `executorch-qnn` command.

One module per command; each has `register(commands)`, which adds its parser and imports nothing
heavy.
Exit codes: 0 done, 1 failed, 2 used wrongly.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

from ..errors import QnnError
from .output import Output, UsageError, library_warnings, standard_output

_COMMANDS = ("doctor", "targets", "lower", "inspect", "run", "compare", "llm")


class _Version(argparse.Action):
    """`--version`, which looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"{parser.prog} {version('executorch-qnn')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of every command; `run` in the parsed namespace is the function to call."""
    parser = argparse.ArgumentParser(
        prog="executorch-qnn",
        description="Lower PyTorch models for Qualcomm's NPU, look into them and run them.",
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        import_module(f".{name}", __name__).register(commands)
    return parser


def _print_traceback() -> None:
    import traceback

    traceback.print_exc(file=sys.stderr)


def _describe(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}: {error.filename}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; `argv` defaults to the process's arguments."""
    parser = build_parser()
    args = parser.parse_args(argv)
    with standard_output() as stdout, library_warnings(shown=args.verbose):
        out = Output(stdout, json=args.json, verbose=args.verbose)
        try:
            code = args.run(args, out)
        except UsageError as error:
            out.error(error, str(error))
            return 2
        except (QnnError, OSError) as error:
            if isinstance(error, BrokenPipeError):
                return 1
            if args.verbose:
                _print_traceback()
            out.error(error, _describe(error))
            return 1
        except KeyboardInterrupt as error:
            out.error(error, "interrupted")
            return 130
        except Exception as error:
            _print_traceback()
            out.error(error, f"unexpected {type(error).__name__}: {_describe(error)}")
            return 1
    return 0 if code is None else int(code)
