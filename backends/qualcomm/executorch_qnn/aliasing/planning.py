# SPDX-License-Identifier: BSD-3-Clause
"""Memory planning that knows what shares memory: `AliasAwareMemoryPlanning`."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from executorch.exir import memory
from executorch.exir.memory_planning import (
    MemoryPlanningAlgorithmSuite,
    update_all_tensors_lifetime,
)
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.passes.replace_view_copy_with_view_pass import _ViewSpec
from executorch.exir.schema import TensorShapeDynamism
from executorch.exir.tensor import TensorSpec
from torch.export.graph_signature import ExportGraphSignature, OutputKind
from torch.fx import GraphModule, Node
from torch.fx.passes.infra.pass_base import PassResult

from ..errors import LoweringError
from . import alias_sets as alias
from .alias_sets import AliasSets, History, Value

aten = torch.ops.aten
_COND = torch.ops.higher_order.cond
_UPDATES = (OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION)


class AliasAwareMemoryPlanning(MemoryPlanningPass):  # type: ignore[misc]
    """ExecuTorch's memory planning, for values that share memory.

    Use it as `ExecutorchBackendConfig(memory_planning_pass=AliasAwareMemoryPlanning(...))`.  It has
    the arguments of `MemoryPlanningPass` and plans with the same algorithms.  What it does besides:

    * Updates of buffers and inputs are one parallel assignment, in whatever order they are stored.
    * A value that is read after its memory was overwritten is read from a copy.
    * A value that does nothing but update a buffer is computed at the buffer's address.  This needs
      that nobody reads the buffer from then on, and that its producer does not read the buffer
      either, unless it is a delegate that declares the pair (`alias_sets.in_place_pairs`).
    * Values of one alias set have one spec.  What only updates a buffer has none as an output.
    * The results of `cond` are computed where they are read.  ExecuTorch leaves them in the memory
      of the branch, which the next `cond` uses again.
    """

    def run(
        self, graph_module: GraphModule, graph_signature: ExportGraphSignature | None = None
    ) -> PassResult:
        """Plans the memory of one method.

        Raises:
            LoweringError: an update has no value that could be stored.
        """
        outside: dict[GraphModule, set[TensorSpec]] = {}
        _enter_bodies(graph_module, outside)
        if graph_signature is not None:
            _store_updates(graph_module, graph_signature)
        for gm in (graph_module, *outside):
            if gm is not graph_module or graph_signature is None:
                _keep_overwritten(gm)
            _share_specs(gm)
        if graph_signature is not None:
            _drop_update_specs(graph_module, graph_signature)
        algorithm: Any = self.memory_planning_algo  # type: ignore[has-type]

        @functools.wraps(algorithm)
        def plan(alignment: int, specs: Iterable[TensorSpec], gm: GraphModule, *args: Any) -> Any:
            """Plans what lies in a graph's own memory, with lifetimes in that graph alone."""
            own = [s for s in specs if s not in outside.get(gm, ())]
            for s in own:
                s.lifetime = [None, None]
            _live_in_place(gm)
            update_all_tensors_lifetime(gm, args[0])
            return _smallest(algorithm, alignment, own, gm, *args)

        self.memory_planning_algo = plan
        try:
            planned: PassResult = super().run(graph_module, graph_signature)
            return planned
        finally:
            self.memory_planning_algo = algorithm


def _live_in_place(gm: GraphModule) -> None:
    """Has values live until their results in place are read, which ExecuTorch does not see."""
    for i, node in enumerate(gm.graph.nodes):
        for argument in node.all_input_nodes:
            for (_, element), _ in alias.aliased_results(argument):
                if (spec := alias.spec((argument, element))) is not None:
                    start, end = spec.lifetime
                    spec.lifetime = [i if start is None else start, max(i, end or 0)]


