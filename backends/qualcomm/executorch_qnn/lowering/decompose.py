# SPDX-License-Identifier: BSD-3-Clause
"""From `torch.export`'s training IR to functional core ATen, with composite ops left whole.

A program is retraced exactly once.  Retracing a functional program again is not only slow but
unsound: it replays the buffer updates one after another, and gives wrong values when they cross
(`b.copy_(c); c.copy_(x)`).  What has to be opened after that is opened node by node.
"""

from __future__ import annotations

import builtins
import functools
import keyword
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from ..aliasing.slots import overlap_message, overlaps, tensors
from ..aliasing.updates import refresh_outputs
from ..errors import LoweringError
from .inputs import one_input_each
from .kernels import EXTRA

aten = torch.ops.aten


@functools.cache
def decompositions() -> dict[OpOverload, Any]:
    """torch.export's decompositions to core ATen, all of them, and a few of ours."""
    table = torch.export.default_decompositions().materialize()
    return {op: fn for op, fn in table.items() if isinstance(op, OpOverload)} | EXTRA


_PROVENANCE = ("nn_module_stack", "stack_trace", "from_node", "torch_fn", "source_fn_stack")


def functionalise(
    ep: ExportedProgram, keep: Iterable[OpOverload], more: Mapping[OpOverload, Any] | None = None
) -> ExportedProgram:
    """The functional core ATen form of `ep`, in one retrace; ops in `keep` are left whole.

    Args:
        more: decompositions apart from those to core ATen.

    Raises:
        LoweringError: torch cannot express the program functionally (its own text is given).
    """
    kept = set(keep)
    table = {op: fn for op, fn in decompositions().items() if op not in kept} | dict(more or {})
    one_input_each(ep)
    _copy_clones(ep.graph)
    try:
        functional: ExportedProgram = ep.run_decompositions(table)
    except Exception as e:
        named = {s.target or "": t for s, t in tensors(ep)}
        for a, b in overlaps(named):
            raise LoweringError(overlap_message(a, b)) from e
        raise LoweringError(f"torch cannot make the program functional: {e}") from e
    for node in list(functional.graph.nodes):
        if node.target is aten._assert_tensor_metadata.default:
            functional.graph.erase_node(node)  # it checked what export has checked
        elif rewrite := _REWRITES.get(node.target):
            rewrite(node)
    refresh_outputs(functional)
    functional.graph.eliminate_dead_code()
    _written_parameters(functional)
    functional.graph_module.recompile()
    return functional


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


def _replace(node: torch.fx.Node, op: OpOverload, args: Any, kwargs: dict[str, Any]) -> None:
    with node.graph.inserting_before(node):
        new = node.graph.call_function(op, args, kwargs)
    new.meta = node.meta
    node.replace_all_uses_with(new, propagate_meta=False)
    node.graph.erase_node(node)


_REWRITES: dict[Any, Callable[[torch.fx.Node], None]] = {
    aten.full_like.default: _full_like,
    aten.copy.default: _copy,
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
    for spec in (*ep.graph_signature.input_specs, *ep.graph_signature.output_specs):
        if getattr(spec.arg, "name", None) in names:
            spec.arg.name = names[spec.arg.name]
        if spec.target in names and spec.kind is OutputKind.USER_INPUT_MUTATION:
            spec.target = names[spec.target]
    ep.graph_module.recompile()


def open_node(
    gm: torch.fx.GraphModule, node: torch.fx.Node, keep: Iterable[OpOverload] = ()
) -> list[torch.fx.Node]:
    """Replaces a composite node by its decomposition, without touching the rest of the graph.

    Args:
        keep: composite ops that stay whole if the decomposition contains them.

    Returns:
        The new nodes.

    Raises:
        LoweringError: PyTorch has no decomposition for the op.
    """
    op: Any = node.target
    assert isinstance(op, OpOverload)
    flat, spec = pytree.tree_flatten((node.args, node.kwargs))
    places = [i for i, a in enumerate(flat) if isinstance(a, torch.fx.Node)]

    class Alone(torch.nn.Module):
        def forward(self, *tensors: Any) -> Any:
            leaves = list(flat)
            for i, t in zip(places, tensors, strict=True):
                leaves[i] = t
            args, kwargs = pytree.tree_unflatten(leaves, spec)
            return op(*args, **kwargs)

    # Export only looks at their shapes; nothing is ever written to them.
    values = [flat[i].meta["val"] for i in places]
    inputs = tuple(torch.empty(tuple(v.shape), dtype=v.dtype) for v in values)
    with torch.no_grad():
        alone = torch.export.export(Alone(), inputs, strict=False)
    table = torch._decomp.decomposition_table
    more = {op: table[op]} if op in table and op not in decompositions() else {}
    alone = functionalise(alone, set(keep) - {op}, more)
    targets = [n.target for n in alone.graph.nodes if n.op == "call_function"]
    if op in targets or any(getattr(t, "namespace", "aten") != "aten" for t in targets):
        raise LoweringError(f"node {node.name}: {op} has no decomposition and no lowering")
    return _inline(gm, node, alone, [flat[i] for i in places])


def _inline(
    gm: torch.fx.GraphModule,
    node: torch.fx.Node,
    alone: ExportedProgram,
    arguments: list[torch.fx.Node],
) -> list[torch.fx.Node]:
    if alone.constants or len(alone.graph_signature.user_inputs) != len(arguments):
        raise LoweringError(
            f"node {node.name}: the decomposition of {node.target} needs a constant tensor"
        )
    mode = detect_fake_mode(
        [n.meta["val"] for n in gm.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
    )
    assert mode is not None
    env: dict[torch.fx.Node, torch.fx.Node] = {}
    new: list[torch.fx.Node] = []
    inputs = iter(arguments)
    results: list[torch.fx.Node] = []
    with gm.graph.inserting_before(node), mode, torch.no_grad():
        for inner in alone.graph.nodes:
            if inner.op == "placeholder":
                env[inner] = next(inputs)
            elif inner.op == "output":
                results = [env[r] for r in inner.args[0]]
            else:
                copied = gm.graph.node_copy(inner, env.__getitem__)
                for key in _PROVENANCE:
                    copied.meta.pop(key, None)
                    if key in node.meta:
                        copied.meta[key] = node.meta[key]
                args, kwargs = torch.fx.map_arg((copied.args, copied.kwargs), _meta_value)
                target: Any = copied.target
                copied.meta["val"] = target(*args, **kwargs)
                env[inner] = copied
                new.append(copied)
    if isinstance(node.meta["val"], torch.Tensor):
        node.replace_all_uses_with(results[0], propagate_meta=False)
    else:
        for user in list(node.users):
            index = user.args[1]
            assert isinstance(index, int)
            user.replace_all_uses_with(results[index], propagate_meta=False)
            gm.graph.erase_node(user)
    gm.graph.erase_node(node)
    return new


def _meta_value(node: torch.fx.Node) -> Any:
    return node.meta["val"]
