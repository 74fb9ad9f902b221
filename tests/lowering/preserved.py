# SPDX-License-Identifier: BSD-3-Clause
"""Ops that a partitioner may want whole, where they stand in a model, and who asks for them.

`ROWS` is the table of `test_preserved_ops.py` and of `docs/preserved_ops.md`.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import torch
import torch.nn.functional as F
from executorch.exir import EdgeProgramManager
from executorch.exir.backend.backend_details import BackendDetails, PreprocessResult
from executorch.exir.backend.canonical_partitioners.pattern_op_partitioner import (
    generate_partitions_from_list_of_nodes,
)
from executorch.exir.backend.partitioner import DelegationSpec, Partitioner, PartitionResult
from executorch.exir.graph_module import get_control_flow_submodules
from executorch.exir.lowered_backend_module import get_lowered_backend_modules
from torch import Tensor, nn
from torch._higher_order_ops.while_loop import while_loop
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.utils import _pytree as pytree
from torchao.quantization.pt2e import MinMaxObserver
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
from torchao.quantization.pt2e.quantizer import (
    QuantizationAnnotation,
    QuantizationSpec,
    Quantizer,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

Call: TypeAlias = Callable[..., Any]
Shape: TypeAlias = tuple[int, ...]
Accept: TypeAlias = Callable[[torch.fx.Node], bool]


@dataclass(frozen=True)
class Row:
    """An op to ask for, and a call that `torch.export` makes it of.

    Attributes:
        op: what a partitioner asks for.
        twin: what stands for it in a functional graph; `None` if the request must be refused.
        call: from a value of `shape` (written to, if `op` does) and the tensors in `extra`.
        extra: shapes of further float operands, or integer operands themselves.
        quantizes: whether the row is part of the quantized graph.
    """

    name: str
    op: OpOverload
    twin: OpOverload | None
    call: Call
    shape: Shape
    extra: tuple[Shape | Tensor, ...]
    quantizes: bool = True

    @property
    def in_place(self) -> bool:
        return self.op._schema.is_mutable and not any(a.is_out for a in self.op._schema.arguments)

    @property
    def outcome(self) -> str:
        """What becomes of the request, as `docs/preserved_ops.md` says it."""
        if self.twin is None:
            return "refused with a message"
        name = edge_name(self.twin)
        same = name_of(self.op) in (name, name.replace("_copy.", "."))
        return "kept" if same else f"kept as `{name}`"

    def value(self, seed: int = 0) -> Tensor:
        return _randn(self.shape, seed)

    def operands(self) -> list[Tensor]:
        return [
            _randn(e, i + 7) if isinstance(e, tuple) else e.clone()
            for i, e in enumerate(self.extra)
        ]


def _randn(shape: Shape, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def op(name: str) -> OpOverload:
    """`op("view.default")` is `torch.ops.aten.view.default`."""
    packet, overload = name.split(".")
    found: OpOverload = getattr(getattr(torch.ops.aten, packet), overload)
    return found


def name_of(target: Any) -> str:
    """`view_copy.default`, of an op of the ATen or the edge dialect; empty for anything else."""
    schema = getattr(target, "_schema", None)
    if schema is None:
        return ""
    return f"{schema.name.split('::')[1]}.{schema.overload_name or 'default'}"


def edge_name(twin: OpOverload) -> str:
    """What an op is called in the edge dialect, which copies every view."""
    packet, overload = name_of(twin).split(".")
    view = any(r.alias_info for r in twin._schema.returns)
    return f"{packet}_copy.{overload}" if view else f"{packet}.{overload}"


_I, _SWAP = torch.tensor([2, 0]), torch.tensor([1, 0])
_IMAGE = (1, 4, 6, 6)
_V = (2, 4, 6)


def _row(
    asked: str,
    call: Call,
    shape: Shape = _V,
    *extra: Shape | Tensor,
    twin: str | None = "",
    quantizes: bool = True,
) -> Row:
    asked_op = op(asked)
    twin_op = None if twin is None else op(twin) if twin else asked_op
    return Row(asked, asked_op, twin_op, call, shape, extra, quantizes)


def _in_place(asked: str, call: Call, *extra: Shape | Tensor, twin: str = "") -> Row:
    packet, overload = asked.split(".")
    default = f"{packet.removesuffix('_')}.{overload}"
    return _row(asked, call, _V, *extra, twin=twin or default, quantizes=False)


ROWS: tuple[Row, ...] = (
    # views
    _row("view.default", lambda x: x.view(8, 6)),
    _row("reshape.default", lambda x: x.reshape(4, 12), twin="view.default"),
    _row("flatten.using_ints", lambda x: x.flatten(1), twin="view.default"),
    _row("unflatten.int", lambda x: x.unflatten(2, (2, 3)), twin="view.default"),
    _row("permute.default", lambda x: x.permute(2, 0, 1)),
    _row("movedim.intlist", lambda x: x.movedim((0, 1), (2, 0)), twin="permute.default"),
    _row("movedim.int", lambda x: x.movedim(0, 2), twin="permute.default"),
    _row("transpose.int", lambda x: x.transpose(1, 2)),
    _row("swapaxes.default", lambda x: x.swapaxes(0, 1), twin="transpose.int"),
    _row("t.default", lambda x: x.t(), (4, 6)),
    _row("unsqueeze.default", lambda x: x.unsqueeze(1)),
    _row("squeeze.dim", lambda x: x.squeeze(1), (2, 1, 4)),
    _row("squeeze.dims", lambda x: x.squeeze((1, 3)), (2, 1, 4, 1)),
    _row("expand.default", lambda x: x.expand(2, 4, 6), (2, 1, 6)),
    _row("expand_as.default", lambda x, y: x.expand_as(y), (2, 1, 6), _V, twin="expand.default"),
    _row("broadcast_to.default", lambda x: x.broadcast_to(3, 4, 6), (4, 6), twin="expand.default"),
    _row("slice.Tensor", lambda x: x[:, 1:3]),
    _row("narrow.default", lambda x: x.narrow(1, 1, 2), twin="slice.Tensor"),
    _row("select.int", lambda x: x.select(1, 2)),
    _row("unfold.default", lambda x: x.unfold(2, 3, 2)),
    _row("diagonal.default", lambda x: x.diagonal(0, 1, 2)),
    _row("as_strided.default", lambda x: x.as_strided((2, 3), (6, 1))),
    # splits
    _row("split.Tensor", lambda x: x.split(2, 1)),
    _row("chunk.default", lambda x: x.chunk(3, 2), twin="split.Tensor"),
    _row("split_with_sizes.default", lambda x: x.split_with_sizes((1, 3), 1)),
    _row("unbind.int", lambda x: x.unbind(1)),
    # in-place
    _in_place("hardswish_.default", lambda x: F.hardswish(x, inplace=True)),
    _in_place("silu_.default", lambda x: F.silu(x, inplace=True)),
    _in_place("leaky_relu_.default", lambda x: F.leaky_relu(x, 0.1, inplace=True)),
    _in_place("elu_.default", lambda x: F.elu(x, inplace=True)),
    _in_place("add_.Tensor", lambda x, y: x.add_(y), _V),
    _in_place("mul_.Tensor", lambda x, y: x.mul_(y), _V),
    _in_place("index_put_.default", lambda x, i, y: x.index_put_((i,), y), _SWAP, _V),
    _in_place("index_copy_.default", lambda x, i, y: x.index_copy_(1, i, y), _I, (2, 2, 6)),
    _in_place("copy_.default", lambda x, y: x.copy_(y).mul_(2.0), (4, 6)),
    _in_place("fill_.Scalar", lambda x: x.fill_(0.25)),
    _in_place("zero_.default", lambda x: x.zero_()),
    _in_place("masked_fill_.Scalar", lambda x, m: x.masked_fill_(m, 0.5), torch.eye(4, 6) > 0),
    _in_place("scatter_.src", lambda x, i, y: x.scatter_(1, i, y), _I.view(1, 2, 1), _V),
    _in_place("clamp_.default", lambda x: x.clamp_(-0.5, 0.5)),
    # composite
    _row("linear.default", F.linear, (2, 6), (5, 6), (5,)),
    _row("matmul.default", torch.matmul, _V, (6, 3)),
    _row("einsum.default", lambda x, y: torch.einsum("bij,kj->bik", x, y), _V, (3, 6)),
    _row("baddbmm.default", lambda x, a, b: torch.baddbmm(x, a, b), (2, 4, 3), _V, (2, 6, 3)),
    _row("conv2d.default", lambda x, w, b: F.conv2d(x, w, b), _IMAGE, (3, 4, 3, 3), (3,)),
    _row(
        "scaled_dot_product_attention.default",
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (1, 2, 4, 6), (1, 2, 4, 6), (1, 2, 4, 6),
    ),
    _row("softmax.int", lambda x: F.softmax(x, -1)),
    _row("log_softmax.int", lambda x: F.log_softmax(x, 1)),
    _row("silu.default", F.silu),
    _row("gelu.default", F.gelu),
    _row("hardswish.default", F.hardswish),
    _row("hardsigmoid.default", F.hardsigmoid),
    _row("elu.default", F.elu),
    _row("leaky_relu.default", F.leaky_relu),
    _row("softplus.default", F.softplus),
    _row("mish.default", F.mish),
    _row("prelu.default", F.prelu, _V, (4,)),
    _row("glu.default", F.glu),
    _row("tile.default", lambda x: x.tile((1, 2, 2))),
    _row("stack.default", lambda x, y: torch.stack((x, y, x), 1), _V, _V),
    _row("pad.default", lambda x: F.pad(x, (1, 2), value=0.5)),
    _row("roll.default", lambda x: x.roll(1, 2)),
    _row("triu.default", lambda x: x.triu(1)),
    _row("repeat_interleave.self_int", lambda x: x.repeat_interleave(2, 1)),
    _row("linalg_vector_norm.default", lambda x: torch.linalg.vector_norm(x, dim=-1)),
    _row("slice_scatter.default", lambda x, y: x.slice_scatter(y, 1, 1, 3), _V, (2, 2, 6)),
    _row("select_scatter.default", lambda x, y: x.select_scatter(y, 1, 2), _V, (2, 6)),
    _row("index_put.default", lambda x, i, y: x.index_put((i,), y), _V, _SWAP, _V),
    _row("index_copy.default", lambda x, i, y: x.index_copy(1, i, y), _V, _I, (2, 2, 6)),
    _row("masked_fill.Scalar", lambda x, m: x.masked_fill(m, 0.5), _V, torch.eye(4, 6) > 0),
    _row("embedding.default", lambda w, i: F.embedding(i, w), (5, 3), _I.view(1, 2)),
    # images
    _row("max_pool2d.default", lambda x: F.max_pool2d(x, 2), _IMAGE),
    _row("adaptive_avg_pool2d.default", lambda x: F.adaptive_avg_pool2d(x, 2), _IMAGE),
    _row("upsample_bilinear2d.vec", lambda x: F.interpolate(x, None, 2.0, "bilinear"), _IMAGE),
    _row("upsample_nearest2d.vec", lambda x: F.interpolate(x, None, 2.0), _IMAGE),
    _row("pixel_shuffle.default", lambda x: F.pixel_shuffle(x, 2), (1, 8, 3, 3)),
    _row("pixel_unshuffle.default", lambda x: F.pixel_unshuffle(x, 2), _IMAGE),
    _row("channel_shuffle.default", lambda x: F.channel_shuffle(x, 2), _IMAGE),
    _row("im2col.default", lambda x: F.unfold(x, 2), _IMAGE),
    # norms
    _row("layer_norm.default", lambda x, w, b: F.layer_norm(x, (6,), w, b), _V, (6,), (6,)),
    _row("rms_norm.default", lambda x, w: F.rms_norm(x, (6,), w), _V, (6,)),
    _row("group_norm.default", lambda x, w, b: F.group_norm(x, 2, w, b), _IMAGE, (4,), (4,)),
    _row("instance_norm.default", F.instance_norm, _IMAGE),
    _row(
        "batch_norm.default",
        lambda x, m, v: F.batch_norm(x, m, v.abs()),
        _IMAGE, (4,), (4,),
        twin="_native_batch_norm_legit_no_training.default",
        quantizes=False,  # PT2E spends half a minute on patterns with it
    ),
    # what no functional graph has
    _row("dropout.default", lambda x: F.dropout(x, training=False) * 1.0, twin=None),
    _row("detach.default", lambda x: x.detach() * 1.0, twin=None),
    _row("add.out", lambda x: x + 1.0, twin=None),
    _row("hsplit.int", lambda x: x.hsplit(2), twin=None),
)  # fmt: skip


CONTEXTS = ("value", "buffer", "cond", "nested cond", "while_loop")


class InContexts(nn.Module):
    """Calls every row in each of the contexts, and puts out what it computes.

    `value` is an input; `buffer` a mutable buffer, before and after its update.  The inputs are two
    flags, for the branches to take, and the value of each row.
    """

    CALLS: ClassVar = {"value": 1, "buffer": 2, "cond": 1, "nested cond": 2, "while_loop": 1}
    """How often a row is called in the graphs of a context."""

    def __init__(self, rows: Sequence[Row], contexts: Sequence[str] = CONTEXTS) -> None:
        super().__init__()
        self.rows = tuple(rows)
        self.contexts = frozenset(contexts)
        for i, row in enumerate(rows):
            self.register_buffer(f"state{i}", row.value(i + 100))
            for k, operand in enumerate(row.operands()):
                self.register_buffer(f"extra{i}_{k}", operand)
            results = pytree.tree_leaves(row.call(row.value(), *row.operands()))
            for k, result in enumerate(results):
                self.register_buffer(f"two{i}_{k}", torch.full(result.shape, 2.0))

    def forward(self, first: Tensor, second: Tensor, *xs: Tensor) -> list[Tensor]:
        out: list[Tensor] = []
        if "value" in self.contexts:
            out += self._all([x + 0.5 if r.in_place else x for r, x in self._with(xs)])
        if "buffer" in self.contexts:
            states = [self.get_buffer(f"state{i}") for i in range(len(self.rows))]
            out += self._all(states)
            for state, x in zip(states, xs, strict=True):
                state.mul_(0.5)
                state.add_(x)
            out += self._all(states)
        if {"cond", "nested cond"} & self.contexts:
            out += _cond(first, self._deeper(second), self._plus(2.0), xs)
        if "while_loop" in self.contexts:
            out += self._loop(xs)
        return out

    def _with(self, xs: Sequence[Tensor]) -> Iterator[tuple[Row, Tensor]]:
        return zip(self.rows, xs, strict=True)

    def _all(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of all rows, none of them a view of a value.

        Their sizes are those of a buffer: what control flow returns has to be of a size that torch
        knows, and it takes those of values for dynamic there.
        """
        results = []
        for i, (row, x) in enumerate(self._with(xs)):
            extra = [self.get_buffer(f"extra{i}_{k}") for k in range(len(row.extra))]
            values = pytree.tree_leaves(row.call(x, *extra))
            results += [self.get_buffer(f"two{i}_{k}") * v for k, v in enumerate(values)]
        return results

    def _plus(self, number: float) -> Callable[..., tuple[Tensor, ...]]:
        return lambda *xs: tuple(self._all([x + number for x in xs]))

    def _deeper(self, flag: Tensor) -> Callable[..., tuple[Tensor, ...]]:
        if "nested cond" not in self.contexts:
            return self._plus(1.0)
        return lambda *xs: _cond(flag, self._plus(1.0), self._plus(-1.0), xs)

    def _loop(self, xs: Sequence[Tensor]) -> list[Tensor]:
        n = len(xs)
        twos = [b for name, b in self.named_buffers() if name.startswith("two")]

        def body(i: Tensor, *carried: Tensor) -> tuple[Tensor, ...]:
            results = self._all([x + 1.0 for x in carried[:n]])
            sums = [s + r for s, r in zip(carried[n:], results, strict=True)]
            return i + 1, *(x * 0.5 for x in carried[:n]), *sums

        carried = (*(x * 1.0 for x in xs), *(torch.zeros(t.shape) for t in twos))
        start = (torch.zeros((), dtype=torch.int64), *carried)
        if torch.compiler.is_compiling():
            return list(while_loop(lambda i, *_: i < 2, body, start)[n + 1 :])
        return list(body(*body(*start))[n + 1 :])


