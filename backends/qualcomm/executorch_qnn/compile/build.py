# SPDX-License-Identifier: BSD-3-Clause
"""A partition (an ExportedProgram of ATen or edge ops) to a graph, its I/O and its state table."""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from ..aliasing import buffer, mutated_buffers
from ..aliasing.slots import tensors
from ..aliasing.updates import updates
from ..errors import LoweringError
from ..ops.builder import (
    Builder,
    Const,
    Patch,
    Refused,
    Result,
    Shape,
    Steps,
    StorageKey,
    Value,
    internal,
    qnn_shape,
    to_array,
)
from ..ops.elementwise import plus, times
from ..ops.quantized import (
    OF_TORCH,
    dequantize,
    is_dequantize,
    quantized,
    steps_of,
    type_of,
    wanted_of,
)
from ..ops.registry import aten_op, lower_node, metadata
from .hazards import aliasing_is_sound
from .ir import Array, DType, Graph, Kind, Node, QuantType, ScaleOffset, Tensor
from .payload import Binding, RowsEntry
from .precision import Linear, Number, accumulation

STORED = "qnn_stored"
"""Metadata key: the `QuantType` as which a node's value is stored."""
INTEGERS = "qnn_integers"
"""Metadata key: the `Integers` of a node that is computed in integers."""

# Floats cross the boundary as fp16 and are converted on the host: an in-graph Cast is not exact
# there (1.0 becomes 1.00000012, inf and NaN become finite garbage), and moves twice the bytes.
_BOUNDARY: dict[torch.dtype, DType] = {
    torch.float32: DType.FLOAT16,
    torch.float64: DType.FLOAT16,
    torch.float16: DType.FLOAT16,
    torch.int64: DType.INT32,
    torch.int32: DType.INT32,
    torch.bool: DType.BOOL8,
}


@dataclass(frozen=True)
class IO:
    """One argument of a delegate call: the host's view and the QNN tensor behind it.

    Attributes:
        name: of the QNN tensor; empty when the graph does not use the argument.
        qnn_shape: of the QNN tensor; as many elements as `shape`, in the same order.
    """

    name: str
    torch_dtype: torch.dtype
    shape: tuple[int, ...]
    dtype: DType
    qnn_shape: tuple[int, ...]
    encoding: ScaleOffset | None = None


@dataclass(frozen=True)
class State:
    """A mutable buffer of a graph.

    Attributes:
        torch_dtype: the buffer's type in the model, in which the session reads and writes it.
        dtype: the type that it is stored in; `npu_dtype`: that of the graph's tensors.
        initial: the registered value as it is stored, `None` for all zeros.
        why: the reason for the binding, for the report.
    """

    fqn: str
    torch_dtype: torch.dtype
    shape: tuple[int, ...]
    dtype: DType
    input: str
    output: str
    binding: Binding
    why: str
    initial: Array | None = None
    encoding: ScaleOffset | None = None
    rows: RowsEntry | None = None
    scale: float = 1.0

    @property
    def npu_dtype(self) -> DType:
        return DType.FLOAT16 if self.dtype is DType.FLOAT32 else self.dtype


@dataclass(frozen=True)
class Built:
    """A partition, ready to be compiled: the graph, and what its tensors mean to the runtime."""

    graph: Graph
    inputs: tuple[IO, ...]
    outputs: tuple[IO, ...]
    states: tuple[State, ...]


def _io(tensor: Tensor, result: Result) -> IO:
    """An argument of type `result` that is `tensor` in the graph."""
    quantized = tensor.dtype.is_fixed and result.torch_dtype.is_floating_point
    encoding = tensor.encoding if quantized else None
    assert encoding is None or isinstance(encoding, ScaleOffset)
    return IO(tensor.name, result.torch_dtype, result.shape, tensor.dtype, tensor.shape, encoding)