def _smallest(algorithm: Any, alignment: int, specs: list[TensorSpec], gm: Any, *args: Any) -> Any:
    """Plans specs in the order given and backwards, and keeps what needs less memory.

    ExecuTorch's greedy algorithm places specs of one size in that order.  Which is better is luck,
    and specs that are gone must not make it worse.
    """
    if not isinstance(algorithm, MemoryPlanningAlgorithmSuite):
        return algorithm(alignment, specs, gm, *args)
    fields = ("mem_id", "mem_offset", "mem_obj_id")
    taken = list(gm.input_mem_buffer_sizes)  # some algorithms write to it
    sizes = algorithm(alignment, specs, gm, *args)
    plan = [[getattr(s, f) for f in fields] for s in specs]
    gm.input_mem_buffer_sizes = taken
    backwards = algorithm(alignment, specs[::-1], gm, *args)
    if sum(backwards) < sum(sizes):
        return backwards
    for s, planned in zip(specs, plan, strict=True):
        for f, v in zip(fields, planned, strict=True):
            setattr(s, f, v)
    return sizes


def _enter_bodies(gm: GraphModule, outside: dict[GraphModule, set[TensorSpec]]) -> None:
    """Finds the specs in bodies of control flow that are memory of the graph around them.

    The runtime stores the iterations' results of `scan` one by one, in the memory of the next
    iteration's parameters, so that a body may not return a parameter as it is.
    """
    for node in gm.graph.nodes:
        for body in alias.bodies(node):
            if body in outside:
                raise LoweringError(f"{node.name}: a body is shared with another control-flow node")
            shared = {alias.spec((parameter, None)) for parameter, _ in alias.bound(node, body)}
            results = [alias.spec(v) if node.target is _COND else None for v in alias.values(node)]
            if node.target in (_COND, torch.ops.higher_order.scan):
                shared |= _return_in(results, body)
            outside[body] = {s for s in shared if s is not None} | outside.get(gm, set())
            _enter_bodies(body, outside)


def _return_in(results: list[TensorSpec | None], body: GraphModule) -> set[TensorSpec | None]:
    """Computes what a body returns in the memory of `results`, by a copy where it has to."""
    output = body.graph.output_node()
    outputs = alias.returned(body.graph)
    sets, taken = AliasSets(body), set()
    for i, (result, node) in enumerate(zip(results, outputs, strict=True)):
        if not isinstance(node, Node) or (spec := alias.spec(alias.values(node)[0])) is None:
            continue
        value = alias.values(node)[0]
        members = sets.members(value)
        if result is None:
            free = not any(n.op == "placeholder" for n, _ in members)
        elif TensorShapeDynamism.DYNAMIC_UNBOUND in (spec.shape_dynamism, result.shape_dynamism):
            continue  # allocated when it is computed
        else:
            free = sets.root(value) not in taken and _movable(members, result)
            taken.add(sets.root(value))
        if not free:
            outputs[i] = _copy(node, output)
            members = [(outputs[i], None)]
        if result is not None:
            _move(members, result)
    body.graph.output_node().args = (tuple(outputs),)
    body.recompile()
    return set(results)


def _store_updates(gm: GraphModule, signature: ExportGraphSignature) -> None:
    """Makes the updates one parallel assignment, with as few copies as possible."""
    output = gm.graph.output_node()
    updated = _updated(gm, signature)
    outputs = _pure_outputs(output, updated)
    buffers = {n for n in updated.values() if n.target in signature.inputs_to_buffers}
    users = [n for i, n in enumerate(outputs) if i not in updated]

    sets = AliasSets(gm)
    for i, target in updated.items():
        if target in buffers:
            _compute_in_place(gm, sets, outputs, i, target, users)
    history = History(gm.graph, sets, users)
    pending = {
        i: (target, outputs[i])
        for i, target in updated.items()
        if not _is_at(outputs[i], target, sets, history)
    }
    while pending:  # a target that other updates read comes last; where they cross, copies are read
        read = {i: sets.root(alias.values(value)[0]) for i, (_, value) in pending.items()}
        i = next(
            (
                i
                for i, (target, _) in pending.items()
                if all(r != sets.root((target, None)) for j, r in read.items() if j != i)
            ),
            next(iter(pending)),
        )
        target, value = pending.pop(i)
        with gm.graph.inserting_before(output):
            outputs[i] = gm.graph.call_function(aten.copy_.default, (target, value))
        outputs[i].meta = {**_described(value), "spec": target.meta["spec"]}
    output.args = (tuple(outputs),)
    _keep_overwritten(gm, [i for i in range(len(outputs)) if i not in updated])

    outputs = alias.returned(gm.graph)
    sets = AliasSets(gm)
    state = {sets.root((n, None)) for n in buffers}
    for i, n in enumerate(outputs):  # callers may keep a result, or place it elsewhere
        if i not in updated and isinstance(n, Node) and sets.root(alias.values(n)[0]) in state:
            outputs[i] = _copy(n, output)
    output.args = (tuple(outputs),)
    for s, n in zip(signature.output_specs, outputs, strict=True):
        if isinstance(n, Node) and hasattr(s.arg, "name"):
            s.arg.name = n.name
    gm.recompile()