def _cond(
    flag: Tensor, yes: Callable[..., Any], no: Callable[..., Any], xs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`torch.cond`, which compiles what it is given when it is called in eager mode."""
    if torch.compiler.is_compiling():
        chosen: tuple[Tensor, ...] = tuple(torch.cond(flag, yes, no, tuple(xs)))
        return chosen
    return tuple((yes if flag else no)(*xs))


class OnSums(nn.Module):
    """Calls every row on a sum and multiplies what it gives, so that it can be quantized."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__()
        self.rows = InContexts(rows, ["value"])

    def forward(self, first: Tensor, second: Tensor, *xs: Tensor) -> list[Tensor]:
        return self.rows(first, second, *(x + x for x in xs))  # type: ignore[no-any-return]


class Int8(Quantizer):  # type: ignore[misc]
    """Quantizes what is added, what is multiplied, and the results."""

    def annotate(self, model: torch.fx.GraphModule) -> torch.fx.GraphModule:
        observer = MinMaxObserver.with_args(eps=2**-12)
        spec = QuantizationSpec(torch.int8, observer, -128, 127, torch.per_tensor_affine)
        for name in ("add.Tensor", "mul.Tensor"):
            for node in model.graph.find_nodes(op="call_function", target=op(name)):
                node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                    input_qspec_map=dict.fromkeys(node.all_input_nodes, spec),
                    output_qspec=spec,
                    _annotated=True,
                )
        return model

    def validate(self, model: torch.fx.GraphModule) -> None:
        pass


