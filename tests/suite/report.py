# SPDX-License-Identifier: BSD-3-Clause
"""What the suite's results say: per flow, per file, and test by test where flows differ."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any


@dataclass
class FileResults:
    """One file of the suite with one flow.

    Attributes:
        outcomes: test to `passed`, `failed`, `skipped` or `aborted`: the process ended in it or
            before it came to it.
        subtests: all models that were lowered, in the order of their tests.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    subtests: list[dict[str, Any]] = field(default_factory=list)

    def count(self, outcome: str) -> int:
        return Counter(self.outcomes.values())[outcome]

    @property
    def delegated(self) -> int:
        return sum(sum(s["delegated"].values()) for s in self.subtests)

    @property
    def left(self) -> Counter[str]:
        """Ops on the CPU, and how many."""
        return sum((Counter(s["undelegated"]) for s in self.subtests), Counter())

    @property
    def undelegated(self) -> list[dict[str, Any]]:
        """Subtests of which nothing at all was delegated."""
        return [s for s in self.subtests if s["result"] == "SUCCESS_UNDELEGATED"]


def _plain(test: str, flow: str) -> str:
    """A test's name without the flow in its parameters."""
    name, bracket, parameters = test.partition("[")
    kept = [p for p in parameters.rstrip("]").split("-") if p != flow] if bracket else []
    return f"{name}[{'-'.join(kept)}]" if kept else name


def read(folder: Path, names: Iterable[str]) -> dict[str, FileResults]:
    """The results of a flow, by file.

    Args:
        folder: where the flow's results are; its name is the flow's.
        names: of the files, such as `test_add`.
    """
    found = {}
    for name in names:
        results = found[name] = FileResults()
        for line in (folder / f"{name}.jsonl").read_text().splitlines():
            record = json.loads(line)
            if record["kind"] == "collected":
                collected = {_plain(t, folder.name): "aborted" for t in record["tests"]}
                results.outcomes.update(collected)
            elif record["kind"] == "test":
                results.outcomes[_plain(record["test"], folder.name)] = record["outcome"]
            elif record["kind"] == "subtest":
                record["test"] = _plain(record["test"], folder.name)
                results.subtests.append(record)
    return found


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> list[str]:
    rows = (head, ["---"] * len(head), *lines)
    return [f"| {' | '.join(map(str, row))} |" for row in rows]


_FIGURES = ("passed", "failed", "skipped", "aborted", "delegated nodes", "not delegated")


def _figures(results: Iterable[FileResults]) -> list[int]:
    files = list(results)
    return [
        *(sum(f.count(o) for f in files) for o in ("passed", "failed", "skipped", "aborted")),
        sum(f.delegated for f in files),
        sum(len(f.undelegated) for f in files),
    ]


def _differences(ours: Mapping[str, FileResults], theirs: Mapping[str, FileResults]) -> list[str]:
    """Tests that fail in one flow and pass in the other."""
    return [
        f"- `{test}`: {outcome}, {theirs[name].outcomes.get(test, 'not there')}"
        for name, results in ours.items()
        for test, outcome in results.outcomes.items()
        if {outcome, theirs[name].outcomes.get(test)} not in ({outcome}, {"passed", "skipped"})
        and outcome != theirs[name].outcomes.get(test)
    ]


_MODELS = """\
One delegate is the best there is; *nodes* are the ATen nodes in it; *CPU* are those that are left,
each with its reason below; *Transposes* are the changes of layout among the QNN ops that did not
cancel. SQNR is against eager in float32, on other random input than the model was exported with.
*Lowering* is CPU time, from the exported program to the compiled one, QNN's compiler with it.

The weights are random, as torchvision makes them, from a fixed seed; batch norms have the
statistics of random input (see `tests/suite/plugin.py`).
"""


