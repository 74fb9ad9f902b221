# SPDX-License-Identifier: BSD-3-Clause
"""What lowering costs: SmolLM2-135M, one token per step, beside ExecuTorch's in-tree backend.

Lowers the same decoder with both backends, each in a process of its own, in one run, on the same
QNN libraries, and prints CPU time, wall time, peak memory, file size, QNN's own share of the time,
and the DDR traffic per step that QNN's compiler counts.

    python benchmarks/aot.py --layers 2,8,30
    python benchmarks/aot.py --layers 2,8,30 --quantize 16a8w

Quantized models are calibrated with the same tokens on both sides; that, with all of the
quantizer's work, is a row of its own and no part of lowering.

The in-tree backend works with the libraries of onnxruntime-qnn 2.5.0 only; they are downloaded
unless `--peer-libraries` names them, and used for both sides unless `--qnn-libraries` names others
for ours.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PEER_RELEASE = "2.5.0"
SIDES = ("ours", "in-tree")
_TICKS = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------- /proc


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat from the third (state) on."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()


def process_tree(root: int) -> Iterator[tuple[int, list[str]]]:
    """`root` and every process below it."""
    children: dict[int, list[tuple[int, list[str]]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append((int(entry.name), fields))
    if fields := _stat(root):
        waiting = [(root, fields)]
        while waiting:
            pid, fields = waiting.pop()
            yield pid, fields
            waiting += children.get(pid, [])


def tree_cpu_seconds(root: int) -> float:
    """CPU time of `root`, of all below it, and of their children that have ended."""
    ticks = sum(sum(map(int, fields[11:15])) for _, fields in process_tree(root))
    return ticks / _TICKS


def tree_rss_bytes(root: int) -> int:
    """Resident memory of `root` and all below it, added up; shared pages count for each."""
    return sum(int(fields[21]) * _PAGE for _, fields in process_tree(root))


def peak_rss_bytes() -> int:
    """The most memory that this process ever had resident."""
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


# ---------------------------------------------------------------- one lowering, in its own process


# What a side does: from the model and its inputs to a file. Its imports are not measured.
Lower = Callable[[Any, tuple[Any, ...], argparse.Namespace], dict[str, Any]]


def _ours() -> Lower:
    import executorch_qnn as qnn

    # The package imports what is asked for.
    assert qnn.lower
    assert qnn.QnnQuantizer

    def lower(model: Any, inputs: tuple[Any, ...], args: argparse.Namespace) -> dict[str, Any]:
        program = qnn.lower(
            model,
            inputs,
            target=qnn.Target(args.target),
            quantize=args.quantize,
            calibration=args.batches,
            qnn_libraries=args.qnn_libraries,
        )
        program.save(args.output)
        return _facts_of(program.report)

    return lower


def _facts_of(lowered: Any) -> dict[str, Any]:
    """What the report of a lowering says."""
    report = json.loads(lowered.to_json())
    method = report["methods"]["forward"]
    delegates = method["delegates"]
    stages = report["cpu_s"] | {"QNN's compiler": report["compile_cpu_s"]}
    return {
        # A model that is not quantized is exported once, by lowering.
        "quantize_cpu_s": stages["export"] + stages["quantize"] if "quantize" in stages else 0.0,
        "delegates": len(delegates),
        "cpu_ops": len(method["cpu_ops"]),
        "qnn_ops": sum(delegate["qnn_ops"] for delegate in delegates),
        "finalize_s": sum(delegate["finalize_s"] for delegate in delegates),
        "ddr_read_bytes": sum(delegate["ddr_read_bytes"] or 0 for delegate in delegates),
        "ddr_write_bytes": sum(delegate["ddr_write_bytes"] or 0 for delegate in delegates),
        "stages_cpu_s": stages,
    }


def _in_tree() -> Lower:
    from executorch.backends.qualcomm.quantizer.quantizer import QnnQuantizer, QuantDtype
    from executorch.backends.qualcomm.serialization.qc_schema import QcomChipset
    from executorch.backends.qualcomm.utils import utils

    def lower(model: Any, inputs: tuple[Any, ...], args: argparse.Namespace) -> dict[str, Any]:
        before = tree_cpu_seconds(os.getpid())
        if args.quantize:
            quantizer = QnnQuantizer(soc_model=getattr(QcomChipset, args.target))
            quantizer.set_default_quant_config(
                getattr(QuantDtype, f"use_{args.quantize}"),
                is_qat=False,
                is_conv_per_channel=True,
                is_linear_per_channel=True,
            )
            model = _quantized_in_tree(quantizer, model, inputs, args.batches)
        quantize_cpu_s = tree_cpu_seconds(os.getpid()) - before
        options = utils.generate_htp_compiler_spec(use_fp16=not args.quantize)
        spec = utils.generate_qnn_executorch_compiler_spec(
            soc_model=getattr(QcomChipset, args.target), backend_options=options
        )
        edge = utils.to_edge_transform_and_lower_to_qnn(model, inputs, spec)
        program = edge.to_executorch()
        with Path(args.output).open("wb") as file:
            program.write_to_file(file)
        plan = program.executorch_program.execution_plan[0]
        return {
            "quantize_cpu_s": quantize_cpu_s,
            "delegates": len(plan.delegates),
            "cpu_ops": len(plan.operators),
        }

    return lower


def _quantized_in_tree(quantizer: Any, model: Any, inputs: tuple[Any, ...], batches: Any) -> Any:
    import torch
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    exported = torch.export.export(model, inputs, strict=True)
    prepared = prepare_pt2e(exported.module(), quantizer)
    with torch.no_grad():
        for batch in batches:
            prepared(*batch)
    return convert_pt2e(prepared)


def run_child(args: argparse.Namespace) -> None:
    """Loads the model, lowers it and writes the measurement as JSON to `args.result`."""
    import torch

    from executorch_qnn.llm.export import CALIBRATION_TEXT, calibration, example_inputs
    from executorch_qnn.llm.weights import load_model

    torch.set_num_threads(1)
    # Both compute in fp16; only ours takes a model that is stored so.
    half = args.side == "ours" and not args.quantize
    dtype = torch.float16 if half else torch.float32
    decoder, tokenizer = load_model(
        args.model, max_seq_len=args.max_seq_len, layers=args.layers, dtype=dtype
    )
    args.batches = None
    if args.quantize:
        text = calibration(decoder, tokenizer, (), CALIBRATION_TEXT)["forward"]
        args.batches = text[: args.calibration]
    lower = {"ours": _ours, "in-tree": _in_tree}[args.side]()
    retrace = torch.export.ExportedProgram.run_decompositions
    retraces: list[Any] = []

    def counted(*given: Any, **options: Any) -> Any:
        retraces.append(None)
        return retrace(*given, **options)

    torch.export.ExportedProgram.run_decompositions = counted  # type: ignore[method-assign]
    cpu, wall = tree_cpu_seconds(os.getpid()), time.monotonic()
    facts = lower(decoder, example_inputs(), args)
    facts["wall_s"] = time.monotonic() - wall
    facts["cpu_s"] = tree_cpu_seconds(os.getpid()) - cpu - facts["quantize_cpu_s"]
    facts["retraces"] = len(retraces)
    facts["peak_rss_bytes"] = peak_rss_bytes()
    facts["file_bytes"] = Path(args.output).stat().st_size
    Path(args.result).write_text(json.dumps(facts))


def finalize_facts(log: str) -> dict[str, Any]:
    """What QNN's compiler printed: seconds of its stages, and the DDR bytes of one execution."""
    found: dict[str, Any] = {
        "finalize_s": sum(map(int, re.findall(r"Completed stage: .* \((\d+) us\)", log))) / 1e6
    }
    for key in ("read", "write"):
        totals = re.findall(rf"^{key}_total_bytes=(\d+)", log, re.MULTILINE)
        found[f"ddr_{key}_bytes"] = sum(map(int, totals))
    return found


