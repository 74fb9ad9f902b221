# SPDX-License-Identifier: BSD-3-Clause
"""Exported modules as PT2E can annotate them: without in-place ops.

torchao knows a buffer as mutable only if `copy_` or `put_` writes it: the read of any other one is
folded into a constant, of two writes in place the second is lost, and what a view writes is not
seen to be the buffer's.  In functional form each buffer is read as it was and written once, by a
`copy_` at the end.

Nodes are rewritten where they stand, so that they keep what PT2E knows them by (module stack,
source), which a retrace would not keep, and would take half a minute for on a language model.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.fx.node import map_arg

from ..aliasing.slots import identity
from ..errors import LoweringError
from ..lowering.wishes import twin

aten = torch.ops.aten
Node = torch.fx.Node


def mutated_buffers(module: torch.fx.GraphModule) -> set[str]:
    """Names of the buffers that the module writes, batch norm's statistics left out."""
    roots: dict[Node, Node] = {}
    found = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            roots[node] = node
        if (source := _viewed(node)) in roots:
            roots[node] = roots[source]
        if (written := _written(node)) in roots:
            found.add(str(roots[written].target))
    return found


def functional(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Rewrites `module` in functional form, and returns it; see above.

    Batch norm's count of batches stays as it is: no op reads it.

    Raises:
        LoweringError: something is written through a view that maps many elements to one, or that
            changes their type.
    """
    if any(_written(node) is not None for node in module.graph.nodes):
        _Rewriter(module).run()
    return module


def _arguments(node: Node) -> list[tuple[torch.Argument, Any]]:
    """The arguments of an op by schema, defaults filled in; none for what is no op."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None:
        return []
    return [
        (a, node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value))
        for i, a in enumerate(schema.arguments)
    ]


def _written(node: Node) -> Node | None:
    """The tensor that an op writes; None if it writes none, or a count of batches."""
    for argument, given in _arguments(node):
        if argument.alias_info is not None and argument.alias_info.is_write:
            counts = isinstance(given, Node) and "num_batches_tracked" in str(given.target)
            return given if isinstance(given, Node) and not counts else None
    return None


def _viewed(node: Node) -> Node | None:
    """The tensor that a node's result may be a view of, be it a part of it, or written to."""
    if node.target is operator.getitem and node.op == "call_function":
        source = node.args[0]
        return source if isinstance(source, Node) and _viewed(source) is not None else None
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.returns:
        return None
    result = schema.returns[0].alias_info
    for argument, given in _arguments(node):
        if result is not None and argument.alias_info is not None and isinstance(given, Node):
            return given
    return None


class _Place:
    """A tensor of the original program: memory of its own, or a view of other memory.

    Attributes:
        node: the original node that makes it.
        base: what it is a view of.
        value: the node that has its elements, as long as nothing has been written since.
        version: how often the memory has been written to; of a view, when `value` was right.
    """

    def __init__(self, node: Node, base: _Place | None = None) -> None:
        self.node, self.base, self.value = node, base, node
        self.version: int = 0 if base is None else self.root.version

    @property
    def root(self) -> _Place:
        return self if self.base is None else self.base.root


