# SPDX-License-Identifier: BSD-3-Clause
"""The demo behind `scripts/demo`: two commands of ours, then the same prompt on eager PyTorch."""

from __future__ import annotations

import argparse
import codecs
import itertools
import json
import re
import shlex
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

MODEL = "smollm2-135m"
MAX_SEQ_LEN = 128
COMMAND = [sys.executable, "-m", "executorch_qnn.cli"]


def say(text: str) -> None:
    print(f"\n\x1b[1m{text}\x1b[0m" if sys.stderr.isatty() else f"\n{text}", file=sys.stderr)


def export(program: Path, layers: int | None) -> dict[str, Any]:
    """Runs `llm export`; returns its JSON document."""
    command = [*COMMAND, "llm", "export", "--model", MODEL, "--max-seq-len", str(MAX_SEQ_LEN)]
    command += ["--layers", str(layers)] if layers else []
    command += ["-o", str(program)]
    say(f"$ executorch-qnn {shlex.join(command[3:])}")
    done = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def generate(program: Path, prompt: str, count: int) -> tuple[list[int], float]:
    """Runs `llm generate`, shows its text as it comes; returns its tokens and when text began."""
    command = [*COMMAND, "llm", "generate", str(program), "--prompt", prompt]
    command += ["--max-new-tokens", str(count)]
    say(f"$ executorch-qnn {shlex.join(command[3:])}")
    print(prompt, end="", flush=True)
    first = 0.0
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    with subprocess.Popen(
        [*command, "--verbose"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        while piece := child.stdout.read1(4096):  # type: ignore[attr-defined]
            first = first or time.time()
            print(decode(piece), end="", flush=True)
        told = child.stderr.read().decode()
    if child.returncode:
        sys.exit(told)
    tokens = re.search(r"^tokens: (\[.*\])$", told, re.MULTILINE)
    assert tokens is not None, told
    return json.loads(tokens[1]), first


def eager(prompt: str, count: int, layers: int | None) -> list[int]:
    """What the model in fp32 on PyTorch generates."""
    from executorch_qnn.llm.generate import Generator
    from executorch_qnn.llm.weights import load_model

    decoder, tokenizer = load_model(MODEL, max_seq_len=MAX_SEQ_LEN, layers=layers)
    generator = Generator(decoder, tokenizer, max_context=MAX_SEQ_LEN)
    return generator.generate(prompt, max_new_tokens=count).tokens


def summary(exported: dict[str, Any]) -> list[str]:
    """What became of the model, in lines."""
    method = exported["report"]["methods"]["forward"]
    state = method["state"]
    owned = [entry for entry in state if entry["owner"] == "delegate"]
    bindings = Counter(entry["binding"] for entry in owned)
    how = ", ".join(f"{count} {binding}" for binding, count in bindings.items())
    return [
        f"{len(method['delegates'])} delegate(s), {len(method['cpu_ops'])} ops on the CPU",
        f"{len(state)} state buffers: {len(owned)} owned by the delegate ({how})",
        f"{exported['file']}: {exported['bytes'] / 2**20:.1f} MiB",
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=(__doc__ or "").strip())
    parser.add_argument("--quick", action="store_true", help="four layers instead of all thirty")
    parser.add_argument("--layers", type=int, help="keep the first N layers")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=12, help="how many (default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=Path(".cache/demo"), help="for the program")
    parser.add_argument("--started", type=float, default=time.time(), help=argparse.SUPPRESS)
    args = parser.parse_args()
    layers = args.layers or (4 if args.quick else None)

    args.folder.mkdir(parents=True, exist_ok=True)
    program = args.folder / f"{MODEL}{f'-{layers}' if layers else ''}.pte"
    exported = export(program, layers)
    print("\n".join(summary(exported)))
    tokens, first = generate(program, args.prompt, args.tokens)
    print(f"\nfirst word {first - args.started:.0f} s after the start of this script")

    say("the same prompt on eager PyTorch, fp32")
    expected = eager(args.prompt, args.tokens, layers)
    same = sum(
        1
        for _ in itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(tokens, expected, strict=False)
        )
    )
    print(f"greedy tokens equal to eager's: {same} of {len(expected)}")
    # A cut model's logits are close to each other: fp16 may well pick another token.
    return 0 if layers or same >= min(8, len(expected)) else 1


if __name__ == "__main__":
    sys.exit(main())
