# SPDX-License-Identifier: BSD-3-Clause
"""Writes docs/op_coverage.md: what becomes of each core ATen op, and of each op that stays whole.

    python scripts/op_coverage.py

Nothing on the page is written by hand. Samples of each op come from PyTorch's own database of ops;
each is put before the op table and then QNN's validator, as in a lowering, and the page says what
they did. Reasons for the CPU are those of `executorch_qnn.ops.cpu`.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import operator
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from executorch_qnn.compile.build import is_foldable
from executorch_qnn.compile.compiler import CompileWorker
from executorch_qnn.lowering.decompose import Opener, is_composite
from executorch_qnn.lowering.kernels import can_open, has_kernel
from executorch_qnn.ops.builder import Refused
from executorch_qnn.ops.cpu import why_on_cpu
from executorch_qnn.ops.registry import table
from executorch_qnn.partition.support import Support
from executorch_qnn.target import Target

PAGE = Path(__file__).resolve().parents[1] / "docs" / "op_coverage.md"
COMMAND = "python scripts/op_coverage.py"
DTYPES = {torch.float32: "float", torch.int64: "int", torch.bool: "bool"}
UNSEEN = "not sampled: see further_calls in scripts/op_coverage.py"
RANKS = range(7)
# How many samples of an entry of the database are called, how many calls of one op are taken from
# them, and how many of one op and dtype from all entries.
TRIED, SAMPLES, MOST = 10, 6, 24

aten = torch.ops.aten


# -- samples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One call of an ATen op, with small real tensors."""

    op: OpOverload
    args: Sequence[Any]
    kwargs: dict[str, Any]
    result: Any
    dtype: torch.dtype
    """What the sample is of: an index beside it may be of another type."""

    @property
    def leaves(self) -> list[Any]:
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def key(self) -> object:
        leaves, spec = pytree.tree_flatten((self.args, self.kwargs))
        shapes = (_shape(x) if isinstance(x, torch.Tensor) else repr(x) for x in leaves)
        return self.op, self.dtype, str(spec), tuple(shapes)

    @property
    def operands(self) -> list[torch.Tensor]:
        return [x for x in self.leaves if isinstance(x, torch.Tensor)]

    @property
    def rank(self) -> int:
        """The rank of the first operand."""
        return self.operands[0].dim()

    @property
    def has_rank(self) -> bool:
        """Whether others can be asked for: torch dies on recurrent layers of a wrong one."""
        row = table().get(self.op)
        return bool(self.operands) and (row is None or row.family != "recurrent")


def _shape(x: torch.Tensor) -> object:
    return tuple(x.shape), x.dtype


def core_ops() -> list[OpOverload]:
    """Every op of core ATen that a functional graph can have."""
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    found = []
    for name in sorted(names):
        packet, _, overload = name.removeprefix("aten::").partition(".")
        op = getattr(getattr(aten, packet), overload or "default")
        if torch.Tag.core in op.tags and not any(a.is_out for a in op._schema.arguments):
            found.append(op)
    return found


