# SPDX-License-Identifier: BSD-3-Clause
"""From `torch.export`'s training IR to functional core ATen, with wanted composite ops left whole.

A program is retraced at most once.  Retracing a functional program again is not only slow but
unsound: it replays the buffer updates one after another, and gives wrong values when they cross
(`b.copy_(c); c.copy_(x)`).  Everything after that is decomposed node by node.
"""

from __future__ import annotations

import builtins
import copy
import functools
import keyword
import operator
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from executorch.exir.tracer import _default_decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _get_decomp_for_cia, _special_op_to_preserve_cia
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.export import ExportedProgram
from torch.export.exported_program import _override_composite_implicit_decomp
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec, TensorArgument
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from ..aliasing.slots import overlap_message, overlaps, tensors
from ..aliasing.updates import refresh_outputs
from ..errors import LoweringError
from ..ops.registry import aten_op
from ..source import called_in
from .fold import lift_constants
from .inputs import one_input_each
from .kernels import EXTRA

aten = torch.ops.aten


@functools.cache
def decompositions() -> dict[OpOverload, Any]:
    """ExecuTorch's decompositions to core ATen, all of them, and a few of ours."""
    table = _default_decomposition_table().materialize()
    return {op: fn for op, fn in table.items() if isinstance(op, OpOverload)} | EXTRA


_PROVENANCE = ("nn_module_stack", "stack_trace", "from_node", "torch_fn", "source_fn_stack")


def graphs(gm: torch.fx.GraphModule) -> Iterator[torch.fx.GraphModule]:
    """A graph and the bodies of its control flow, at any depth."""
    yield gm
    for node in gm.graph.find_nodes(op="get_attr"):  # other graphs in it are those of delegates
        body = _attribute(gm, str(node.target))
        if isinstance(body, torch.fx.GraphModule):
            yield from graphs(body)


def _attribute(gm: torch.fx.GraphModule, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), gm)


def copied(ep: ExportedProgram) -> ExportedProgram:
    """The same program with a graph and a signature of its own; weights are shared."""
    twin = copy.copy(ep)
    twin._state_dict, twin._constants = dict(ep.state_dict), dict(ep.constants)
    twin._graph_module = copy.deepcopy(ep.graph_module)
    twin._graph_signature = copy.deepcopy(ep.graph_signature)
    # Nodes that are called like a Python builtin have another name in the copy.
    pairs = zip(ep.graph.nodes, twin.graph.nodes, strict=True)
    _rename(twin, {old.name: new.name for old, new in pairs if old.name != new.name})
    twin._module_call_graph = [*ep.module_call_graph]
    root = ep.module_call_graph[0]
    if root.signature is not None:
        plain = replace(root.signature, out_spec=plain_spec(root.signature.out_spec))
        twin._module_call_graph[0] = replace(root, signature=plain)
    return twin


def plain_spec(spec: pytree.TreeSpec) -> pytree.TreeSpec:
    """A structure with tuples in the place of `torch.return_types`, which have no written form."""

    def is_named(x: Any) -> bool:
        return type(x).__module__ == "torch.return_types"

    tree = pytree.tree_unflatten([0] * spec.num_leaves, spec)
    plain = pytree.tree_map(lambda x: tuple(x) if is_named(x) else x, tree, is_leaf=is_named)
    return pytree.tree_structure(plain)


def _rename(ep: ExportedProgram, names: Mapping[str, str]) -> None:
    """Gives nodes that were renamed their new names in the signature."""
    for spec in (*ep.graph_signature.input_specs, *ep.graph_signature.output_specs):
        if getattr(spec.arg, "name", None) in names:
            spec.arg.name = names[spec.arg.name]
        if spec.target in names and spec.kind is OutputKind.USER_INPUT_MUTATION:
            spec.target = names[spec.target]


def is_functional(ep: ExportedProgram, *, but: Container[torch.fx.Node] = ()) -> bool:
    """Whether nothing in the graph writes to a tensor, and no op hides what it does.

    Args:
        but: nodes that are not looked at.
    """
    for gm in graphs(ep.graph_module):
        for node in gm.graph.nodes:
            op = node.target
            if node.op != "call_function" or op is operator.getitem or node in but:
                continue
            if isinstance(op, OpOverload):
                if op._schema.is_mutable or op.name() in _LYING:
                    return False
            elif isinstance(op, torch._ops.HigherOrderOperator) and op.name() not in _BODIES:
                return False
    return True