def _stored_as(tensor: Tensor | None) -> QuantType | None:
    """How a tensor's real numbers are stored, if they are quantized."""
    if tensor is None or not isinstance(tensor.encoding, ScaleOffset):
        return None
    return QuantType(tensor.dtype, tensor.encoding)


def _stored_input(node: torch.fx.Node) -> QuantType | None:
    """How an argument of a delegate is stored, if it is quantized: as those who read it want it."""
    if (stored := node.meta.get(STORED)) is not None:
        return stored  # type: ignore[no-any-return]
    kinds = {type_of(u) if is_dequantize(u) else None for u in node.users}
    kind = kinds.pop() if len(kinds) == 1 else None
    return kind or wanted_of(node)


def _initial(value: torch.Tensor, dtype: DType, stored: QuantType | None) -> Array | None:
    """A buffer's registered value as it is stored; None if that is all zero bytes."""
    data = to_array(value, dtype) if stored is None else quantized(value, stored)
    return data if data.any() else None


def boundary_dtype(dtype: torch.dtype) -> DType:
    """The QNN type of an argument of type `dtype` at the delegate's boundary.

    Raises:
        Refused: the runtime has no conversion for it.
    """
    if dtype not in _BOUNDARY:
        raise Refused(f"{dtype} cannot cross the delegate's boundary")
    return _BOUNDARY[dtype]


@dataclass
class Environment:
    """Values of FX nodes while a graph is built; constants are evaluated only when needed.

    Attributes:
        constants: placeholder name to its tensor.
    """

    builder: Builder
    constants: dict[str, torch.Tensor]
    values: dict[torch.fx.Node, Any] = field(default_factory=dict)
    _made: dict[torch.fx.Node, torch.Tensor] = field(default_factory=dict)

    def __getitem__(self, node: torch.fx.Node) -> Any:
        return self.values[node]

    def constant(self, node: torch.fx.Node) -> Value:
        """`node`, which depends on no run-time input, as a constant value."""
        result = metadata(node)[0]
        const = Const(lambda: self.evaluate(node), self._key(node), self._steps(node))
        return Value(result.shape, result.dtype, const=const)

    def _steps(self, node: torch.fx.Node) -> Steps | None:
        """The grid on which the values of a quantized constant lie, be it seen through views."""
        if (steps := steps_of(node, self.evaluate)) is not None or not self._is_movement(node):
            return steps
        steps = self._steps(node.all_input_nodes[0])
        op: Any = aten_op(node.target)
        return steps and steps.moved(lambda t: op(t, *node.args[1:], **node.kwargs))

    def evaluate(self, node: torch.fx.Node) -> Any:
        """Runs a constant node in PyTorch."""
        if node.op == "placeholder":
            return self.constants[node.name]
        if node.op == "get_attr":
            return _attribute(node)
        if node in self._made:
            return self._made[node]
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.evaluate)
        op: Any = aten_op(node.target) or node.target
        with torch.no_grad():
            made = op(*args, **kwargs)
        if isinstance(made, torch.Tensor) and made.numel() <= 4096:
            self._made[node] = made
        return made

    def _key(self, node: torch.fx.Node) -> object:
        return StorageKey.of(self.evaluate(node)) if self._is_view(node) else node

    def _is_movement(self, node: torch.fx.Node) -> bool:
        """Whether `node` is made of the elements of one tensor, its first argument."""
        op = aten_op(node.target)
        if op is None or node.all_input_nodes != [node.args[0]] or not op._schema.returns:
            return False
        views = op._schema.returns[0].alias_info is not None
        return views or op._schema.name.removeprefix("aten::") in _COPIED_VIEWS

    def _is_view(self, node: torch.fx.Node) -> bool:
        """Whether `node` is a parameter or a chain of views of one."""
        if node.op == "placeholder":
            return node.name in self.constants
        op = aten_op(node.target)
        if op is None or len(node.all_input_nodes) != 1 or not op._schema.returns:
            return False
        returns = op._schema.returns[0].alias_info
        return returns is not None and self._is_view(node.all_input_nodes[0])