def _updated(gm: GraphModule, signature: ExportGraphSignature) -> dict[int, Node]:
    """The inputs, buffers mostly, that the program's outputs update, by the output's index."""
    inputs = {n.target: n for n in gm.graph.nodes if n.op == "placeholder"}
    stored = {s.target: s.arg.name for s in signature.input_specs if s.target is not None}
    found = {}
    for i, s in enumerate(signature.output_specs):
        if s.kind in _UPDATES:
            target = s.target or ""
            name = stored.get(target) if s.kind is OutputKind.BUFFER_MUTATION else target
            if name is None or name not in inputs:
                raise LoweringError(
                    f"the program updates {s.target!r}, which is none of its inputs; register it "
                    "as a buffer of the module that writes it"
                )
            found[i] = inputs[name]
    return found


def _pure_outputs(output: Node, updated: Mapping[int, Node]) -> list[Any]:
    """What a program returned before `insert_write_back_for_buffers_pass`, in its own order.

    That pass returns the updates that it stores first, and those that it takes to be in place
    already behind them, so that with both kinds its outputs and the signature do not agree.
    """
    index = {target: i for i, target in updated.items()}
    rest = alias.returned(output.graph)
    stores: dict[int, Node] = {}
    for n in list(rest):
        i = index.get(n.args[0]) if _is_store(n, output) else None
        if i is None or i in stores:
            break
        stores[i] = rest.pop(0)
    outputs = [
        stores[i].args[1] if i in stores else rest.pop(0) for i in range(len(stores) + len(rest))
    ]
    output.args = (tuple(outputs),)
    for store in stores.values():
        output.graph.erase_node(store)
    return outputs


def _is_store(n: Any, output: Node) -> bool:
    return isinstance(n, Node) and n.target is aten.copy_.default and set(n.users) == {output}


def _compute_in_place(
    gm: GraphModule,
    sets: AliasSets,
    outputs: list[Any],
    index: int,
    target: Node,
    users: list[Any],
) -> None:
    """Has an update computed at its buffer's address, where that changes no value."""
    value, buffer = alias.values(outputs[index])[0], (target, None)
    if sets.root(value) == sets.root(buffer):
        return
    others = [n for i, n in enumerate(outputs) if i != index and isinstance(n, Node)]
    history = History(gm.graph, sets, others)
    members = sets.members(value)
    spec = alias.spec(buffer)
    if (
        spec is None
        or not history.lasts(value)
        or not _movable(members, spec)
        or any(
            isinstance(n, Node) and sets.root(alias.values(n)[0]) == sets.root(value) for n in users
        )
    ):
        return
    producer = history.writers(value)[0]
    late = {n for n in history.readers(buffer) if history.place[n] >= history.place[producer]}
    if alias.is_delegate(producer):
        pairs = alias.in_place_pairs(producer)
        made = [i or 0 for n, i in members if n is producer]
        read = [
            i
            for i, n in enumerate(producer.args[1:])
            if isinstance(n, Node)
            and any(sets.root(v) == sets.root(buffer) for v in alias.values(n))
        ]
        if all((i, j) in pairs for i in read for j in made):
            late.discard(producer)
    elif not any(a.out for a in alias.accesses(producer)):
        return
    if not late:
        _move(members, spec)
        sets.union(buffer, value)


def _movable(members: list[Value], target: TensorSpec) -> bool:
    """Whether a whole alias set may be planned at a target's memory.

    `map` and `scan` change the specs of their results when they are emitted.
    """
    for value in members:
        node, _ = value
        if node.target is memory.view or (value == (node, None) and node.target is memory.alloc):
            continue
        spec = alias.spec(value)
        if (
            node.op != "call_function"
            or (alias.bodies(node) and node.target is not _COND)
            or "_share_alloc_with_arg_idx" in node.meta
            or spec is None
            or spec.const
            or spec.storage_base is not None
            or _layout(spec) != _layout(target)
        ):
            return False
    return True