def _by_model(flow: str, results: Mapping[str, FileResults]) -> list[str]:
    """A table of what a flow of ours made of each model, and what it left on the CPU."""
    head = ("model", "result", "delegates", "nodes", "CPU", "QNN ops", "Transposes", "SQNR, dB")
    rows, left = [], []
    for name, file in results.items():
        for s in file.subtests:
            facts = s.get("lowered") or Counter()
            types = Counter(facts["qnn_ops"] or {})
            sqnr = ", ".join(f"{v:.1f}" for v in s["sqnr_db"])
            cpu_ops = facts["cpu_ops"] or []
            title = name.removeprefix("test_")
            title += ", dynamic shapes" if "dynamic_shapes" in s["test"] else ""
            figures = (facts["delegates"], facts["nodes"], len(cpu_ops), types.total())
            rows.append(
                (title, s["result"].lower().replace("_", " "), *figures, types["Transpose"], sqnr,
                 f"{facts['cpu_s']:.0f}")
            )  # fmt: skip
            reasons = Counter(op.partition(": ")[2].partition("; ")[0] for op in cpu_ops)
            left += [f"- {title}: {reason} ({n})" for reason, n in reasons.items()]
        if not file.subtests:
            rows.append((name.removeprefix("test_"), *set(file.outcomes.values()), *[""] * 7))
    return [
        f"## Models with `{flow}`",
        "",
        _MODELS,
        *_table([*head, "lowering, s"], rows),
        "",
        "On the CPU:",
        "",
        *(left or ["nothing."]),
        "",
    ]


def document(suite: str, found: Mapping[str, Mapping[str, FileResults]]) -> str:
    """The report: totals, failures, what is not delegated, and a table by file or model."""
    versions = ", ".join(f"{p} {version(p)}" for p in ("executorch-qnn", "executorch", "torch"))
    unit = "model" if suite == "models" else "file"
    lines = [
        "<!-- Generated by scripts/suite; do not edit. -->",
        f"# ExecuTorch's test suite of backends: {suite}",
        "",
        f"Each {unit} of `executorch.backends.test.suite` in a process of its own, on the HTP",
        f"simulator. {versions}.",
        "",
        "*Delegated nodes* is the suite's own count; *not delegated* are the models of which no",
        "node was delegated; *aborted* tests are those that an abort of the process took along.",
        "",
        *_table(["flow", *_FIGURES], ([f, *_figures(r.values())] for f, r in found.items())),
        "",
    ]
    for flow, results in found.items():
        subtests = [s for f in results.values() for s in f.subtests]
        if suite == "models" and any(s.get("lowered") for s in subtests):
            lines += _by_model(flow, results)
        failed = [
            (test, next((s for s in f.subtests[::-1] if s["test"] == test), None))
            for f in results.values()
            for test, outcome in f.outcomes.items()
            if outcome in ("failed", "aborted")
        ]
        lines += [f"## Failures of `{flow}`", ""]
        lines += [f"- `{test}`" + (f": {_reason(s)}" if s else "") for test, s in failed] or [
            "None."
        ]
        bare = [s for f in results.values() for s in f.undelegated]
        lines += ["", f"## Not delegated by `{flow}`", ""]
        lines += [
            f"- `{s['test']}` ({s['index']}): {', '.join(s['undelegated']) or 'no node at all'}"
            for s in bare
        ] or ["None."]
        lines.append("")
    flows = list(found)
    for other in flows[1:]:
        lines += [f"## Tests that differ: `{flows[0]}`, `{other}`", ""]
        lines += _differences(found[flows[0]], found[other]) or ["None."]
        lines.append("")
    short = ("p", "f", "s", "a", "nodes", "bare")
    lines += [
        f"## By {unit}",
        "",
        "p passed, f failed, s skipped, a aborted, nodes delegated, bare: models not delegated.",
        "",
        *_table(
            [unit, *(f"{flow}: {', '.join(short)}" for flow in flows)],
            (
                [
                    name.removeprefix("test_"),
                    *(", ".join(map(str, _figures([found[f][name]]))) for f in flows),
                ]
                for name in found[flows[0]]
            ),
        ),
        "",
    ]
    return "\n".join(lines)


def _reason(subtest: Mapping[str, Any]) -> str:
    text = " ".join(subtest["error"].split())
    return f"{subtest['result'].lower().replace('_', ' ')} {text[:160]}".strip()