# Composite ops that write to their arguments, or return them, though their schemas do not say so.
_LYING = frozenset(
    f"aten::{name}"
    for name in ("batch_norm", "instance_norm", "dropout", "feature_dropout", "alpha_dropout",
                 "feature_alpha_dropout", "rrelu", "lift_fresh", "detach")
)  # fmt: skip
_BODIES = frozenset({"cond", "map_impl", "scan", "while_loop"})


def functionalise(ep: ExportedProgram) -> tuple[ExportedProgram, int]:
    """The functional form of `ep`, composite ops whole, and the number of retraces: one or none.

    `ep` itself is changed; see `copied`.

    Raises:
        LoweringError: torch cannot express the program functionally (its own text is given).
    """
    one_input_each(ep)
    if is_functional(ep):
        return ep, 0
    writes = _last_writes(ep)
    _copy_clones(ep.graph)
    if writes:
        _become_updates(ep, writes)
        return ep, 0
    try:
        functional: ExportedProgram = ep.run_decompositions({})
    except Exception as e:
        named = {s.target or "": t for s, t in tensors(ep)}
        for a, b in overlaps(named):
            raise LoweringError(overlap_message(a, b)) from e
        raise LoweringError(f"torch cannot make the program functional: {e}") from e
    _written_parameters(functional)
    return functional, 1


def _last_writes(ep: ExportedProgram) -> list[Any]:
    """The `copy_` nodes into buffers, if a program is functional but for them.

    None if it is not so, if a buffer is written twice, or if something reads one after it is
    written, be it through a view.
    """
    buffers = {s.arg.name for s in ep.graph_signature.input_specs if s.kind is InputKind.BUFFER}
    viewed: dict[Any, set[Any]] = {}
    """Values, and the buffers that they may be views of."""
    writes: dict[Any, Any] = {}
    for node in ep.graph.nodes:
        if node.op == "placeholder":
            viewed[node] = {node} if node.name in buffers else set()
            continue
        write = node.target is aten.copy_.default and node.args[0].name in buffers
        read = [node.args[1]] if write else node.all_input_nodes
        views: set[Any] = set().union(*(viewed[n] for n in read))
        if not views.isdisjoint(writes):
            return []
        if write:
            if node.users or node.args[0] in writes:
                return []
            writes[node.args[0]] = node
        viewed[node] = views if _may_be_view(node.target) else set()
    return list(writes.values()) if is_functional(ep, but=writes.values()) else []


def _may_be_view(op: Any) -> bool:
    return (
        not isinstance(op, OpOverload)
        or is_composite(op)
        or any(r.alias_info is not None for r in op._schema.returns)
    )


def _become_updates(ep: ExportedProgram, writes: Sequence[Any]) -> None:
    """Makes what `writes` store results of the graph, which it says are new values of buffers."""
    targets = {s.arg.name: s.target for s in ep.graph_signature.input_specs}
    output: Any = ep.graph.output_node()
    values = tuple(w.args[1] for w in writes)
    output.args = ((*values, *output.args[0]),)
    ep.graph_signature.output_specs[:0] = [
        OutputSpec(OutputKind.BUFFER_MUTATION, TensorArgument(v.name), targets[w.args[0].name])
        for w, v in zip(writes, values, strict=True)
    ]
    for w in writes:
        ep.graph.erase_node(w)
    ep.graph_module.recompile()


def to_core(
    ep: ExportedProgram, opener: Opener, whole: Callable[[torch.fx.Node], bool] | None = None
) -> None:
    """Decomposes a functional program to core ATen in place, in control-flow bodies too.

    Args:
        whole: the nodes that stay as they are; all of `opener`'s ops if `None`.
    """
    for gm in graphs(ep.graph_module):
        pending = list(gm.graph.nodes)[::-1]
        while pending:
            node = pending.pop()
            if node.op != "call_function" or not isinstance(op := node.target, OpOverload):
                continue
            if op in _CHECKS:
                gm.graph.erase_node(node)
            elif op in opener.keep and (whole is None or whole(node)):
                continue
            elif op in _REWRITES:
                _REWRITES[op](node)
            elif is_composite(op):
                pending += opener.open(gm, node)[::-1]
        gm.graph.eliminate_dead_code()
        gm.recompile()
    lift_constants(ep)
    refresh_outputs(ep)


