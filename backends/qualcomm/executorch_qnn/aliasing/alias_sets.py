# SPDX-License-Identifier: BSD-3-Clause
"""Which values of a graph live in the same memory, and which of them are overwritten when.

The graphs are those that `to_executorch` plans memory for: allocations, out variants, in-place ops,
views, control flow and delegates.  What an op writes and returns is read from its schema.

Such a graph was made from a functional one, so that a node stands for the value it had when it was
computed, also when its memory is overwritten later.  Whoever reads it then reads a stale value.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from executorch.exir import memory
from executorch.exir.delegate import executorch_call_delegate
from executorch.exir.operator.convert import output_to_aliased_input_map, unwrap_op_overload
from executorch.exir.tensor import TensorSpec
from torch.fx import GraphModule, Node

Value = tuple[Node, int | None]
"""A node, or one element of a node that has several results."""

_HIGHER_ORDER = torch.ops.higher_order

# How each of a control-flow operator's lists of operands becomes parameters of its bodies: they are
# the operand itself ("same"), one slice of it per iteration in memory of its own ("slice"), or the
# operator's result, which is updated in place from one iteration to the next ("carry").  Operators
# of higher order have no schema that says so; this is how ExecuTorch emits them.
_OPERANDS: dict[Any, tuple[str, ...]] = {
    _HIGHER_ORDER.cond: ("same",),
    _HIGHER_ORDER.map_impl: ("slice", "same"),
    _HIGHER_ORDER.scan: ("carry", "slice", "same"),
    _HIGHER_ORDER.while_loop: ("carry", "same"),
}


def is_delegate(node: Node) -> bool:
    """Whether a node calls a delegate."""
    return node.target is executorch_call_delegate


class AnyPair:
    """Contains every pair of an input and an output."""

    def __contains__(self, pair: object) -> bool:
        return True


def in_place_pairs(call: Node) -> Container[object]:
    """The pairs (index of an input, index of an output) that may be one memory, for a delegate.

    A delegate that declares `(i, j)` has read all of input `i` before it writes any of output `j`.
    It does so in the object that its backend hands over as `PreprocessResult._delegate_info_meta`,
    by an attribute `in_place_pairs`: a set of pairs, or `AnyPair()`.  Inputs and outputs are
    counted as the runtime passes them.  A delegate that declares nothing has no such pairs.
    """
    root, name = call.graph.owning_module, call.args[0]
    assert isinstance(name, Node)
    info = getattr(root, str(name.target)).meta.get("_delegate_info_meta")
    pairs: Container[object] = getattr(info, "in_place_pairs", ())
    return pairs


def values(node: Node) -> list[Value]:
    """The tensors that a node stands for; elements that were taken out are their producer's."""
    if node.target is operator.getitem:
        return [(node.args[0], node.args[1])]  # type: ignore[list-item]
    content = node.meta.get("spec", node.meta.get("val"))
    if isinstance(content, (list, tuple)):
        return [(node, i) for i in range(len(content))]
    return [(node, None)]


def spec(value: Value) -> TensorSpec | None:
    """A value's tensor spec: none if it has no memory, or has its consumer's, as allocations do."""
    node, i = value
    found = node.meta.get("spec")
    found = found if i is None or found is None else found[i]
    return found if isinstance(found, TensorSpec) else None


def set_spec(value: Value, new: TensorSpec) -> None:
    """Plans a value at the memory of `new`."""
    node, i = value
    old = node.meta["spec"]
    if i is None:
        node.meta["spec"] = new
    else:
        node.meta["spec"] = type(old)([*old[:i], new, *old[i + 1 :]])


def bodies(node: Node) -> list[GraphModule]:
    """The graphs that a control-flow operator runs."""
    if node.target not in _OPERANDS:
        return []
    root: Any = node.graph.owning_module
    names = [a.target for a in node.args if isinstance(a, Node) and a.op == "get_attr"]
    return [m for m in (getattr(root, str(n)) for n in names) if isinstance(m, GraphModule)]


def bound(node: Node, body: GraphModule) -> Iterator[tuple[Node, Value]]:
    """The parameters of a control-flow operator's body that are memory of the graph around it."""
    parameters = iter([n for n in body.graph.nodes if n.op == "placeholder"])
    results = iter(values(node))
    operands = [a for a in node.args if isinstance(a, (list, tuple))]
    for kind, group in zip(_OPERANDS[node.target], operands, strict=True):
        for operand, parameter in zip(group, parameters, strict=False):
            if kind == "carry":
                yield parameter, next(results)
            elif kind == "same" and isinstance(operand, Node):
                yield parameter, values(operand)[0]


def returned(graph: torch.fx.Graph) -> list[Any]:
    """What a graph returns, without the structure."""
    flat: list[Any] = torch.utils._pytree.tree_leaves(graph.output_node().args[0])
    return flat


@dataclass(frozen=True)
class Access:
    """What an op does to one of its arguments."""

    node: Node
    reads: bool
    writes: bool
    out: bool = False


def accesses(node: Node) -> list[Access]:
    """The arguments of a node, and whether it reads and writes them."""
    schema = _schema(node)
    if schema is None:
        if node.target is operator.getitem:  # takes hold of a value, and reads nothing
            return []
        return [Access(n, reads=True, writes=False) for n in node.all_input_nodes]
    found: list[Access] = []
    for i, argument in enumerate(schema.arguments):
        passed = _argument(node, i, argument.name)
        writes = argument.alias_info is not None and argument.alias_info.is_write
        # The one op that mutates an argument without reading it: it is how updates are stored.
        reads = not argument.is_out and not (writes and schema.name == "aten::copy_")
        nodes = [n for n in torch.utils._pytree.tree_leaves(passed) if isinstance(n, Node)]
        found += [Access(n, reads, writes, argument.is_out) for n in nodes]
    return found