_COPIED_VIEWS = frozenset(
    ("clone", "expand_copy", "permute_copy", "select_copy", "slice_copy", "squeeze_copy",
     "t_copy", "transpose_copy", "unsqueeze_copy", "view_copy")
)  # fmt: skip


def _attribute(node: torch.fx.Node) -> Any:
    module = node.graph.owning_module
    for part in str(node.target).split("."):
        module = getattr(module, part)
    return module


def constant_nodes(
    graph: torch.fx.Graph, constant_placeholders: set[str]
) -> dict[torch.fx.Node, None]:
    """The nodes of `graph` that depend on no run-time input, in graph order."""
    found: dict[torch.fx.Node, None] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.name in constant_placeholders:
                found[node] = None
        elif node.op == "get_attr":
            if isinstance(_attribute(node), torch.Tensor):
                found[node] = None
        elif node.op == "call_function" and all(i in found for i in node.all_input_nodes):
            op = aten_op(node.target)
            if node.target is operator.getitem or (op is not None and is_foldable(op)):
                found[node] = None
    return found


def is_foldable(op: torch._ops.OpOverload) -> bool:
    return op.namespace in ("aten", "dim_order_ops", "quantized_decomposed", "torchao") and not (
        op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags
    )


def constant_tensors(ep: ExportedProgram, states: Container[str]) -> dict[str, torch.Tensor]:
    """Placeholder name to tensor, for every parameter, constant and buffer that is no state."""
    return {spec.arg.name: t for spec, t in tensors(ep) if spec.target not in states}


def build(
    ep: ExportedProgram,
    name: str,
    *,
    states: Mapping[str, str] | None = None,
    in_place: bool = True,
    state_update: str = "auto",
    wide: Container[str] = (),
) -> Built:
    """Builds the graph of one partition.

    Args:
        ep: the partition.
        name: of the QNN graph.
        states: names of the buffers that are state, and of their slots; those that `ep` writes
            when `None`.  All other buffers, parameters and constants are static data.
        in_place: bind input and output of a state to one address where that is sound; False
            gives every state two regions (tests compare the two, bit by bit).
        state_update: `"scatter"` writes whole buffers, `"delta"` puts out only the rows that change
            wherever rows are written at positions given at run time, and `"auto"` does where that
            moves fewer bytes.
        wide: slots that are held in fp32; see `wide_slots`.

    Raises:
        LoweringError: a node has no QNN form (the partitioner should have kept it out).
    """
    if states is None:
        states = {fqn: fqn for fqn in mutated_buffers(ep)}
    whole: set[str] = set()
    reads = False
    while True:
        builder = _PartitionBuilder(ep, name, states, in_place, state_update, wide, whole, reads)
        built = builder.run()
        if not built.graph.of_kind(Kind.INPUT) and not reads:
            reads = True
        elif state_update != "delta" and builder.computed_after_all:
            whole |= builder.computed_after_all
        else:
            return built


def wide_slots(
    ep: ExportedProgram, states: Mapping[str, str] | None, asked: Mapping[str, torch.dtype]
) -> set[str]:
    """The slots of a partition that are held in fp32, because fp16 would lose what they gather.

    A slot is wide for all graphs that use it if one of them needs it so.

    Args:
        states: as for `build`.
        asked: slot to `torch.float16` or `torch.float32`; the rule decides where it says nothing.
    """
    names = {fqn: fqn for fqn in mutated_buffers(ep)} if states is None else states
    number = _numbers(ep, names)
    wide = set()
    for u in updates(ep, names):
        slot = names[u.fqn]
        if u.new is None or asked.get(slot) is torch.float16:
            continue
        if asked.get(slot) is torch.float32 or accumulation(u.new, u.old, number):
            wide.add(slot)
    return wide