class _Rewriter:
    def __init__(self, module: torch.fx.GraphModule) -> None:
        self.module, self.graph = module, module.graph
        self.places: dict[Node, _Place] = {}
        self.original: dict[Node, tuple[Any, Any]] = {}
        self.tensors: dict[object, _Place] = {}
        self.at: Node = next(iter(self.graph.nodes))
        values = [n.meta["val"] for n in self.graph.nodes if "val" in n.meta]
        self.fake = detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)])

    def run(self) -> None:
        dead = []
        for node in list(self.graph.nodes):
            self.at = node
            self.original[node] = node.args, node.kwargs
            if node.op == "output":
                self._write_back(node)
            if (written := _written(node)) is not None and self._write(node, written):
                dead.append(node)
                continue
            node.args, node.kwargs = map_arg((node.args, node.kwargs), self._now)
            self.places[node] = self._place(node)
        for node in reversed(dead):
            self.graph.erase_node(node)
        self.graph.eliminate_dead_code()
        self.graph.lint()
        self.module.recompile()

    def _place(self, node: Node) -> _Place:
        if node.op == "get_attr":
            value = attribute(self.module, str(node.target))
            if isinstance(value, torch.Tensor):  # one tensor may have many nodes and many names
                return self.tensors.setdefault(identity(value), _Place(node))
        source = self._original_source(node)
        return _Place(node, None if source is None else self.places[source])

    def _original_source(self, node: Node) -> Node | None:
        """What the node is a view of in this very program; a `reshape` may be a copy."""
        now = node.args, node.kwargs
        node.args, node.kwargs = self.original[node]
        source = _viewed(node)
        node.args, node.kwargs = now
        if source is None or not isinstance(node.target, OpOverload):
            return source
        if not node.target._can_decompose():
            return source
        value = source.meta["val"]
        probe = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        args, kwargs = map_arg(
            self.original[node], lambda n: probe if n is source else n.meta.get("val")
        )
        try:
            made = node.target(*args, **kwargs)
        except Exception:  # it has other tensors, of another device, which only views have none of
            return source
        first = made[0] if isinstance(made, (list, tuple)) else made
        same = first.untyped_storage()._cdata == probe.untyped_storage()._cdata
        return source if same else None

    # -- reading ---------------------------------------------------------------------------------

    def _now(self, node: Node) -> Node:
        """What holds the elements of an original node now."""
        return self._value(self.places[node])

    def _value(self, place: _Place) -> Node:
        if place.base is None:
            return place.value
        if place.version != place.root.version:
            args, kwargs = map_arg(self.original[place.node], self._now)
            place.value = self._call(place.node.target, args, kwargs, place.node)
            place.version = place.root.version
        return place.value

    def _call(self, target: Any, args: Any, kwargs: Any, like: Node) -> Node:
        """A new node, here, with the metadata of another."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, tuple(args), dict(kwargs))
        node.meta = {k: v for k, v in like.meta.items() if k not in ("val", "tensor_meta")}
        values = map_arg((node.args, node.kwargs), self._fake)
        with torch.no_grad(), self.fake or nullcontext():
            node.meta["val"] = target(*values[0], **values[1])
        return node

    def _fake(self, node: Node) -> Any:
        if "val" not in node.meta and node.op == "get_attr":
            value = attribute(self.module, str(node.target))
            node.meta["val"] = self.fake.from_tensor(value) if self.fake else value
        return node.meta.get("val")

    # -- writing ---------------------------------------------------------------------------------

    def _write(self, node: Node, written: Node) -> bool:
        """Puts the functional twin of an op that writes; False if there is none."""
        place = self.places[written]
        old = self._value(place)
        args, kwargs = map_arg((node.args, node.kwargs), self._now)
        shape, dtype = self._fake(old).shape, self._fake(old).dtype
        if node.target in _FILLS:
            new = self._filled(node, args[1:], old)
        elif node.target is aten.copy_.default:
            new = args[1]  # type: ignore[assignment]
        elif isinstance(node.target, OpOverload) and (op := twin(node.target)) is not None:
            new = self._call(op, args, kwargs, node)
        else:
            return False
        if self._fake(new).dtype is not dtype:
            new = self._call(aten.to.dtype, (new, dtype), {}, node)
        if self._fake(new).shape != shape:
            new = self._call(aten.expand.default, (new, list(shape)), {}, node)
        self._set(place, new, node)
        self.places[node] = place
        return True

    def _filled(self, node: Node, value: tuple[Any, ...], old: Node) -> Node:
        """What a tensor becomes that is filled: it does not depend on what it was."""
        if value and isinstance(value[0], Node):
            return value[0]
        fake, number = self._fake(old), value[0] if value else 0
        how = {"dtype": fake.dtype, "device": fake.device}
        return self._call(aten.full.default, (list(fake.shape), number), how, node)

    def _set(self, place: _Place, new: Node, like: Node) -> None:
        if place.base is None:
            place.value = new
            place.version += 1
            return
        base = place.base
        if place.node.target is operator.getitem:  # of the views that a `split` makes
            whole = base.base
            assert whole is not None
            self._set(whole, self._scattered_part(place.node, whole, new, like), like)
        else:
            self._set(base, self._scattered(place.node, self._value(base), new, like), like)
        place.value, place.version = new, place.root.version

    def _scattered(self, view: Node, old: Node, new: Node, like: Node) -> Node:
        """`old` with those of its elements replaced that `view` shows."""
        name = view.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
        given = [a for _, a in self._bound(view)[1:]]
        shape = list(self._fake(old).shape)
        if name in _SAME:
            return new
        if name in _RESHAPES:
            return self._call(aten.reshape.default, (new, shape), {}, like)
        if name in ("expand", "expand_as", "broadcast_to") and self._fake(new).shape == (*shape,):
            return new
        if name in _INVERSES:
            op, rest = _INVERSES[name](*given)
            return self._call(op, (new, *rest), {}, like)
        if name in _SCATTERS:
            op, rest = _SCATTERS[name](*given)
            return self._call(op, (old, new, *rest), {}, like)
        raise LoweringError(
            f"{like.name} ({like.target}) writes through {view.name} ({view.target}): that cannot "
            "be written without writing in place; write to the tensor itself"
        )

    def _scattered_part(self, item: Node, whole: _Place, new: Node, like: Node) -> Node:
        views, index = self.places[item].base, item.args[1]
        assert views is not None
        assert isinstance(index, int)
        node, old = views.node, self._value(whole)
        name = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
        parts = node.meta["val"]
        given = {a.name: v for a, v in self._bound(node)}
        dim = given.get("dim") or 0
        if name == "unbind":
            return self._call(aten.select_scatter.default, (old, new, dim, index), {}, like)
        start = sum(p.shape[dim] for p in parts[:index])
        end = start + parts[index].shape[dim]
        return self._call(aten.slice_scatter.default, (old, new, dim, start, end), {}, like)

    def _bound(self, node: Node) -> list[tuple[torch.Argument, Any]]:
        now = node.args, node.kwargs
        node.args, node.kwargs = self.original[node]
        bound = _arguments(node)
        node.args, node.kwargs = now
        return bound

    def _write_back(self, output: Node) -> None:
        """One `copy_` for each buffer or input that has a new value, all read before any."""
        roots = {id(p): p for p in self.places.values() if p.base is None}
        changed = [
            p for p in roots.values() if p.version and p.node.op in ("get_attr", "placeholder")
        ]
        nodes = {p.node for p in changed}
        news = []
        for place in changed:
            root: Node | None = place.value
            while root is not None and (source := _viewed(root)) is not None:
                root = source
            new = place.value
            if root in nodes:
                new = self._call(aten.clone.default, (new,), {}, new)
            news.append(new)
        for place, new in zip(changed, news, strict=True):
            self._call(aten.copy_.default, (place.node, new), {}, new)


_FILLS = {aten.zero_.default, aten.fill_.Scalar, aten.fill_.Tensor}

# What a written view is to what it is a view of, by the name of the op that makes it; its other
# arguments are the functions'.

_SAME = frozenset(
    ("alias", "contiguous", "detach", "detach_", "lift", "lift_fresh", "positive", "resolve_conj",
     "resolve_neg", "to", "type_as")
)  # fmt: skip
_RESHAPES = frozenset(
    ("_reshape_alias", "_unsafe_view", "flatten", "ravel", "reshape", "reshape_as", "squeeze",
     "unflatten", "unsqueeze", "view", "view_as")
)  # fmt: skip
_INVERSES: dict[str, Callable[..., tuple[OpOverload, tuple[Any, ...]]]] = {
    "t": lambda: (aten.t.default, ()),
    "numpy_T": lambda: (aten.numpy_T.default, ()),
    "mT": lambda: (aten.mT.default, ()),
    "transpose": lambda a, b: (aten.transpose.int, (a, b)),
    "swapaxes": lambda a, b: (aten.transpose.int, (a, b)),
    "swapdims": lambda a, b: (aten.transpose.int, (a, b)),
    "movedim": lambda a, b: (_of(aten.movedim, a), (b, a)),
    "moveaxis": lambda a, b: (_of(aten.movedim, a), (b, a)),
    "permute": lambda dims: (
        aten.permute.default,
        ([[d % len(dims) for d in dims].index(i) for i in range(len(dims))],),
    ),
}
_SCATTERS: dict[str, Callable[..., tuple[OpOverload, tuple[Any, ...]]]] = {
    "slice": lambda *rest: (aten.slice_scatter.default, rest),
    "narrow": lambda dim, start, length: (
        aten.slice_scatter.default,
        # A slice may end at the end, and a negative one would end at 0, before it.
        (dim, start, start + length or None),
    ),
    "select": lambda dim, index: (aten.select_scatter.default, (dim, index)),
    "diagonal": lambda *rest: (aten.diagonal_scatter.default, rest),
    "as_strided": lambda *rest: (aten.as_strided_scatter.default, rest),
}


def _of(packet: Any, axes: Any) -> OpOverload:
    overload: OpOverload = packet.int if isinstance(axes, int) else packet.intlist
    return overload


def attribute(module: torch.nn.Module, name: str) -> Any:
    """A tensor, a module or anything else that a dotted name means."""
    value: Any = module
    for part in name.split("."):
        value = getattr(value, part)
    return value