def is_composite(op: Any) -> bool:
    """Whether a target is an op that consists of others in core ATen."""
    if not isinstance(op, OpOverload) or not any(
        "Tensor" in str(r.type) for r in op._schema.returns
    ):
        return False
    return op in decompositions() or (op._can_decompose() and op not in _PRESERVED)


# Of what export has checked, and of values; ExecuTorch drops them too.  Those of numbers stay until
# then: they say what sizes there can be.
_CHECKS = (aten._assert_tensor_metadata.default, aten._assert_async.msg)
_PRESERVED = (aten.upsample_bilinear2d.vec, aten.upsample_nearest2d.vec)  # core ATen, by fiat


def _copy_clones(graph: torch.fx.Graph) -> None:
    """Makes each `copy_` copy a node of its own, in the shape and type of what it is copied to.

    Otherwise `b.copy_(n); c.copy_(n)` becomes one new value of two buffers, which torch's signature
    cannot express: it maps each output to one buffer.  And torch takes the source of a copy to a
    buffer for its new value, even one of another shape or type.
    """
    for node in graph.find_nodes(op="call_function", target=aten.copy_.default):
        target, source = node.args[0].meta["val"], node.args[1]
        steps: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]] = []
        if source.meta["val"].dtype != target.dtype:
            steps.append((aten._to_copy.default, (), {"dtype": target.dtype}))
        if source.meta["val"].shape != target.shape:
            steps.append((aten.expand.default, (list(target.shape),), {}))
        for op, args, kwargs in (*steps, (aten.clone.default, (), {})):
            with graph.inserting_before(node):
                new = graph.call_function(op, (source, *args), kwargs)
            new.meta = {k: v for k, v in source.meta.items() if k in _PROVENANCE}
            new.meta["val"] = op(source.meta["val"], *args, **kwargs)
            source = new
        node.args = (node.args[0], source, *node.args[2:])


def _full_like(node: torch.fx.Node) -> None:
    """`full_like(x, v)` is `full(shape, v)`: a constant, which depends on no input."""
    value = node.meta["val"]
    args = (list(value.shape), node.args[1])
    _replace(node, aten.full.default, args, {"dtype": value.dtype})


def _copy(node: torch.fx.Node) -> None:
    """`copy(x, y)` is `y` in the shape and type of `x`."""
    value, source = node.meta["val"], node.args[1]
    assert isinstance(source, torch.fx.Node)
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(aten._to_copy.default, (source,), {"dtype": value.dtype})
    cast.meta = {**source.meta, "val": source.meta["val"].to(value.dtype)}
    _replace(node, aten.expand.default, (cast, list(value.shape)), {})


def _as_strided(node: torch.fx.Node) -> None:
    """An `as_strided` of what its operand shows is a copy; an average pool to one place has it."""
    source, size, stride, *offset = node.args
    assert isinstance(source, torch.fx.Node)
    value = source.meta["val"]
    steps = zip(size, stride, value.stride(), strict=False)  # type: ignore[arg-type]
    same = all(n == 1 or s == t for n, s, t in steps)
    if tuple(size) == value.shape and same and offset in ([], [None], [value.storage_offset()]):  # type: ignore[arg-type]
        _replace(node, aten.clone.default, (source,), {})