# ---------------------------------------------------------------- the pair


class PeakMemory:
    """Samples the memory of a process tree until it is stopped."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ended.wait(0.05):
            self.bytes = max(self.bytes, tree_rss_bytes(self._pid))

    def stop(self) -> int:
        self._ended.set()
        self._thread.join()
        return self.bytes


def measure(side: str, layers: int, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One lowering in a child process."""
    name = f"{side}-{layers}"
    result, log = folder / f"{name}.json", folder / f"{name}.log"
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if side == "in-tree":
        environment |= {"QNN_SDK_ROOT": "", "LD_LIBRARY_PATH": str(args.peer_libraries)}
    command = [sys.executable, __file__, "--child", side, "--layers", str(layers)]
    command += ["--model", args.model, "--max-seq-len", str(args.max_seq_len)]
    command += ["--target", args.target, "--qnn-libraries", str(args.qnn_libraries)]
    if args.quantize:
        command += ["--quantize", args.quantize, "--calibration", str(args.calibration)]
    command += ["--output", str(folder / f"{name}.pte"), "--result", str(result)]
    with log.open("wb") as stream:
        child = subprocess.Popen(command, env=environment, stdout=stream, stderr=stream)
        peak = PeakMemory(child.pid)
        code = child.wait()
        peak_tree = peak.stop()
    text = log.read_text(errors="replace")
    if code:
        raise SystemExit(f"{name} failed with {code}; the end of its log:\n{text[-3000:]}")
    facts: dict[str, Any] = json.loads(result.read_text())
    if side == "in-tree":
        facts |= finalize_facts(text)
    (folder / f"{name}.pte").unlink()
    return {"side": side, "layers": layers, "peak_tree_rss_bytes": peak_tree} | facts