def _layout(spec: TensorSpec) -> tuple[Any, ...]:
    shape = (spec.dtype, *spec.shape, spec.shape_dynamism, spec.layout)
    return (*shape, tuple(spec.dim_order), spec.device, spec.device_index)


def _move(members: list[Value], target: TensorSpec) -> None:
    for value in members:
        if value[0].target not in (memory.view, memory.alloc):
            alias.set_spec(value, target)


def _is_at(value: Node, target: Node, sets: AliasSets, history: History) -> bool:
    """Whether a value is what lies at a target's address in the end."""
    made = alias.values(value)[0]
    return sets.root(made) == sets.root((target, None)) and history.lasts(made)


def _keep_overwritten(gm: GraphModule, outputs: Iterable[int] | None = None) -> None:
    """Has values that are read after they are overwritten read from copies.

    Args:
        outputs: the indices of the results that are read at the end, by default all of them.
    """
    while True:
        results = alias.returned(gm.graph)
        read = results if outputs is None else [results[i] for i in outputs]
        history = History(gm.graph, AliasSets(gm), read)
        if not history.stale:
            break
        _, stale = history.stale[0]
        source, value = stale, alias.values(stale)[0]
        if source is not value[0]:
            value[0].append(source)  # taken out of its producer before that is overwritten
        copy = _copy(source, history.overwritten_by(value))
        for reader, argument in history.stale:
            if argument is stale:
                reader.replace_input_with(stale, copy)
    gm.recompile()


def _copy(source: Node, before: Node) -> Node:
    """A copy of a value in memory of its own."""
    old = _spec_of(source)
    assert old is not None
    spec = TensorSpec(old.dtype, torch.Size(old.shape))
    for name in ("stride", "dim_order", "shape_dynamism", "device", "device_index"):
        setattr(spec, name, getattr(old, name))
    graph = source.graph
    with graph.inserting_before(before):
        out = graph.call_function(memory.alloc, ((tuple(old.shape), old.dtype),))
        out.meta = {k: v for k, v in source.meta.items() if k in ("val", "tensor_meta")}
        copy = graph.call_function(aten.clone.out, (source,), {"out": out})
    copy.meta = {**_described(source), "spec": spec}
    return copy


def _described(source: Node) -> dict[str, Any]:
    kept = ("val", "tensor_meta", "stack_trace", "nn_module_stack")
    return {"stack_trace": ""} | {k: source.meta[k] for k in kept if k in source.meta}


def _share_specs(gm: GraphModule) -> None:
    """Gives the values of each alias set one spec; views keep their shape."""
    for node in gm.graph.nodes:
        if node.op == "output":
            node.meta["spec"] = torch.utils._pytree.tree_map(_spec_of, node.args[0])
        elif node.target is memory.view and isinstance(node.meta.get("spec"), _ViewSpec):
            node.meta["spec"]._base = _spec_of(node.args[0])
        elif node.target is operator.getitem:
            node.meta["spec"] = _spec_of(node)
        for result, argument in alias.aliased_results(node):
            if (spec := alias.spec(alias.values(argument)[0])) is not None:
                alias.set_spec(result, spec)


def _spec_of(result: Any) -> TensorSpec | None:
    """The spec of a node's value; elements of a list that an op fills have none at its producer."""
    if not isinstance(result, Node):
        return None
    return alias.spec(alias.values(result)[0]) or result.meta.get("spec")


def _drop_update_specs(gm: GraphModule, signature: ExportGraphSignature) -> None:
    """Leaves what updates buffers out of the outputs' specs: the program does not return it.

    With it, memory for outputs would also be memory of buffers, which an application that passes
    outputs itself does not expect.
    """
    output = gm.graph.output_node()
    specs = [
        None if s.kind is OutputKind.BUFFER_MUTATION else spec
        for s, spec in zip(signature.output_specs, output.meta["spec"], strict=True)
    ]
    if not any(isinstance(s, TensorSpec) for s in specs) and specs:
        # The planner's verifier wants an output; this one takes no memory.
        specs[0] = TensorSpec(torch.uint8, torch.Size([0]), const=True)
    output.meta["spec"] = tuple(specs)