def _replace(node: torch.fx.Node, op: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(op, args, kwargs)
    new.meta = node.meta
    node.replace_all_uses_with(new, propagate_meta=False)
    node.graph.erase_node(node)


def _item(node: torch.fx.Node) -> None:
    """`item` in the form that ExecuTorch has."""
    node.target = aten._local_scalar_dense.default


_REWRITES: dict[Any, Callable[[torch.fx.Node], None]] = {
    aten.item.default: _item,
    aten.full_like.default: _full_like,
    aten.copy.default: _copy,
    aten.as_strided.default: _as_strided,
}


def _written_parameters(ep: ExportedProgram) -> None:
    """A parameter that the model writes is a buffer to everything that follows."""
    written = [
        s for s in ep.graph_signature.output_specs if s.kind is OutputKind.PARAMETER_MUTATION
    ]
    for spec in written:
        spec.kind = OutputKind.BUFFER_MUTATION
    for spec in ep.graph_signature.input_specs:
        if spec.kind is InputKind.PARAMETER and spec.target in {s.target for s in written}:
            spec.kind, spec.persistent = InputKind.BUFFER, True


class Opener:
    """Replaces composite nodes by what they consist of, without touching the rest of a graph.

    Equal nodes (one op, the same shapes and numbers) are traced once.

    Args:
        keep: composite ops that stay whole where a decomposition contains them.
    """

    def __init__(self, keep: Iterable[OpOverload]) -> None:
        self.keep = frozenset(keep)
        self._traced: dict[object, torch.fx.Graph] = {}

    def open(self, gm: torch.fx.GraphModule, node: torch.fx.Node) -> list[torch.fx.Node]:
        """Opens `node` by one step and returns the new nodes, which may be composite themselves.

        Raises:
            LoweringError: PyTorch has no decomposition for the op, or none without prims.
        """
        op = aten_op(node.target)
        assert op is not None
        flat, spec = pytree.tree_flatten((node.args, node.kwargs))
        places = [i for i, a in enumerate(flat) if isinstance(a, torch.fx.Node)]
        values = [flat[i].meta["val"] for i in places]
        key = _key(op, flat, spec, values)
        graph = None if key is None else self._traced.get(key)
        if graph is None:
            graph = self._trace(op, flat, spec, places, values, node)
            if key is not None:
                self._traced[key] = graph
        return _inline(gm, node, graph, [flat[i] for i in places])

    def _trace(
        self,
        op: OpOverload,
        flat: list[Any],
        spec: pytree.TreeSpec,
        places: list[int],
        values: list[Any],
        node: torch.fx.Node,
    ) -> torch.fx.Graph:
        table = decompositions()
        other = torch._decomp.decomposition_table.get(op)  # of an op that is core ATen
        decompose = table.get(op) or other or _get_decomp_for_cia(op)

        def call(*tensors: Any) -> Any:
            leaves = list(flat)
            for i, t in zip(places, tensors, strict=True):
                leaves[i] = t
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            # Some decompositions change the lists that they are given; those of a node cannot be.
            args = [list(a) if isinstance(a, list) else a for a in args]
            result = decompose(*args, **kwargs)
            # torch.fx would make a node of its own for a named tuple.
            return tuple(result) if isinstance(result, tuple) else result

        mode = _fake_mode(node.graph)
        try:
            with mode, torch.no_grad(), enable_python_dispatcher(), self._kept_whole(op):
                # Without a table: its decompositions would run below the functionalisation, and
                # what they write to would stay written to.  The caller opens what is left.
                functional = dispatch_functionalize(call, FunctionalTensorMode())
                # A tensor for each operand: of two that are one, the trace would use one only.
                own = [_like(v) if isinstance(v, torch.Tensor) else v for v in values]
                traced = make_fx(functional, _allow_non_fake_inputs=True)(*own)
        except Exception as e:
            raise LoweringError(
                f"node {node.name}: torch cannot decompose {op}: {e}{called_in(node)}"
            ) from e
        graph: torch.fx.Graph = traced.graph
        for n in graph.find_nodes(op="call_function", target=torch.ops.prims.copy_strided.default):
            n.replace_all_uses_with(n.args[0])  # only its strides are others
        graph.eliminate_dead_code()
        targets = [n.target for n in graph.nodes if n.op == "call_function"]
        if op in targets or any(getattr(t, "namespace", "aten") == "prims" for t in targets):
            raise LoweringError(
                f"node {node.name}: {op} has no decomposition and no lowering{called_in(node)}"
            )
        for n in graph.nodes:
            if n.op == "get_attr":
                constant = getattr(traced, str(n.target))
                n.meta["constant"] = getattr(constant, "constant", None)
                if n.meta["constant"] is None:
                    n.meta["constant"] = constant
        return graph

    def _kept_whole(self, but: OpOverload) -> AbstractContextManager[Any]:
        whole = {
            op: _special_op_to_preserve_cia
            for op in self.keep
            if op is not but and op._can_decompose() and _is_pure(op)
        }
        return _override_composite_implicit_decomp(whole)


def _key(op: OpOverload, flat: list[Any], spec: pytree.TreeSpec, values: list[Any]) -> object:
    """Equal for nodes that consist of the same; `None` where that is not known."""
    shapes = []
    for v in values:
        if not isinstance(v, FakeTensor) or any(not isinstance(s, int) for s in v.shape):
            return None
        shapes.append((tuple(v.shape), v.stride(), v.storage_offset(), v.dtype, id(v.fake_mode)))
    fixed = tuple((type(a), a) for a in flat if not isinstance(a, torch.fx.Node))
    return op, str(spec), fixed, tuple(isinstance(a, torch.fx.Node) for a in flat), tuple(shapes)


def _like(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)


def _is_pure(op: OpOverload) -> bool:
    schema = op._schema
    return not schema.is_mutable and not any(r.alias_info for r in schema.returns)


def _fake_mode(graph: torch.fx.Graph) -> AbstractContextManager[Any]:
    values = [n.meta.get("val") for n in graph.nodes]
    return detect_fake_mode([v for v in values if isinstance(v, torch.Tensor)]) or nullcontext()


def _inline(
    gm: torch.fx.GraphModule,
    node: torch.fx.Node,
    traced: torch.fx.Graph,
    arguments: list[torch.fx.Node],
) -> list[torch.fx.Node]:
    """Puts a copy of `traced` in the place of `node`; returns the new nodes."""
    kept = {k: v for k, v in node.meta.items() if k not in ("val", "tensor_meta")}
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    new: list[torch.fx.Node] = []
    inputs = iter(arguments)
    results: Any = None
    with gm.graph.inserting_before(node):
        for inner in traced.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
                continue
            if inner.op == "output":
                results = torch.fx.map_arg(inner.args[0], env.__getitem__)
                break
            if inner.op == "get_attr":
                constant = inner.meta["constant"]
                name = f"_constant_{len(dict(gm.named_buffers()))}"
                gm.register_buffer(name, constant, persistent=False)
                copied = gm.graph.get_attr(name)
                value = _as_fake(constant, node)
            else:
                copied = gm.graph.node_copy(inner, env.__getitem__)
                value = inner.meta.get("val")
                if copied.target is operator.getitem:
                    value = inner.args[0].meta["val"][inner.args[1]]
            copied.meta = {**kept, "val": value}
            env[inner] = copied
            new.append(copied)
    if isinstance(results, torch.fx.Node):
        node.replace_all_uses_with(results, propagate_meta=False)
    else:
        for user in list(node.users):
            index = user.args[1]
            assert user.target is operator.getitem
            assert isinstance(index, int)
            user.replace_all_uses_with(results[index], propagate_meta=False)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return new


def _as_fake(constant: torch.Tensor, node: torch.fx.Node) -> torch.Tensor:
    mode = _fake_mode(node.graph)
    return mode.from_tensor(constant) if isinstance(mode, FakeTensorMode) else constant


def rename_inputs(ep: ExportedProgram) -> None:
    """Renames placeholders that are called like a Python builtin (`input`, `id`, `sum`, ...).

    torch.export takes them over from `forward`, but torch.fx gives a node of a copied graph another
    name, which the copied signature then does not know.  It also names nodes behind the back of
    the graph, which would give their names to new nodes once more: the graph is told here.
    """
    ep.graph._graph_namespace._used_names.update(n.name for n in ep.graph.nodes)
    names = {
        n.name: f"{n.name}_arg"
        for n in ep.graph.nodes
        if n.op == "placeholder" and (hasattr(builtins, n.name) or keyword.iskeyword(n.name))
    }
    if not names:
        return
    for node in ep.graph.nodes:
        if node.op == "placeholder" and node.name in names:
            node._rename(names[node.name])
            node.target = node.name
    _rename(ep, names)
    ep.graph_module.recompile()