def _qnn_s(measured: dict[str, Any]) -> float:
    """CPU seconds of QNN: those of its process for ours, what its stages state for in-tree."""
    stages: dict[str, float] = measured.get("stages_cpu_s", {})
    return float(stages.get("QNN's compiler", measured["finalize_s"]))


def _mega(count: float, unit: int = 1_000_000) -> str:
    return f"{count / unit:,.1f}"


ROWS: tuple[tuple[str, Callable[[dict[str, Any]], float], Callable[[float], str]], ...] = (
    ("quantizing, CPU s", lambda m: m["quantize_cpu_s"], lambda v: f"{v:.1f}"),
    ("lowering, CPU s", lambda m: m["cpu_s"], lambda v: f"{v:.1f}"),
    ("lowering without QNN's share, CPU s", lambda m: m["cpu_s"] - _qnn_s(m), lambda v: f"{v:.1f}"),
    ("retraces", lambda m: m["retraces"], lambda v: f"{v:.0f}"),
    ("lowering, wall s", lambda m: m["wall_s"], lambda v: f"{v:.1f}"),
    ("peak RSS, all processes, MB", lambda m: m["peak_tree_rss_bytes"], _mega),
    ("peak RSS, main process, MB", lambda m: m["peak_rss_bytes"], _mega),
    (".pte, MiB", lambda m: m["file_bytes"], lambda v: _mega(v, 1 << 20)),
    ("QNN's finalize, wall s", lambda m: m["finalize_s"], lambda v: f"{v:.1f}"),
    (
        "QNN's finalize, share of wall time",
        lambda m: 100 * m["finalize_s"] / m["wall_s"],
        lambda v: f"{v:.0f} %",
    ),
    ("DDR read per step, bytes", lambda m: m["ddr_read_bytes"], lambda v: f"{v:,.0f}"),
    ("DDR written per step, bytes", lambda m: m["ddr_write_bytes"], lambda v: f"{v:,.0f}"),
    ("delegates", lambda m: m["delegates"], lambda v: f"{v:.0f}"),
    ("ops left on the CPU", lambda m: m["cpu_ops"], lambda v: f"{v:.0f}"),
)


