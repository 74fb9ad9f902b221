# SPDX-License-Identifier: BSD-3-Clause
"""What a cache update costs, by strategy and length: `scatter` against `delta`.

A decoder of attention layers (24 layers, 8 heads of 64 by default) is lowered with a method for
chunks of 64 positions and one for single tokens, over one cache.  Bytes are the totals that QNN's
`graphFinalize` states, which are the same on every machine; seconds are the simulator's.

    python benchmarks/state_updates.py [--lengths 512,2048,8192] [--run 512] [--layers 24] [--json]

`--run` executes the programs of these lengths, too: three chunks and then 32 tokens, compared with
eager PyTorch in fp32.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import executorch_qnn as qnn

CHUNK, CHUNKS, TOKENS = 64, 3, 32


class Layer(nn.Module):
    """Attention over a cache of `length` positions, and a residual sum."""

    k: Tensor
    v: Tensor

    def __init__(self, heads: int, depth: int, length: int) -> None:
        super().__init__()
        self.heads, width = heads, heads * depth
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(1, heads, length, depth))

    def forward(self, x: Tensor, at: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1)
        )
        self.k[:, :, at] = k
        self.v[:, :, at] = v
        y = nn.functional.scaled_dot_product_attention(q, self.k, self.v, attn_mask=mask)
        result: Tensor = x + self.out(y.transpose(1, 2).flatten(2))
        return result


class Decoder(nn.Module):
    """[1, T, width] and positions [T] to [1, T, width]."""

    def __init__(self, layers: int, heads: int, depth: int, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width, self.length = heads * depth, length
        self.layers = nn.ModuleList(Layer(heads, depth, length) for _ in range(layers))

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        seen = torch.arange(self.length) <= at[:, None]
        mask = torch.where(seen, 0.0, -math.inf)
        for layer in self.layers:
            x = layer(x, at, mask)
        return x


def lower(model: Decoder, strategy: str, libraries: str | None) -> qnn.Program:
    methods = {
        name: (model, (torch.zeros(1, n, model.width), torch.arange(n)))
        for name, n in (("prefill", CHUNK), ("decode", 1))
    }
    return qnn.lower(methods, target="SM8650", state_update=strategy, qnn_libraries=libraries)


def run(program: qnn.Program, model: Decoder, libraries: str | None) -> dict[str, float]:
    """Chunks, then tokens, beside eager: the worst call, and the worst element of the state."""
    eager = copy.deepcopy(model)
    worst, seconds = math.inf, {"prefill": 0.0, "decode": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pte"
        program.save(path)
        session = qnn.load(path, qnn_libraries=libraries)
        at = 0
        for name, n in [("prefill", CHUNK)] * CHUNKS + [("decode", 1)] * TOKENS:
            x = torch.randn(1, n, model.width, generator=torch.Generator().manual_seed(at))
            positions = torch.arange(at, at + n)
            with torch.no_grad():
                want = eager(x, positions)
            start = time.perf_counter()
            got = session.run(name, x, positions)
            seconds[name] += time.perf_counter() - start
            noise = (got - want).square().sum()
            worst = min(worst, 10 * math.log10(want.square().sum() / noise))
            at += n
        error = max(
            (session.read_state(fqn) - value).abs().max().item()
            for fqn, value in eager.named_buffers()
        )
    return {
        "worst_sqnr_db": worst,
        "worst_state_error": error,
        "prefill_s": seconds["prefill"] / CHUNKS,
        "decode_s": seconds["decode"] / TOKENS,
    }


def measure(strategy: str, length: int, args: argparse.Namespace, execute: bool) -> dict[str, Any]:
    model = Decoder(args.layers, args.heads, args.depth, length).eval()
    start = time.perf_counter()
    program = lower(model, strategy, args.qnn_libraries)
    row: dict[str, Any] = {
        "strategy": strategy,
        "length": length,
        "lower_s": time.perf_counter() - start,
        "state_bytes": sum(s.nbytes for s in program.report.methods["decode"].state),
    }
    for name, n in (("prefill", CHUNK), ("decode", 1)):
        (delegate,) = program.report.methods[name].delegates
        placed = 2 * args.layers * args.heads * args.depth * 2 * n
        row[name] = {
            "ddr_write_bytes": delegate.ddr_write_bytes,
            "ddr_read_bytes": delegate.ddr_read_bytes,
            "state_bytes_written": placed if strategy == "delta" else row["state_bytes"],
        }
    if execute:
        row["run"] = run(program, model, args.qnn_libraries)
    return row


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| positions | update | state, MB | method | state written, B | DDR written, B "
        "| DDR read, B | worst SQNR, dB |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        for name in ("prefill", "decode"):
            m, ran, state = row[name], row.get("run"), row["state_bytes"] / 1e6
            sqnr = f"{ran['worst_sqnr_db']:.1f}" if ran else ""
            lines.append(
                f"| {row['length']:,} | {row['strategy']} | {state:.1f} | {name} "
                f"| {m['state_bytes_written']:,} | {m['ddr_write_bytes']:,} "
                f"| {m['ddr_read_bytes']:,} | {sqnr} |"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="512,2048,8192")
    parser.add_argument("--run", default="512")
    parser.add_argument("--updates", default="scatter,delta")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--qnn-libraries")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    execute = {int(n) for n in args.run.split(",") if n}
    rows = []
    for length in (int(n) for n in args.lengths.split(",")):
        for strategy in args.updates.split(","):
            rows.append(measure(strategy, length, args, length in execute))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows, indent=1) if args.json else table(rows))


if __name__ == "__main__":
    main()
