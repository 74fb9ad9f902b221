# SPDX-License-Identifier: BSD-3-Clause
"""Which values are quantized, to how many bits, and which share an encoding.

A value is quantized once, where it is made.  What only moves values is not annotated: its results
are already what the encoding of its operands can express, and the lowering passes them through.
Values that are put together (`cat`, a row into a cache) have one encoding, and so has a buffer with
all that is ever written to it.  All those are one `_Group`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._ops import OpOverload
from torchao.quantization.pt2e.quantizer import (
    EdgeOrNode,
    QuantizationAnnotation,
    SharedQuantizationSpec,
)
from torchao.quantization.pt2e.quantizer.quantizer import Q_ANNOTATION_KEY

from .batch_norm import STEP
from .families import (
    CLIPS,
    FLOATS,
    JOINS,
    KNOWN,
    MOVES,
    PICKS,
    PLAIN_PARAMETERS,
    PRODUCTS,
    SOFTMAX,
    Weight,
    argument,
    axis_before,
    is_float,
    name_of,
    weight_of,
)
from .recipe import Bits, QuantRecipe, Spec, bits_of
from .state import State, arithmetic, states_of
from .transforms import RAW

Node = torch.fx.Node


@dataclass(eq=False)
class _Group:
    """Values with one encoding.

    Attributes:
        bits: of the widest member.
        members: where they are observed: nodes, and edges into nodes.
        slots: the buffers that are stored so.
        given: the number of bits is asked for, and not that of the members.
        symmetric: zero is in the middle.
        softmax: the axis of the softmax that is all that reads it.
    """

    bits: int = 0
    members: list[EdgeOrNode] = field(default_factory=list)
    slots: set[str] = field(default_factory=set)
    given: bool = False
    symmetric: bool = False
    known: tuple[float, float] | None = None
    softmax: int | None = None
    merged: _Group | None = None

    @property
    def root(self) -> _Group:
        return self if self.merged is None else self.merged.root

    def fits(self, other: _Group) -> bool:
        """Whether the two may be one."""
        a, b = self.root, other.root
        return a.bits == b.bits or not ((a.given and b.bits) or (b.given and a.bits))

    def join(self, other: _Group) -> None:
        a, b = self.root, other.root
        if a is b:
            return
        b.merged = a
        a.bits, a.given = max(a.bits, b.bits), a.given or b.given
        a.members += b.members
        a.slots |= b.slots
        if b.known is not None:
            low, high = a.known or b.known
            a.known = min(low, b.known[0]), max(high, b.known[1])


class Annotator:
    """Annotates one functional graph.

    Args:
        slot_of: the slots of buffers that are state in some method, by their names in this one.
        qat: fake-quantizers are made, not observers.
        left: called with a node and a reason if the node is left in fp16 against the recipe.
        accepts: whether the target computes a node with so many bits; None, or why not.
    """

    def __init__(
        self,
        module: torch.fx.GraphModule,
        recipe: QuantRecipe,
        *,
        slot_of: Callable[[str], str | None],
        qat: bool,
        accepts: Callable[[Node, Bits], str | None] = lambda *_: None,
        left: Callable[[Node, str], None] = lambda *_: None,
    ) -> None:
        self.graph, self.recipe, self.qat = module.graph, recipe, qat
        self.slot_of, self.accepts = slot_of, accepts
        base = bits_of(recipe.base)
        self.default = base.activations if base is not None else 16
        self.place = {n: i for i, n in enumerate(self.graph.nodes)}
        self.states = {s.old: s for s in states_of(self.graph)}
        self.bits = {n: self._bits(n, left) for n in self.graph.nodes}
        self.constants = self._constants()
        self.floats: dict[Node, set[Node]] = {}  # states that stay floats, and their arithmetic
        self.group: dict[Node, _Group] = {}
        self.inputs: dict[Node, dict[Node, Any]] = {}
        self.outputs: dict[Node, Any] = {}

    def run(self) -> None:
        self.floats = {old: kept for old, s in self.states.items() if (kept := arithmetic(s))}
        while lone := self._assign():
            self.floats.update((old, set()) for old in lone)
        self._clip()
        for node in self.graph.nodes:
            if self._computes(node):
                self._operands(node)
        self._encode()
        for node in {**self.inputs, **self.outputs}:
            node.meta[Q_ANNOTATION_KEY] = QuantizationAnnotation(
                self.inputs.get(node, {}), self.outputs.get(node), _annotated=True
            )

    # -- what is quantized -----------------------------------------------------------------------

    def _bits(self, node: Node, left: Callable[[Node, str], None]) -> Bits | None:
        if node.target in (torch.ops.aten.copy_.default,) or not is_float(node):
            return None
        made: Any = node.args[0] if name_of(node) == "getitem" else node
        op = made.target
        if not isinstance(op, OpOverload) or name_of(made) in FLOATS:
            return None
        if any(isinstance(v, Node) for v in node.kwargs.values()):
            return None  # torchao looks at positional arguments only
        bits = self.recipe.bits(op, module_paths(node))
        if bits is not None and (why := self.accepts(node, bits)):
            left(node, why)
            return None
        return bits

    def _constants(self) -> set[Node]:
        """The nodes that depend on no input and on no state."""
        found = set()
        for node in self.graph.nodes:
            if node.op == "get_attr":
                if node not in self.states and self.slot_of(str(node.target)) is None:
                    found.add(node)
            elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
                tags = getattr(node.target, "tags", ())
                if torch.Tag.nondeterministic_seeded not in tags:
                    found.add(node)
        return found

    def _computes(self, node: Node) -> bool:
        """Whether the node makes new numbers, in integers."""
        return node.op == "call_function" and self.group.get(node) is not None and (
            node not in self.constants and self._kind(node) in ("compute", "fill")
        )  # fmt: skip

    def _kind(self, node: Node) -> str:
        name = name_of(node)
        floats = [n for n in node.all_input_nodes if is_float(n)]
        if name == "getitem":
            source = node.args[0]
            assert isinstance(source, Node)
            kind = self._kind(source)
            return kind if kind != "pick" or node.args[1] == 0 else "compute"
        if name in PICKS and len(floats) == 1:
            return "pick"
        if name in MOVES:
            fills = name in ("constant_pad_nd", "pad") and argument(node, "value")
            return "fill" if fills or not floats or node.args[:1] != (floats[0],) else "move"
        if name in JOINS:
            numbers = [a for a in node.args[1:] if isinstance(a, float) and a]
            constants = name == "where" and any(n in self.constants for n in floats)
            return "fill" if numbers or not floats or constants else "join"
        return "compute"

    def _assign(self) -> list[Node]:
        """Puts every quantized value in its group; gives the states that have to stay floats."""
        self.group = {}
        kept = set().union(*self.floats.values())
        for node in self.graph.nodes:
            if not is_float(node) or node in self.constants or node in kept:
                continue
            if node.op == "placeholder":
                if bits := self._asked(node):
                    self.group[node] = _Group(bits, [node])
            elif node.op == "get_attr":
                if node not in self.floats and (slot := self._slot(node)):
                    bits = self.recipe.state_bits(str(node.target), 0)
                    self.group[node] = _Group(bits, slots={slot}, given=bool(bits))
            elif node.op == "call_function" and node.target is not torch.ops.aten.copy_.default:
                self._assign_result(node)
        lone = []
        for old, state in self.states.items():
            if old in self.floats:
                continue
            group, new = self.group[old], self.group.get(state.new)
            if new is None and state.new not in self.constants:
                lone.append(old)
                continue
            self._put(state.new, state.write, group)
            if not group.root.members:
                lone.append(old)
        return lone

    def _slot(self, node: Node) -> str | None:
        name = str(node.target)
        return self.slot_of(name) or (name if node in self.states else None)

    def _assign_result(self, node: Node) -> None:
        kind, bits = self._kind(node), self.bits[node]
        source = node.args[0] if node.args else None
        if kind == "join":
            self._assign_join(node)
        elif kind in ("move", "pick") and source not in self.constants:
            group = self.group.get(source)  # type: ignore[arg-type]
            if name_of(node) == "getitem" and kind == "pick":
                group = self.group.get(source.args[0])  # type: ignore[union-attr,arg-type]
            if group is None:
                return
            self.group[node] = group
            if kind == "pick" and isinstance(node.meta["val"], torch.Tensor):
                group.root.members.append(node)
        elif bits is None:
            return
        elif kind in ("move", "pick"):  # a table: rows of a constant
            assert isinstance(source, Node)
            self.group[node] = _Group(bits.activations, [(source, node), node])
        elif isinstance(node.meta["val"], torch.Tensor):
            known = KNOWN.get(name_of(node))
            self.group[node] = _Group(bits.activations, [node], known=known)

    def _assign_join(self, node: Node) -> None:
        floats = [n for n in node.all_input_nodes if is_float(n)]
        groups = [self.group[n] for n in floats if n in self.group]
        if not groups:
            return
        first = next((g for g in groups if g.root.given), groups[0])
        for n in floats:
            self._put(n, node, first)
        self.group[node] = first

    def _put(self, value: Node, user: Node, group: _Group) -> None:
        """Has `user` read `value` in the encoding of `group`."""
        other = self.group.get(value)
        if other is not None and group.fits(other):
            group.join(other)
        else:
            group.root.members.append((value, user))
            if not group.root.bits:
                group.root.bits = self.default

    def _asked(self, node: Node) -> int | None:
        """Bits of an input of the model: those of the first that computes with it."""
        pending, seen = list(node.users), set()
        while pending:
            user = pending.pop(0)
            if user in seen or user.meta.get(RAW) or any(user in k for k in self.floats.values()):
                continue
            seen.add(user)
            if user.target is torch.ops.aten.copy_.default:
                pending += user.all_input_nodes[0].users  # what is kept is read in the next call
            elif user.op == "call_function" and is_float(user):
                if self._kind(user) in ("move", "join", "pick"):
                    pending += user.users
                elif (bits := self.bits[user]) is not None:
                    return bits.activations
        return None

    # -- operands --------------------------------------------------------------------------------

    def _operands(self, node: Node) -> None:
        """Annotates the operands of an op that are not quantized where they are made."""
        bits, name = self.bits[node], name_of(node)
        assert bits is not None
        weight = weight_of(node)
        if node.meta.get(RAW):
            return
        for i, operand in _positional(node):
            if not is_float(operand):
                continue
            second = PRODUCTS.get(name) == i
            wanted = bits.operand if second and bits.operand else bits.activations
            group = self.group.get(operand)
            if operand in self.constants:
                self._constant(node, i, operand, bits, wanted, weight)
            elif group is None or (group.root.bits or wanted) > wanted:
                self._edge(operand, node, wanted, symmetric=second and wanted == 16)
            elif second and group.root.bits == 16:
                group.root.symmetric = True
        if name in SOFTMAX:
            self._only_for_softmax(node)

    def _constant(
        self, node: Node, i: int, operand: Node, bits: Bits, wanted: int, weight: Weight | None
    ) -> None:
        name = name_of(node)
        if name in PLAIN_PARAMETERS or (weight is not None and i == weight.bias):
            return
        if name in ("layer_norm", "native_layer_norm"):
            if i == 2:  # HTP's has 8 bits; the bias takes the scale of the sums
                self._edge(operand, node, 8, fixed=True)
            return
        if weight is not None and i == weight.place:
            found = axis_before(operand, weight.axis)
            parameter, axis = found or (operand, weight.axis)
            at = _reader(parameter, operand, node)
            few = Bits(bits.activations, 8) if weight.wide and bits.weights == 4 else bits
            spec = self.recipe.weight(few, parameter.meta["val"].shape, axis, qat=self.qat)
            self.inputs.setdefault(at, {})[parameter] = spec
            return
        symmetric = PRODUCTS.get(name) == i and wanted == 16
        self._edge(operand, node, wanted, symmetric=symmetric, fixed=True)

    def _edge(self, operand: Node, node: Node, bits: int, **how: Any) -> None:
        how["label"] = f"operand {operand.name} of {described(node)}"
        if self.qat:
            how.pop("fixed", None)
        spec = self.recipe.activation(bits, qat=self.qat, **how)
        self.inputs.setdefault(node, {}).setdefault(operand, spec)

    def _only_for_softmax(self, node: Node) -> None:
        """Notes that what a softmax reads is for nothing else."""
        dim = argument(node, "dim", -1)
        value = node.args[0]
        while isinstance(value, Node) and len(value.users) == 1:
            group = self.group.get(value)
            if group is None or group.root.slots:
                return
            if group.root.members == [value]:
                group.root.softmax = dim
                return
            if name_of(value) not in ("to", "clone", "contiguous", "dropout", "detach", "alias"):
                return
            value = value.args[0]

    # -- encodings -------------------------------------------------------------------------------

    def _clip(self) -> None:
        """What is clipped by all that reads it has the encoding of the clipped values."""
        self.clipped: dict[Node, Node] = {}
        for node in self.graph.nodes:
            if name_of(node) not in CLIPS or not self._computes(node):
                continue
            source = node.args[0]
            group = self.group.get(source)
            if (
                group is not None
                and len(source.users) == 1
                and group.root.members == [source]
                and not group.root.slots
                and self._computes(source)
                and group.root.bits == self.group[node].root.bits
            ):
                self.clipped[source] = node

    def _encode(self) -> None:
        leaders: dict[_Group, EdgeOrNode] = {}
        roots = dict.fromkeys(g.root for g in self.group.values())
        for group in roots:
            members = dict.fromkeys(sorted(group.members, key=self._order))
            first, *others = members or [None]
            if first is None or first in self.clipped:
                continue
            leaders[group] = first
            self._set(first, self._spec(group, first))
            for other in others:
                self._set(other, SharedQuantizationSpec(first))
        for source, clip in self.clipped.items():
            self._follow(source, self.group[clip].root, leaders)
        for old, state in self.states.items():
            for user in old.users:
                if old not in self.floats and user is not state.write:
                    self._follow((old, user), self.group[old].root, leaders)
        for node in [n for n in self.outputs if n.meta.get(STEP)]:
            self.outputs.pop(node)

    def _order(self, at: EdgeOrNode) -> tuple[int, int]:
        """Where it stands; a node's operands are observed before its result."""
        return (self.place[at[1]], 0) if isinstance(at, tuple) else (self.place[at], 1)

    def _spec(self, group: _Group, first: EdgeOrNode, **how: Any) -> Spec:
        node = first[1] if isinstance(first, tuple) else first
        spec = self.recipe.activation(
            group.bits,
            qat=self.qat,
            symmetric=group.symmetric,
            known=group.known,
            softmax=group.softmax,
            label=described(node),
        )
        return spec.tied(slots=frozenset(group.slots))

    def _follow(self, at: EdgeOrNode, group: _Group, leaders: dict[_Group, EdgeOrNode]) -> None:
        if group in leaders:
            spec = self.recipe.activation(group.bits, qat=self.qat, symmetric=group.symmetric)
            self._set(at, spec.tied(leader=leaders[group]))

    def _set(self, at: EdgeOrNode, spec: Any) -> None:
        if isinstance(at, tuple):
            self.inputs.setdefault(at[1], {})[at[0]] = spec
        else:
            self.outputs[at] = spec


def _positional(node: Node) -> Iterable[tuple[int, Any]]:
    """The arguments of a node and their places; those in a list have its place."""
    for i, arg in enumerate(node.args):
        for value in arg if isinstance(arg, (list, tuple)) else [arg]:
            yield i, value


def _reader(parameter: Node, operand: Node, node: Node) -> Node:
    """What reads a parameter that `operand` of `node` is a permutation of."""
    while operand is not parameter:
        node, operand = operand, operand.args[0]  # type: ignore[assignment]
    return node


def module_paths(node: Node) -> list[str]:
    """Paths of the modules that a node is in, innermost last."""
    stack = node.meta.get("nn_module_stack") or {}
    return [str(path).removeprefix("L['self'].") for path, _ in stack.values()]


def described(node: Node) -> str:
    """A node as messages name it."""
    if node.op == "placeholder":
        return f"input {node.name}"
    inside = next((p for p in reversed(module_paths(node)) if p and p != "L['self']"), "")
    where = f" of module {inside}" if inside else ""
    return f"{node.name} ({node.target}){where}"


__all__ = ["Annotator", "State", "described", "module_paths"]