def _numbers(ep: ExportedProgram, states: Container[str]) -> Number:
    env = Environment(Builder(""), constant_tensors(ep, states))

    @functools.cache  # most partitions have no number to ask for
    def constants() -> dict[torch.fx.Node, None]:
        return constant_nodes(ep.graph_module.graph, set(env.constants))

    def number(arg: object) -> float | None:
        if isinstance(arg, (bool, int, float)):
            return float(arg)
        if not isinstance(arg, torch.fx.Node) or arg not in constants():
            return None
        value = arg.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.numel() != 1:
            return None
        return float(env.evaluate(arg).item())

    return number


class _PartitionBuilder:
    """Builds once.

    Attributes:
        whole: states that are not to be patches, whatever `state_update` says.
        reads: what is put out must depend on an input: QNN executes no graph without one.
        computed_after_all: states that were patches, but of which an op needs all.
    """

    def __init__(
        self,
        ep: ExportedProgram,
        name: str,
        states: Mapping[str, str],
        in_place: bool,
        state_update: str,
        wide: Container[str],
        whole: set[str],
        reads: bool,
    ) -> None:
        self.ep = ep
        self.b = Builder(name)
        self.in_place = in_place
        self.states = states
        self.state_update = state_update
        self.wide = wide
        self.whole = whole
        self.reads = reads
        self.computed_after_all: set[str] = set()
        self.env = Environment(self.b, constant_tensors(ep, states))

    def run(self) -> Built:
        graph = self.ep.graph_module.graph
        constants = constant_nodes(graph, set(self.env.constants))
        specs = {s.arg.name: s for s in self.ep.graph_signature.input_specs}
        inputs: list[IO] = []
        reads: dict[str, Value] = {}
        for node in graph.nodes:
            try:
                if node in constants:
                    value = node.meta.get("val")
                    if value is None and node.op == "get_attr":
                        value = _attribute(node)
                    if isinstance(value, torch.Tensor) and value.dtype not in OF_TORCH:
                        self.env.values[node] = self._constant(node)
                elif node.op == "placeholder":
                    spec = specs[node.name]
                    if spec.kind is InputKind.BUFFER and spec.target in self.states:
                        assert spec.target is not None
                        reads[spec.target] = self._state_input(node, spec.target)
                    else:
                        inputs.append(self._input(node))
                elif node.op == "call_function":
                    self._call(node)
            except Refused as e:
                raise LoweringError(
                    f"node {node.name} ({node.target}) of graph {self.b.graph.name}: {e}"
                ) from None
        outputs, states = self._outputs(graph.output_node(), reads)
        used = {t.name for t in self.b.graph.tensors}
        inputs = [io if io.name in used else dataclasses.replace(io, name="") for io in inputs]
        return Built(self.b.graph, tuple(inputs), tuple(outputs), tuple(states))

    def _constant(self, node: torch.fx.Node) -> Value:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = _attribute(node)
        return self.env.constant(node)

    def _call(self, node: torch.fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            self.env.values[node] = self.env[source][index]  # type: ignore[index]
            return
        how = node.meta.get(INTEGERS)
        values = lower_node(self.b, node, self.env.__getitem__, how)
        many = isinstance(node.meta["val"], (list, tuple))
        self.env.values[node] = values if many else values[0]

    def _input(self, node: torch.fx.Node) -> IO:
        result = metadata(node)[0]
        shape = qnn_shape(result.shape, 4)  # few of QNN's ops take five axes
        if (stored := _stored_input(node)) is not None:  # converted by the host
            dtype = DType.FLOAT16
            value = self.b.input(node.name, shape, dtype, stored)
        else:
            dtype = result.dtype
            value = self.b.input(node.name, shape, boundary_dtype(result.torch_dtype))
        self.env.values[node] = self.b.cast(self.b.reshape(value, result.shape), dtype)
        assert value.tensor is not None
        return _io(value.tensor, result)

    def _state_input(self, node: torch.fx.Node, fqn: str) -> Value:
        result = metadata(node)[0]
        stored = node.meta.get(STORED)
        dtype = internal(result.torch_dtype)
        value = self.b.input(f"{node.name}_in", result.shape, dtype, stored)
        self.env.values[node] = value
        by_rows = self.state_update != "scatter" and dtype.is_float
        if by_rows and fqn not in self.whole and self.states[fqn] not in self.wide:
            self.b.worth_patching[id(value.tensor)] = lambda n: self._delta_pays(value.numel, n)
        return value

    def _delta_pays(self, elements: int, overwritten: int) -> bool:
        """Whether putting out so many of a state's elements is better than writing all of them.

        As finalize counts DDR bytes: a graph writes whole buffers, whatever changes; rows and their
        positions cost a block each at least.  What is not much smaller is not worth the extra ops.
        """
        delta = max(_BLOCK, 2 * overwritten) + _BLOCK
        return self.state_update == "delta" or 2 * delta <= 2 * elements

    def _outputs(
        self, node: torch.fx.Node, reads: dict[str, Value]
    ) -> tuple[list[IO], list[State]]:
        outputs: list[IO] = []
        taken: set[int] = set()
        written: dict[str, Tensor] = {}
        patches: dict[str, Patch] = {}
        steps = self._steps()
        args: Sequence[Any] = node.args[0]  # type: ignore[assignment]
        for arg, spec in zip(args, self.ep.graph_signature.output_specs, strict=True):
            value: Value = self.env[arg]
            self.b.source = arg.name
            if spec.kind is OutputKind.BUFFER_MUTATION:
                assert spec.target is not None
                if (patch := self._patch(value, reads.get(spec.target))) is not None:
                    patches[spec.target] = patch
                    continue
                if spec.target in steps:
                    value = self._step(steps[spec.target], reads.get(spec.target), value.shape)
                written[spec.target] = self._as_output(value, value.dtype, f"{arg.name}_out", taken)
            else:
                result = metadata(arg)[0]
                dtype = value.dtype if value.quant else boundary_dtype(result.torch_dtype)
                t = self._as_output(self._unpadded(value), dtype, f"{arg.name}_out", taken)
                outputs.append(_io(t, result))
        rows = self._rows_out(patches, taken)
        self._prune()  # a read that no output needs is none
        touched = dict.fromkeys((*written, *rows, *reads))
        states = [
            self._state(f, reads.get(f), written.get(f), rows.get(f), steps.get(f)) for f in touched
        ]
        return outputs, [s for s in states if s.input or s.output]

    def _steps(self) -> dict[str, Linear]:
        """What is added to states that are held in fp32, where they are added to."""
        number = _numbers(self.ep, self.states)
        found = {}
        for u in updates(self.ep, self.states):
            if u.new is not None and self.states[u.fqn] in self.wide:
                step = accumulation(u.new, u.old, number, near=0.5)
                if step is not None:
                    found[u.fqn] = step
        return found

    def _step(self, step: Linear, read: Value | None, shape: Shape) -> Value:
        """`step.scale` times what is added, in the state's shape."""
        b = self.b
        terms = [(factor, self.env[node]) for factor, node in step.terms]
        if step.gain:
            assert read is not None
            terms.append((step.gain, read))
        total = b.value(step.offset * step.scale, DType.FLOAT16)
        for factor, value in terms:
            term = b.cast(dequantize(b, value), DType.FLOAT16)
            if factor * step.scale != 1:
                term = times(b, term, factor * step.scale)
            total = term if total.is_const and not step.offset else plus(b, total, term)
        return b.expand(total, shape)

    def _patch(self, value: Value, read: Value | None) -> Patch | None:
        """The patch that is all that becomes of a state."""
        patch = value.patch
        if patch is None or read is None or self.b.base(patch.base).tensor is not read.tensor:
            return None
        return patch

    def _rows_out(
        self, patches: dict[str, Patch], taken: set[int]
    ) -> dict[str, tuple[Tensor, RowsEntry]]:
        """Puts out what patches overwrite, and where; small ones of one type all in one tensor.

        Each output costs a block of 2,048 bytes at least, and what an op writes of it 32 rows: 60
        rows of 192 fp16 numbers are 24 KB in one tensor, 123 KB in 60 and 740 KB as they are.
        """
        b = self.b
        found: dict[str, tuple[Tensor, RowsEntry]] = {}
        packed: dict[QuantType | None, Value] = {}
        offsets: dict[str, int] = {}
        small: dict[QuantType | None, dict[str, Value]] = {}
        for fqn, patch in patches.items():
            if patch.rows.numel < _BLOCK * 4:
                small.setdefault(patch.rows.quant, {})[fqn] = patch.rows
        for kind, of_kind in small.items():
            if len(of_kind) == 1:
                continue
            width = math.gcd(*(r.numel for r in of_kind.values()))
            while width > 64 and width % 2 == 0:
                width //= 2
            flat = [b.reshape(r, (r.numel // width, width)) for r in of_kind.values()]
            packed[kind] = b.concat(flat, 0)
            at = 0
            for fqn, r in of_kind.items():
                offsets[fqn] = at
                at += r.numel
        positions: dict[int, Tensor] = {}
        shared: dict[QuantType | None, Tensor] = {}
        for fqn, patch in patches.items():
            index = b.tensor(patch.index)
            if id(index) not in positions:
                positions[id(index)] = self._as_output(
                    patch.index, DType.INT32, f"{fqn}_positions", taken
                )
            kind = patch.rows.quant
            if fqn in offsets:
                if kind not in shared:
                    together = self._wide(packed[kind])
                    shared[kind] = self._as_output(together, together.dtype, "rows", taken)
                out = shared[kind]
            else:
                out = self._as_output(
                    self._wide(patch.rows), patch.rows.dtype, f"{fqn}_rows", taken
                )
            d, shape = patch.dim, patch.base.shape
            found[fqn] = (
                out,
                RowsEntry(
                    positions[id(index)].name,
                    offsets.get(fqn, 0),
                    math.prod(shape[:d]),
                    shape[d],
                    math.prod(shape[d + 1 :]),
                    patch.index.numel,
                ),
            )
        return found

    def _unpadded(self, value: Value) -> Value:
        """A wide result of few rows in a shape that HTP writes without padding.

        HTP pads what an op writes to 32 rows: 49,152 fp16 logits cost 3 MB of DDR writes per call,
        and 96 KB when a reshape to [192, 256] ends the graph.
        """
        last = value.shape[-1] if value.shape else 1
        if value.is_const or value.numel // last >= _TILE_ROWS or value.numel % _TILE_COLUMNS:
            return value
        if value.numel < _TILE_ROWS * _TILE_COLUMNS:
            return value
        return self.b.reshape(value, (value.numel // _TILE_COLUMNS, _TILE_COLUMNS))

    def _computed(self, value: Value) -> Value:
        """`value` as the result of an op that has an input of the graph as an operand."""
        b = self.b
        given = next(iter(b.graph.of_kind(Kind.INPUT)), None)
        if given is None:
            raise LoweringError(f"graph {b.graph.name} has no input: QNN executes no such graph")
        source = b.value_of(given)
        one = b.cast(b.slice(b.reshape(source, (source.numel,)), 0, 0, 1), value.dtype)
        both = b.concat([b.reshape(value, (value.numel,)), one], 0)
        return b.reshape(b.slice(both, 0, 0, value.numel), value.shape)

    def _wide(self, value: Value) -> Value:
        """`value` with a longer last axis than it was computed with, if its elements allow it.

        A reshape that changes the last axis ends in memory without padding, and no other does.
        """
        for columns in (1024, 512, 256, 192, 128):
            if value.numel % columns == 0 and columns > value.shape[-1]:
                return self.b.reshape(value, (value.numel // columns, columns))
        return value

    def _as_output(self, value: Value, dtype: DType, name: str, taken: set[int]) -> Tensor:
        """`value` in an output tensor of its own."""
        b = self.b
        if value.is_const or self.reads:
            value = self._computed(value)
        source = b.tensor(value)
        same = value.quant is not None or source.dtype is dtype
        if same and source.kind is Kind.NATIVE and id(source) not in taken:
            source.kind = Kind.OUTPUT
            taken.add(id(source))
            return source
        out = Tensor(b.unique(name), dtype, source.shape, Kind.OUTPUT)
        if same:
            out.dtype, out.encoding = source.dtype, source.encoding
        b.add_tensor(out)
        # One op of its own, past the hash-consing: two outputs never share a tensor.
        type_ = "Reshape" if same else "Cast"
        b.graph.nodes.append(Node(b.unique(f"{type_}_to_{name}"), type_, [source], [out]))
        taken.add(id(out))
        return out

    def _state(
        self,
        fqn: str,
        read: Value | None,
        out: Tensor | None,
        rows: tuple[Tensor, RowsEntry] | None,
        step: Linear | None,
    ) -> State:
        initial = buffer(self.ep, fqn)
        wide = self.states[fqn] in self.wide
        stored = _stored_as((read.tensor if read is not None else None) or out)
        dtype = DType.FLOAT32 if wide else internal(initial.dtype)
        consumers = [] if read is None else self._consumers(read.tensor)
        source = read.tensor if read is not None and consumers else None
        if rows is not None:
            out, entry = rows
            written = any(n.type == "ScatterNd" and n.inputs[0] is source for n in consumers)
            if written and stored is None:
                self.computed_after_all.add(fqn)
            binding = Binding.DELTA
            why = f"only {entry.count} of {entry.length} rows are written per call"
        elif step is not None:
            binding = Binding.ACCUMULATE
            why = f"{1 + step.gain:g} of the old value stays in each call: fp16 would lose steps"
        elif out is None:
            binding, why = Binding.READ_ONLY, "the graph only reads it"
        elif source is None:
            binding, why = Binding.WRITE_ONLY, "the graph never reads the old value"
        elif wide:
            binding, why = Binding.COPIED, "another method adds to it in fp32"
        else:
            sound, why = aliasing_is_sound(self.b.graph, source, out)
            sound = sound and self.in_place
            binding = Binding.IN_PLACE if sound else Binding.DOUBLE_BUFFER
        return State(
            self.states[fqn],
            initial.dtype,
            tuple(initial.shape),
            dtype if stored is None else stored.dtype,
            source.name if source is not None else "",
            out.name if out is not None else "",
            binding,
            why,
            _initial(initial, dtype, stored),
            encoding=None if stored is None else stored.encoding,
            rows=None if rows is None else rows[1],
            scale=1.0 if step is None else step.scale,
        )

    def _consumers(self, tensor: Tensor | None) -> list[Node]:
        return [n for n in self.b.graph.nodes if tensor in n.inputs]

    def _prune(self) -> None:
        """Drops nodes that no output needs, and tensors that no node uses."""
        graph = self.b.graph
        live = {id(t) for t in graph.of_kind(Kind.OUTPUT)}
        kept = []
        for node in reversed(graph.nodes):
            if any(id(t) in live for t in node.outputs):
                kept.append(node)
                live.update(id(t) for t in node.inputs)
                live.update(id(t) for t in node.outputs)
                live.update(id(p) for p in node.params.values() if isinstance(p, Tensor))
        graph.nodes = kept[::-1]
        graph.tensors = [t for t in graph.tensors if id(t) in live]


_TILE_ROWS, _TILE_COLUMNS = 32, 256
_BLOCK = 2048