def inputs(rows: Sequence[Row], call: int = 0) -> tuple[Tensor, ...]:
    """Those of call number `call`: another branch each time."""
    flags = (torch.tensor(call % 2 == 0), torch.tensor(call % 4 == 0))
    return (*flags, *(row.value(call + 1) for row in rows))


def export(
    model: nn.Module, args: tuple[Tensor, ...], dynamic_shapes: Any = None
) -> ExportedProgram:
    torch._dynamo.reset()  # or what differs from an earlier model in size becomes dynamic
    with torch.no_grad():
        return torch.export.export(model, args, dynamic_shapes=dynamic_shapes)


def quantized(rows: Sequence[Row]) -> nn.Module:
    """`OnSums`, quantized by PT2E: each row stands between a dequantize and a quantize."""
    prepared = prepare_pt2e(export(OnSums(rows).eval(), inputs(rows)).module(), Int8())
    prepared(*inputs(rows))
    converted: nn.Module = convert_pt2e(prepared)
    return converted


class Case:
    """A model in eval mode, its program, and what it computes in a series of calls.

    Attributes:
        want: the results of each call, of the model itself.
    """

    def __init__(self, model: nn.Module, calls: Sequence[tuple[Tensor, ...]]) -> None:
        self.calls = calls
        self.program = export(model, calls[0])
        eager = copy.deepcopy(model)
        with torch.no_grad():
            self.want = [[t.clone() for t in eager(*call)] for call in calls]

    @functools.cached_property
    def functional(self) -> ExportedProgram:
        """Lowering this costs no retrace."""
        functional: ExportedProgram = self.program.run_decompositions({})
        return functional

    def run(self, edge: EdgeProgramManager) -> list[list[Tensor]]:
        """What the lowered program computes; delegates do what their graph says."""
        program = edge.exported_program()
        for delegate in get_lowered_backend_modules(program.graph_module):
            original: Any = delegate.original_module
            original.module = functools.cache(original.module)
        run = program.module()
        # The program that was lowered has the same buffers.
        before = {name: b.clone() for name, b in run.named_buffers()}
        with torch.no_grad():
            try:
                return [[t.clone() for t in run(*call)] for call in self.calls]
            finally:
                for name, b in run.named_buffers():
                    b.copy_(before[name])


