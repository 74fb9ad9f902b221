# SPDX-License-Identifier: BSD-3-Clause
"""`executorch-qnn targets`: the SoCs that programs can be lowered for."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

from ..target import targets
from .output import Output, add_common_options, table

if TYPE_CHECKING:
    from .output import Commands


def register(commands: Commands) -> None:
    """Adds the command."""
    parser = commands.add_parser("targets", help="list the SoCs that programs can be lowered for")
    add_common_options(parser)
    parser.set_defaults(run=_run)


def _run(args: argparse.Namespace, out: Output) -> None:
    known = targets()
    rows = [
        (
            target.name,
            target.soc_model,
            f"v{target.htp_arch}",
            f"{target.vtcm_mb} MB",
            "yes" if target.fp16 else "no",
            target.marketing_name,
        )
        for target in known
    ]
    out.result(
        {"targets": [dataclasses.asdict(target) for target in known]},
        table(rows, header=("name", "model", "HTP", "VTCM", "fp16", "also known as")),
    )