def aliased_results(node: Node) -> Iterator[tuple[Value, Node]]:
    """The results of an op that are one of its arguments, in place or as `out`."""
    if (schema := _schema(node)) is not None:
        several = len(schema.returns) > 1
        for i, j in output_to_aliased_input_map(schema).items():
            argument = _argument(node, j, schema.arguments[j].name)
            if isinstance(argument, Node):
                yield (node, i if several else None), argument


class AliasSets:
    """Union-find over the values of a graph and of the bodies of its control flow."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._parent: dict[Value, Value] = {}
        self._of_spec: dict[int, Value] = {}
        self._add(graph_module)

    def root(self, value: Value) -> Value:
        """One and the same value for all that share memory."""
        while (parent := self._parent.setdefault(value, value)) != value:
            self._parent[value] = self._parent[parent]
            value = parent
        return value

    def union(self, a: Value, b: Value) -> None:
        """Two values share memory."""
        self._parent[self.root(b)] = self.root(a)

    def members(self, value: Value) -> list[Value]:
        """All values that share memory with one."""
        root = self.root(value)
        return [v for v in list(self._parent) if self.root(v) == root]

    def _add(self, graph_module: GraphModule) -> None:
        for node in graph_module.graph.nodes:
            if node.op == "output":
                continue
            for value in values(node):
                self.root(value)
                if (shared := spec(value)) is not None:  # what was planned together
                    self.union(self._of_spec.setdefault(id(shared), value), value)
            if node.target is memory.view:
                self.union(values(node.args[0])[0], (node, None))
            for result, argument in aliased_results(node):
                self.union(values(argument)[0], result)
            for body in bodies(node):
                self._add(body)
                for parameter, operand in bound(node, body):
                    self.union(operand, (parameter, None))


class History:
    """Who reads and who writes each alias set of one graph, in the order of its nodes.

    Attributes:
        stale: pairs of a reader and what it reads after that was overwritten.
    """

    def __init__(
        self, graph: torch.fx.Graph, sets: AliasSets, outputs: Iterable[Any] | None = None
    ) -> None:
        """Arguments: `outputs`, the results that are read at the end, by default all of them."""
        self._sets = sets
        self._version: dict[Value, Node] = {}
        self._writers: dict[Value, list[Node]] = defaultdict(list)
        self._readers: dict[Value, list[Node]] = defaultdict(list)
        self.place = {n: i for i, n in enumerate(graph.nodes)}
        self.stale: list[tuple[Node, Node]] = []
        read_at_end = returned(graph) if outputs is None else outputs
        for node in graph.nodes:
            if node.op == "output":
                for n in read_at_end:
                    if isinstance(n, Node):
                        self._read(node, n)
            elif node.target is not memory.alloc and node.target is not operator.getitem:
                self._run(node)

    def version(self, value: Value) -> Node | None:
        """The node that wrote a value."""
        return self._version.get(value)

    def writers(self, value: Value) -> list[Node]:
        """The nodes that write the memory of a value."""
        return self._writers[self._sets.root(value)]

    def readers(self, value: Value) -> list[Node]:
        """The nodes that read the memory of a value."""
        return self._readers[self._sets.root(value)]

    def lasts(self, value: Value) -> bool:
        """Whether nobody overwrites a value."""
        return not (writers := self.writers(value)) or writers[-1] is self.version(value)

    def overwritten_by(self, value: Value) -> Node:
        """The first node that overwrites a value."""
        writers = self.writers(value)
        written = self.version(value)
        return writers[writers.index(written) + 1 if written in writers else 0]

    def _run(self, node: Node) -> None:
        found = accesses(node)
        for access in found:
            if access.reads:
                self._read(node, access.node)
        if node.target is memory.view:
            base = values(node.args[0])[0]  # type: ignore[arg-type]
            if (written := self.version(base)) is not None:
                self._version[node, None] = written
            return
        for access in found:
            if access.writes:
                for value in values(access.node):
                    self._write(node, value)
                    if access.out:
                        self._version[value] = node
        for value in _written_in(node, self._sets):
            self._write(node, value)
        for value in values(node):
            if node.op == "placeholder" and (first := self.writers(value)):
                self._version[value] = first[0]  # one operand that is passed twice
                continue
            self._write(node, value)
            self._version[value] = node

    def _write(self, node: Node, value: Value) -> None:
        writers = self.writers(value)
        if not writers or writers[-1] is not node:
            writers.append(node)

    def _read(self, node: Node, argument: Node) -> None:
        for value in values(argument):
            self.readers(value).append(node)
            if not self.lasts(value):
                self.stale.append((node, argument))


def _written_in(node: Node, sets: AliasSets) -> list[Value]:
    """Memory of the graph around that the bodies of a control-flow operator write."""
    return [
        parameter
        for body in bodies(node)
        for parameter in ((p, None) for p, _ in bound(node, body))
        if len(History(body.graph, sets, ()).writers(parameter)) > 1
    ]


def _schema(node: Node) -> Any:
    target: Callable[..., Any] | str = node.target
    try:
        return unwrap_op_overload(target)._schema
    except TypeError:
        return None


def _argument(node: Node, index: int, name: str) -> Any:
    return node.args[index] if index < len(node.args) else node.kwargs.get(name)