def markdown(measured: list[dict[str, Any]], layers: list[int]) -> str:
    """The measurements as a table, with the ratio of ours to in-tree."""
    by_key = {(m["side"], m["layers"]): m for m in measured}
    sides = [side for side in SIDES if any(m["side"] == side for m in measured)]
    paired = len(sides) == len(SIDES)
    head = ["", *(f"{side}, {n} layers" for n in layers for side in sides)]
    if paired:
        head = [""]
        for n in layers:
            head += [f"ours, {n} layers", "in-tree", "ratio"]
    rows = ROWS if any(m["quantize_cpu_s"] for m in measured) else ROWS[1:]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for title, value, show in rows:
        cells = [title]
        for n in layers:
            values = [value(by_key[side, n]) for side in sides]
            cells += [show(v) for v in values]
            if paired:
                ours, theirs = values
                cells.append(f"{ours / theirs:.2f}" if theirs else "")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _peer_libraries() -> Path:
    """The libraries that the in-tree backend works with, downloaded if need be."""
    command = [sys.executable, str(ROOT / "scripts" / "qairt.py"), PEER_RELEASE]
    return Path(subprocess.check_output(command, text=True).strip())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layers", default="2,8,30", help="default: %(default)s")
    parser.add_argument("--max-seq-len", type=int, default=128, help="default: %(default)s")
    parser.add_argument("--target", default="SM8650", help="default: %(default)s")
    parser.add_argument("--quantize", choices=("8a8w", "16a8w", "16a4w"), help="default: fp16")
    parser.add_argument(
        "--calibration", type=int, default=20, help="tokens to calibrate with; default: %(default)s"
    )
    parser.add_argument("--only", choices=SIDES, help="measure one side only")
    parser.add_argument("--qnn-libraries", help="for ours; default: the same as for the peer")
    parser.add_argument("--peer-libraries", help=f"of onnxruntime-qnn {PEER_RELEASE}")
    parser.add_argument("--json", metavar="FILE", help="write the measurements to this file")
    parser.add_argument("--markdown", metavar="FILE", help="write the table to this file")
    for internal in ("--child", "--output", "--result"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    return parser


def main() -> None:
    args = _parser().parse_args()
    if args.child:
        args.side, args.layers = args.child, int(args.layers)
        run_child(args)
        return
    layers = [int(part) for part in args.layers.split(",")]
    sides = [args.only] if args.only else list(SIDES)
    if not args.peer_libraries and ("in-tree" in sides or not args.qnn_libraries):
        args.peer_libraries = _peer_libraries()
    args.qnn_libraries = args.qnn_libraries or args.peer_libraries
    measured = []
    with tempfile.TemporaryDirectory(prefix="executorch-qnn-aot-") as folder:
        for n in layers:
            for side in sides:
                print(f"{side}, {n} layers ...", file=sys.stderr, flush=True)
                measured.append(measure(side, n, args, Path(folder)))
                print(f"  {measured[-1]}", file=sys.stderr, flush=True)
    table = markdown(measured, layers)
    print(table)
    document = {
        "model": args.model,
        "max_seq_len": args.max_seq_len,
        "target": args.target,
        "quantize": args.quantize,
        "machine": {"processor": platform.processor(), "cpus": os.cpu_count()},
        "load_average": os.getloadavg(),
        "versions": {
            name: version(name) for name in ("executorch-qnn", "executorch", "torch", "torchao")
        },
        "qnn_libraries": {"ours": str(args.qnn_libraries), "in-tree": str(args.peer_libraries)},
        "measurements": measured,
    }
    if args.json:
        Path(args.json).write_text(json.dumps(document, indent=1) + "\n")
    if args.markdown:
        Path(args.markdown).write_text(table + "\n")


if __name__ == "__main__":
    main()