def further_calls(dtype: torch.dtype) -> Iterator[tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Calls that the database of ops does not make, or not at all ranks."""
    image, row = torch.ones(2, 3, 4, 4, dtype=dtype), torch.ones(4, 4, dtype=dtype)
    for more in ((1,), (2, 1)):
        x, n = image.expand(*more, *image.shape).clone(), len(more)
        yield aten.view.default, (x, [*more, 6, 1, 4, 4])
        yield aten.permute.default, (x, [n + 3, *range(n + 3)])
        yield aten.expand.default, (x, [*more[:-1], 2, *image.shape])
        yield aten.repeat.default, (x, [2, *more, 1, 3, 1])
    yield aten.copy.default, (image, image[:1])
    if dtype is torch.bool:
        return
    yield aten.pow.Scalar, (2.0, image)
    yield aten.scatter.value, (image, 1, image.long() - 1, 2)
    times = functools.partial(aten.scatter.value_reduce, reduce="multiply")
    yield times, (image, 1, image.long() - 1, 2)
    yield aten.searchsorted.Tensor, (row, row)
    if dtype is torch.int64:
        return
    once, none = [1, 1], [0, 0]
    depthwise = (torch.ones(3, 1, 2, 2), None, once, none, once, False, none, 3)
    yield aten.convolution.default, (image, *depthwise)
    yield aten.upsample_nearest2d.default, (image, [8, 8])
    yield aten.upsample_bilinear2d.default, (image, [8, 8], False)
    yield aten._upsample_bicubic2d_aa.default, (image, [3, 2], False)
    yield aten._upsample_nearest_exact3d.default, (image[None], [2, 8, 8])
    yield aten.full.default, ([2, 3], 1.0)
    yield aten.scalar_tensor.default, (1.0,)
    yield aten.fill.Scalar, (image, 2.0)
    yield aten.reflection_pad3d.default, (image, [1] * 6)
    yield aten.replication_pad3d.default, (image, [1] * 6)
    batch_norm = aten._native_batch_norm_legit_no_training.default
    yield batch_norm, (image, *[torch.ones(2)] * 4, 0.1, 1e-5)
    yield batch_norm, (row, *[torch.ones(4)] * 4, 0.1, 1e-5)
    yield aten.rrelu_with_noise_functional.default, (image, image, 0.1, 0.3, False)
    x, h = torch.ones(3, 2, 4), torch.ones(1, 2, 5)
    for op, gates in ((aten.gru.input, 3), (aten.rnn_tanh.input, 1), (aten.rnn_relu.input, 1)):
        weights = [torch.ones(gates * 5, 4), torch.ones(gates * 5, 5)]
        yield op, (x, h, weights, False, 1, 0.0, False, False, False)
    weights = [torch.ones(20, 4), torch.ones(20, 5)]
    yield aten.lstm.input, (x, [h, h], weights, False, 1, 0.0, False, False, False)
    yield aten.col2im.default, (torch.ones(1, 8, 4), [3, 3], [2, 2], [1, 1], [0, 0], [1, 1])


class _Above(SchemaCheckMode):
    """Shows calls of composite ops, too; torch lets only this class look before the dispatch."""

    def __init__(self, see: Callable[..., None]) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)
        self.see = see

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.see(func, args, kwargs or {}, result)
        return result


class _Below(TorchDispatchMode):
    """Shows calls of the ops that composite ones consist of."""

    def __init__(self, see: Callable[..., None]) -> None:
        TorchDispatchMode.__init__(self)
        self.see = see

    __torch_dispatch__ = _Above.__torch_dispatch__


def sample(ops: Iterable[OpOverload]) -> list[Call]:
    """Some calls of each op, of each dtype; none has a tensor without elements."""
    from torch.testing._internal.common_methods_invocations import op_db

    wanted = set(ops)
    calls: dict[object, Call] = {}
    in_all: Counter[object] = Counter()
    in_entry: Counter[OpOverload] = Counter()
    dtype = torch.float32

    def see(op: OpOverload, args: Any, kwargs: Any, result: Any) -> None:
        if op not in wanted or in_entry[op] == SAMPLES or in_all[op, dtype] == MOST:
            return
        call = Call(op, args, kwargs, result, dtype)
        tensors = [*call.operands, *pytree.tree_leaves(result)[:1]]
        usable = all(_is_tensor(t) and t.numel() and not t.is_complex() for t in tensors)
        if usable and call.key not in calls:
            in_all[op, dtype] += 1
            in_entry[op] += 1
            with _disable_current_modes():  # as it is now: it may be written to later
                args, kwargs, result = pytree.tree_map_only(
                    torch.Tensor, torch.clone, (args, kwargs, result)
                )
            calls[call.key] = Call(op, args, kwargs, result, dtype)

    with torch.no_grad(), enable_python_dispatcher(), _Above(see), _Below(see):
        for dtype in DTYPES:
            for op, args in further_calls(dtype):
                in_entry.clear()
                op(*args)
        for entry in op_db:
            before = len(calls)
            for dtype in DTYPES:
                if dtype not in entry.dtypes:
                    continue
                torch.manual_seed(0)
                in_entry.clear()
                # Not `sample_inputs`, which looks through the call stack for a test.
                samples = entry.sample_inputs_func(entry, "cpu", dtype, requires_grad=False)
                for s in itertools.islice(samples, TRIED):
                    with contextlib.suppress(Exception):  # some need more than a call
                        entry.op(s.input, *s.args, **s.kwargs)
                if len(calls) == before:
                    break  # nothing of interest in it
    return list(calls.values())


def _is_tensor(x: object) -> bool:
    return isinstance(x, torch.Tensor)


def at_rank(call: Call, rank: int) -> Iterator[Call]:
    """The same with axes of length one before, or without the first ones.

    Both of all operands, and of the first alone.
    """
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = [i for i, x in enumerate(leaves) if _is_tensor(x)]
    more, fewer = (1,) * (rank - call.rank), (0,) * (call.rank - rank)
    for changed in (places, places[:1]):
        new = list(leaves)
        for i in changed:
            new[i] = leaves[i].reshape((*more, *leaves[i].shape))[fewer[: leaves[i].dim()]]
        args, kwargs = pytree.tree_unflatten(new, spec)
        try:
            yield Call(call.op, args, kwargs, call.op(*args, **kwargs), call.dtype)
        except Exception:  # not an op of any rank
            continue


# -- what becomes of them ----------------------------------------------------------------------


@dataclass
class Verdict:
    """What the op table and QNN made of a call.

    Attributes:
        types: QNN ops; `None` if it is refused.
        reasons: why it is refused, or what it had to be given up for.
        fault: what went wrong in the op table, which should have refused it.
    """

    types: list[str] | None = None
    reasons: list[str] = field(default_factory=list)
    fault: str = ""


Sample: TypeAlias = tuple[Call, Verdict]


def judge(calls: Sequence[Call], worker: CompileWorker) -> list[Verdict]:
    """Asks about every call, and where it is refused once more in easier forms."""
    verdicts = [Verdict() for _ in calls]
    for first_output, known in ((False, False), (True, False), (False, True), (True, True)):
        graph = torch.fx.Graph()
        constants: dict[str, torch.Tensor] = {}
        nodes: dict[torch.fx.Node, int] = {}
        for i, call in enumerate(calls):
            if verdicts[i].types is None and not verdicts[i].fault:
                nodes[_node(graph, call, first_output, known, constants)] = i
        support = Support(graph, constants, worker)
        types: dict[torch.fx.Node, list[str]] = {}
        reasons: dict[torch.fx.Node, str | None] = {}
        for node in nodes:
            try:
                types[node] = [op.type for op in support.emit(node)]
            except Refused as e:
                reasons[node] = str(e)
            except Exception as e:
                verdicts[nodes[node]].fault = f"{type(e).__name__}: {e}"
        for node, reason in {**reasons, **support.verdicts(list(types))}.items():
            verdict = verdicts[nodes[node]]
            if reason is None:
                verdict.types = types[node]
            elif reason not in verdict.reasons:
                verdict.reasons.append(reason)
    return verdicts


def _node(
    graph: torch.fx.Graph,
    call: Call,
    first_output: bool,
    known: bool,
    constants: dict[str, torch.Tensor],
) -> torch.fx.Node:
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    new = []
    seen = False
    for x in leaves:
        if isinstance(x, torch.Tensor):
            operand = graph.placeholder(f"operand_{len(graph.nodes)}")
            operand.meta["val"] = x
            if known and seen:
                constants[operand.name] = x
            x, seen = operand, True
        new.append(x)
    args, kwargs = pytree.tree_unflatten(new, spec)
    node = graph.call_function(call.op, args, kwargs)
    node.meta["val"] = call.result
    if isinstance(call.result, (tuple, list)):
        for i in range(1 if first_output else len(call.result)):
            graph.call_function(operator.getitem, (node, i))
    return node


def pieces(call: Call, opener: Opener, mode: FakeTensorMode) -> list[OpOverload]:
    """The ops that a lowering makes of a composite one."""
    fake = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (call.args, call.kwargs))
    with mode:
        call = replace(call, args=fake[0], kwargs=fake[1], result=call.op(*fake[0], **fake[1]))
    graph = torch.fx.Graph()
    _node(graph, call, False, False, {})
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    pending = gm.graph.find_nodes(op="call_function", target=call.op)
    found = []
    while pending:
        node = pending.pop(0)
        if node.op != "call_function" or not isinstance(op := node.target, OpOverload):
            continue
        if op is call.op or (op not in opener.keep and is_composite(op)):
            pending = opener.open(gm, node) + pending
        else:
            found.append(op)
    return found


# -- the page ----------------------------------------------------------------------------------

ABOUT = f"""\
# Op coverage

Generated by `{COMMAND}`; a test fails when it is out of date. Each line was
observed: samples from PyTorch's database of ops were put before the op table and QNN's validator
for SM8650.

- Floats (float32, float16, bfloat16, float64) are computed in fp16, integers (int64, int32) in
  int32; other types stay on the CPU, and so does what has no elements.
- QNN ops in parentheses appear in some forms only.
- *Ranks* are those of the first operand, for the types of the column before it.
- A refused form runs on the CPU, with this reason in the report; `fallback="error"` makes it an
  error.
"""


def name(op: OpOverload) -> str:
    return str(op).removeprefix("aten.").removesuffix(".default")


def names(ops: Iterable[OpOverload]) -> str:
    return ", ".join(f"`{name(op)}`" for op in ops)


def row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def heading(*cells: str) -> list[str]:
    return [row(cells), "|" + "---|" * len(cells)]


def lowered(samples: Sequence[Sample]) -> list[str]:
    """The tables of what is lowered: a line for each function of the op table."""
    rules: dict[Any, list[OpOverload]] = {}
    for op, r in table().items():
        rules.setdefault((r.family, r.rule), []).append(op)
    seen: dict[OpOverload, list[Sample]] = {}
    for call, verdict in samples:
        seen.setdefault(call.op, []).append((call, verdict))
    lines = []
    for family in sorted({family for family, _ in rules}):
        lines += [f"## {family}", ""]
        lines += heading("ATen ops", "QNN ops", "types", "ranks", "refused")
        mine = [sorted(ops, key=str) for (f, _), ops in rules.items() if f == family]
        for ops in sorted(mine, key=str):
            lines.append(row((names(ops), *_observed([s for op in ops for s in seen.get(op, ())]))))
        lines.append("")
    return lines


def _observed(samples: Sequence[Sample]) -> tuple[str, str, str, str]:
    if not samples:
        return UNSEEN, "", "", ""
    good = [(c, v.types) for c, v in samples if v.types is not None]
    ops = dict.fromkeys(t for _, types in good for t in types)
    always = [t for t in ops if all(t in types for _, types in good)]
    others = ", ".join(t for t in ops if t not in always)
    becomes = ", ".join(always) + (f" ({others})" if always and others else others)
    accepted = {c.dtype for c, _ in good}
    reasons: dict[str, str] = {}  # by what is the same in reasons that differ in numbers
    for c, v in samples:
        for reason in v.reasons:
            if refused := re.match(r"QNN refuses (\w+):", reason):
                some = c.dtype in accepted
                reason = "QNN refuses some forms of " if some else f"QNN has no {DTYPES[c.dtype]} "
                reason += refused[1]
            reasons.setdefault(re.sub(r"-?[0-9][0-9.]*", "", reason), reason)
    return (
        becomes or ("a constant" if good else ""),
        ", ".join(text for dtype, text in DTYPES.items() if dtype in accepted),
        spans({c.rank for c, _ in good if c.has_rank}),
        "; ".join(reasons.values()),
    )


def spans(numbers: Iterable[int]) -> str:
    """`{0, 1, 2, 4}` as `0-2, 4`."""
    parts: list[list[int]] = []
    for n in sorted(numbers):
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else f"{p[0]}" for p in parts)


def page(samples: Sequence[Sample]) -> str:
    """The text of docs/op_coverage.md."""
    rows, core = table(), core_ops()
    others = [op for op in core if op not in rows]
    constant = [op for op in others if not has_operands(op) and is_foldable(op)]
    opened = [op for op in others if op not in constant and is_opened(op)]
    cpu = [op for op in others if op not in constant and op not in opened]
    kept = sorted((op for op, r in rows.items() if r.keep), key=str)
    lines = [
        ABOUT,
        f"Of {len(core)} core ATen ops {len(core) - len(others)} are lowered, {len(opened)} are "
        f"decomposed first, {len(constant)} are constants, {len(cpu)} run on the CPU.\n"
        f"{len(kept)} composite ops are lowered whole: {names(kept)}.",
        "",
        *lowered(samples),
        "## Decomposed first",
        "",
        *heading("ATen op", "into"),
    ]
    opener, mode = Opener(kept), FakeTensorMode()
    for op in opened:
        call = next((c for c, _ in samples if c.op is op), None)
        lines.append(row((names([op]), UNSEEN if call is None else _into(call, opener, mode))))
    lines += ["", "## Constants", "", f"Computed when the model is lowered: {names(constant)}.", ""]
    lines += ["## On the CPU", "", *heading("ATen ops", "why, and what to do")]
    reasons: dict[str, list[OpOverload]] = {}
    for op in cpu:
        kernel = "" if has_kernel(op) else ". ExecuTorch's runtime has no kernel for it either"
        reasons.setdefault(why_on_cpu(op) + kernel, []).append(op)
    lines += [row((names(ops), why)) for why, ops in reasons.items()]
    return "\n".join(lines) + "\n"


def has_operands(op: OpOverload) -> bool:
    return any("Tensor" in str(a.type) for a in op._schema.arguments)


def is_opened(op: OpOverload) -> bool:
    """Whether a lowering replaces `op`, which has no row, by what it consists of."""
    if name(op).endswith("_backward"):
        return False  # why it cannot be matters more than that it is
    return is_composite(op) or (not has_kernel(op) and can_open(op))


def _into(call: Call, opener: Opener, mode: FakeTensorMode) -> str:
    found = list(dict.fromkeys(pieces(call, opener, mode)))
    left = [op for op in found if op not in table() and has_operands(op)]
    return names(found) + (f"; on the CPU: {names(left)}" if left else "")


def observe() -> list[Sample]:
    """Samples of every op that the page speaks of, and what became of them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        calls = sample([*table(), *core_ops()])
    with CompileWorker(Target("SM8650")) as worker:
        found = list(zip(calls, judge(calls, worker), strict=True))
        taken = {(c.op, c.rank) for c, v in found if v.types is not None and c.has_rank}
        more: dict[tuple[OpOverload, int], list[Call]] = {}
        for call, v in found:
            for rank in RANKS if v.types is not None and call.has_rank else ():
                others = more.setdefault((call.op, rank), [])
                if (call.op, rank) not in taken and len(others) < SAMPLES:
                    others.extend(at_rank(call, rank))
        calls = [c for cs in more.values() for c in cs]
        longer = zip(calls, judge(calls, worker), strict=True)
        return [*found, *((c, v) for c, v in longer if not v.fault)]  # some make no sense


def faults(samples: Sequence[Sample]) -> list[str]:
    """Calls on which a function of the op table fails, where it should refuse."""
    return [f"{c.op} of {[*map(_shape, c.operands)]}: {v.fault}" for c, v in samples if v.fault]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default: %(default)s")
    out = parser.parse_args().out
    samples = observe()
    out.write_text(page(samples))
    if found := faults(samples):
        sys.exit("the op table fails on:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