# ------------------------------------------------------------------ who asks


def bodies(gm: torch.fx.GraphModule, path: str = "") -> Iterator[tuple[str, torch.fx.GraphModule]]:
    """A graph and the bodies of its control flow, each with the context that it is."""
    yield path, gm
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.HigherOrderOperator):
            continue
        for arg in node.args:
            inner = getattr(arg, "target", None) if getattr(arg, "op", "") == "get_attr" else None
            body = getattr(gm, str(inner), None)
            if isinstance(body, torch.fx.GraphModule):
                here = node.target.name()
                yield from bodies(body, "nested cond" if path == here == "cond" else here)


def counts(gm: torch.fx.GraphModule) -> dict[str, Counter[str]]:
    """Context to the ops that its graphs consist of; the top graph is `""`."""
    found: dict[str, Counter[str]] = {}
    for context, body in bodies(gm):
        ops = (name_of(n.target) for n in body.graph.nodes if n.op == "call_function")
        found.setdefault(context, Counter()).update(o for o in ops if o)
    return found


class NothingBackend(BackendDetails):  # type: ignore[misc]
    """Compiles nothing, and remembers the programs of its delegates."""

    programs: ClassVar[list[ExportedProgram]] = []

    @classmethod
    def preprocess(cls, edge_program: ExportedProgram, compile_specs: Any) -> PreprocessResult:
        cls.programs.append(edge_program)
        return PreprocessResult(processed_bytes=b"nothing")


