# SPDX-License-Identifier: BSD-3-Clause
"""Which ops stay whole for a partitioner that asks for them: ExecuTorch's own function, and ours.

Lowers every op of tests/lowering/preserved.py in every context with ExecuTorch's
`to_edge_transform_and_lower`, by both of its ways, and with ours, and writes what became of it.

    python benchmarks/preserved_ops.py --out docs/preserved_ops.md

Takes a quarter of an hour of one core.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeAlias

import executorch.exir
import torch

import executorch_qnn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.lowering.preserved import (  # noqa: E402
    ROWS,
    Asking,
    Case,
    InContexts,
    Row,
    edge_name,
    inputs,
    op,
    quantized,
)

Lower: TypeAlias = Callable[..., Any]
Outcomes: TypeAlias = dict[str, str]
"""Side to what became of a request there."""

SIDES: Mapping[str, tuple[Lower, bool]] = {
    "ExecuTorch, no filter": (executorch.exir.to_edge_transform_and_lower, False),
    "ExecuTorch, filter": (executorch.exir.to_edge_transform_and_lower, True),
    "ours": (executorch_qnn.to_edge_transform_and_lower, False),
    "ours, filter": (executorch_qnn.to_edge_transform_and_lower, True),
}
CALLS = 3
EVERYWHERE = (
    "view,reshape,transpose,t,unfold,chunk,split,unbind,hardswish_,index_put_,copy_,masked_fill_,"
    "linear,einsum,conv2d,scaled_dot_product_attention,softmax,gelu,stack,embedding,index_copy,"
    "upsample_bilinear2d,pixel_shuffle,layer_norm,group_norm"
)
"""The ops that are tried in every context."""
OTHERS = [row for row in ROWS if row.op in (op("linear.default"), op("hardswish.default"))]


@contextmanager
def warned() -> Iterator[list[str]]:
    """The texts of all warnings that are logged."""
    texts: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    listener = Listener(logging.WARNING)
    logging.getLogger().addHandler(listener)
    try:
        yield texts
    finally:
        logging.getLogger().removeHandler(listener)


def outcome(
    case: Case, row: Row, lower: Lower, asking: Sequence[Asking], expected: Mapping[str, int]
) -> str:
    """What becomes of the request for a row, by the first of those who ask.

    Args:
        expected: how many of it there are in each graph that counts.
    """
    with warned() as texts:
        try:
            results = case.run(lower(case.program, partitioner=list(asking)))
        except Exception as e:
            return f"error: {type(e).__name__}"
    off = max(
        (g.double() - w.double()).abs().max().item()
        for got, want in zip(results, case.want, strict=True)
        for g, w in zip(got, want, strict=True)
    )
    if off > 1e-5:
        return f"wrong values ({off:.2g})"
    told = any(row.name in text for text in texts)
    if row.twin is None:
        return "refused with a message" if told else "dropped"
    name = edge_name(row.twin)
    whole = {graph: asking[0].seen.get(graph, Counter())[name] for graph in expected}
    if all(whole[graph] >= n for graph, n in expected.items()):
        return row.outcome
    partly = (
        f"{sum(whole.values())} of {sum(expected.values())} kept" if any(whole.values()) else ""
    )
    return (partly or "decomposed") + (", with a warning" if told else "")


def everywhere(case: Case, row: Row, expected: Mapping[str, int]) -> Outcomes:
    found = {}
    for side, (lower, filters) in SIDES.items():
        take = [edge_name(row.twin)] if row.twin else []
        asking = Asking([row.op], take, (lambda _: True) if filters else None)
        found[side] = outcome(case, row, lower, [asking], expected)
    return found


def in_contexts(row: Row, *contexts: str) -> Case:
    calls = [inputs([row], i) for i in range(CALLS)]
    return Case(InContexts([row], contexts).eval(), calls)


def straight(row: Row) -> Outcomes:
    return everywhere(in_contexts(row, "value", "buffer"), row, {"": 3})


def in_body(context: str) -> Callable[[Row], Outcomes]:
    return lambda row: everywhere(
        in_contexts(row, context), row, {context: InContexts.CALLS[context]}
    )


def in_quantized(row: Row) -> Outcomes:
    case = Case(quantized([row]), [inputs([row], i) for i in range(CALLS)])
    return everywhere(case, row, {"": 1})


def beside_another(order: int) -> Callable[[Row], Outcomes]:
    """One partitioner asks for the row, another for `OTHERS`; 0 if the first comes first."""

    def run(row: Row) -> Outcomes:
        rows = [row, *OTHERS]
        case = Case(InContexts(rows, ["value"]).eval(), [inputs(rows, i) for i in range(CALLS)])
        found = {}
        for side, (lower, filters) in SIDES.items():
            accept = (lambda _: True) if filters else None
            one = Asking([row.op], [edge_name(row.twin or row.op)], accept)
            names = [edge_name(o.op) for o in OTHERS]
            other = Asking([o.op for o in OTHERS], names, accept)
            asking = [one, other]
            lowered = _in_order(lower, order)
            found[side] = outcome(case, row, lowered, asking, {"": 1})
            lost = [n for n in names if not other.seen.get("", Counter())[n]]
            if found[side].startswith("kept") and lost:
                found[side] = "the other's are decomposed"
        return found

    return run


def _in_order(lower: Lower, order: int) -> Lower:
    def lowered(program: Any, partitioner: list[Any]) -> Any:
        return lower(program, partitioner=partitioner[::-1] if order else partitioner)

    return lowered


CONTEXTS: Mapping[str, Callable[[Row], Outcomes]] = {
    "plain value; mutable buffer before and after its update": straight,
    "branch of `cond`": in_body("cond"),
    "branch of a `cond` in a branch": in_body("nested cond"),
    "body of `while_loop`": in_body("while_loop"),
    "graph quantized by PT2E": in_quantized,
    "two partitioners, it asks first": beside_another(0),
    "two partitioners, it asks second": beside_another(1),
}


def takes_part(row: Row, context: str) -> bool:
    if context.startswith("two") and row.twin in {o.twin for o in OTHERS}:
        return False
    return row.twin is not None and (row.quantizes or "PT2E" not in context)


# ---------------------------------------------------------------- the document


def table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines)]


def summary(outcomes: Iterable[str]) -> str:
    """`70 kept, 3 decomposed`, the most frequent first."""
    kinds = Counter(
        "kept" if o.startswith("kept") else o.split(",")[0].split(" (")[0] for o in outcomes
    )
    return ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())


def document(results: Mapping[str, Mapping[str, Outcomes]]) -> str:
    """The page, from context to op to what became of it."""
    first = next(iter(results.values()))
    shown = list(SIDES)[:3]
    tried = list(dict.fromkeys(n for of in list(results.values())[1:] for n in of))
    versions = ", ".join(f"{p} {version(p)}" for p in ("executorch-qnn", "executorch", "torch"))
    lines = [
        "<!-- Generated by benchmarks/preserved_ops.py; do not edit. -->",
        "# Ops that stay whole",
        "",
        "What becomes of an op when a partitioner asks for it in `ops_to_not_decompose`: with",
        "ExecuTorch's `to_edge_transform_and_lower`, for partitioners without and with a filter of",
        "nodes (it has a way for each), and with `executorch_qnn.to_edge_transform_and_lower`.",
        "An op is *kept* if the partitioner finds all calls of it whole when its turn comes, under",
        "its own name or that of the functional op which stands for it; views are copies in the",
        "edge dialect. Three calls of each lowered program were compared with eager.",
        "",
        f"Measured with {versions}.",
        "",
        "## By op: a plain value, and a mutable buffer before and after its update",
        "",
        *table(
            ["asked for", *shown],
            ([f"`{name}`", *(of[side] for side in shown)] for name, of in first.items()),
        ),
        "",
        "## By context",
        "",
        f"Of {', '.join(f'`{name}`' for name in tried)}; the tests of this project try all ops.",
        "",
        *table(
            ["context", *SIDES],
            (
                [
                    context,
                    *(summary(found[n][side] for n in tried if n in found) for side in SIDES),
                ]
                for context, found in results.items()
            ),
        ),
        "",
        '"The other\'s are decomposed": the ops are kept, and `linear` and `hardswish`, which the',
        "other partitioner asks for, are not. The op that a buffer's update consists of, or that",
        "core ATen contains, is whole in any case.",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", default="", help="comma separated, without the overload")
    parser.add_argument(
        "--contexts-of", default=EVERYWHERE, help="as --ops: tried in every context ('': all)"
    )
    parser.add_argument("--out", type=Path, help="file to write; default: print")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    some = set(filter(None, args.ops.split(",")))
    rows = [row for row in ROWS if not some or row.name.split(".")[0] in some]
    deep = set(filter(None, args.contexts_of.split(",")))
    results: dict[str, dict[str, Outcomes]] = {}
    for i, (context, run) in enumerate(CONTEXTS.items()):
        results[context] = {}
        for row in rows:
            skipped = bool(deep) and row.name.split(".")[0] not in deep
            if i and (skipped or not takes_part(row, context)):
                continue
            started = time.process_time()
            results[context][row.name] = run(row)
            seconds = time.process_time() - started
            print(f"{context}: {row.name} ({seconds:.1f} s)", file=sys.stderr, flush=True)
    page = document(results)
    if args.out:
        args.out.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