class Asking(Partitioner):  # type: ignore[misc]
    """Asks for ops, and takes every node that is one of them.

    Args:
        ops: asked for.
        accept: which nodes are wanted; `None` for all, without a filter.
        take: names of the ops that are delegated.

    Attributes:
        asked: how often it was asked.
        seen: what was there when it was its turn, see `counts`.
    """

    def __init__(
        self, ops: Iterable[OpOverload], take: Iterable[str] = (), accept: Accept | None = None
    ) -> None:
        super().__init__()
        self.ops, self.take, self.accept = list(ops), set(take), accept
        self.asked = 0
        self.seen: dict[str, Counter[str]] = {}

    def ops_to_not_decompose(self, ep: ExportedProgram) -> tuple[list[OpOverload], Accept | None]:
        self.asked += 1
        return self.ops, self.accept

    def partition(self, exported_program: ExportedProgram) -> PartitionResult:
        self.seen = counts(exported_program.graph_module)
        tags: dict[str, DelegationSpec] = {}
        self._tag(exported_program.graph_module, tags)
        return PartitionResult(tagged_exported_program=exported_program, partition_tags=tags)

    def _tag(self, gm: torch.fx.GraphModule, tags: dict[str, DelegationSpec]) -> None:
        groups = generate_partitions_from_list_of_nodes(gm, op_support=_Named(self.take))
        for group in groups:
            tag = f"{id(self)}_{len(tags)}"
            tags[tag] = DelegationSpec(NothingBackend.__name__, [])
            for node in group.nodes:
                node.meta["delegation_tag"] = tag
        for _, body, _ in get_control_flow_submodules(gm):
            self._tag(body, tags)


class _Named(OperatorSupportBase):
    def __init__(self, ops: set[str]) -> None:
        self.ops = ops

    def is_node_supported(self, submodules: Any, node: torch.fx.Node) -> bool:
        if node.op != "call_function":
            return False
        # A result of several tensors is delegated with the nodes that take it apart.
        if getattr(node.target, "__name__", "") == "getitem":
            node = node.args[0]  # type: ignore[assignment]
        return name_of(node.target) in self.ops


class EverySecond:
    """A filter that wants every second node of each op."""

    def __init__(self) -> None:
        self._wanted: list[torch.fx.Node] = []
        self._turns: dict[str, Iterator[bool]] = {}

    def __call__(self, node: torch.fx.Node) -> bool:
        accepted = next(
            self._turns.setdefault(name_of(node.target), itertools.cycle((True, False)))
        )
        if accepted:
            self._wanted.append(node)
        return accepted

    def wanted(self) -> Counter[str]:
        """The nodes that it accepted, without those that proved to be dead code."""
        targets = [n.target for n in self._wanted if not n._erased]
        return Counter(edge_name(t) for t in targets if isinstance(t, OpOverload))
