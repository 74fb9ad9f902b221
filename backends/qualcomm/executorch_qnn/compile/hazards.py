# SPDX-License-Identifier: BSD-3-Clause
"""Whether a state's input and output may have one address.

QNN compiles a graph as if all of its tensors lay apart, and schedules reads of an input and writes
of an output as it likes.  At sizes that are not staged whole, a read of the old value that comes
after the write of its place gives the new one, and nothing reports it (measured on QAIRT 2.47 to
2.51 for shifts and for late readers).  So one address is only given where the graph itself orders
every read of a place before its write.
"""

from __future__ import annotations

from .ir import Graph, Kind, Node, Scalar, Tensor

# Besides all that QNN calls ElementWise: ops whose output element depends on the input element at
# the same place, and on nothing else of that input.  Reading place p of the input is then always an
# ancestor of writing place p.
_POINTWISE = frozenset({"Cast", "Relu", "ReluMinMax", "Sigmoid", "Tanh"})
# Ops that copy their first input and overwrite some places: pointwise in that input alone.
_SCATTER = frozenset({"ScatterNd", "ScatterElements"})

_STAGED = 64 << 10
"""Bytes of a tensor that HTP reads as a whole before it computes anything from it; larger ones it
may read in tiles, when it needs them.  With one address for all, reads that are not place by place
were right up to 256 KB and wrong from 512 KB on, and those of a product that is recomputed for its
readers up to 128 KB, in every shape tried (QAIRT 2.51, SM8650)."""


def aliasing_is_sound(graph: Graph, source: Tensor, out: Tensor) -> tuple[bool, str]:
    """Whether one address may hold both `source` (the old value) and `out` (the new one).

    It may if every read of `source` happens before the write of the same place of `out` in every
    schedule that respects data dependencies.  That holds when every path from `source` leads to
    `out` through pointwise ops of one shape, and through scatters into what stands there.  And
    nobody else may read what a pointwise op makes of a large `source`: the compiler computes it
    again for such a reader, tile by tile, from what stands at the address by then (seen with a
    product that a MatMul reads, from 256 KB on).  What only overwrites places may be computed
    again: it gives the same.  Everything else gets two regions that are swapped.

    Returns:
        The verdict, and its reason in words.
    """
    if (source.shape, source.dtype, source.encoding) != (out.shape, out.dtype, out.encoding):
        return False, f"{source.name} and {out.name} differ in shape, type or encoding"
    users: dict[int, list[Node]] = {}
    for node in graph.nodes:
        for t in {id(t): t for t in node.inputs}.values():
            users.setdefault(id(t), []).append(node)
    readers = users.get(id(source), [])
    if len(readers) == 1 and readers[0].type in _SCATTER and readers[0].outputs[0] is out:
        node = readers[0]
        if node.inputs[0] is source and all(t is not source for t in node.inputs[1:]):
            return True, f"{node.name} writes its rows and nobody else reads the old value"
    pending, seen, idempotent = [source], {id(source)}, True
    while pending:
        t = pending.pop()
        if t is out:
            continue
        if t is not source and t.kind is Kind.OUTPUT:
            return False, f"{t.name} is an output that is computed from the old value"
        if not users.get(id(t)):
            return False, f"{t.name} is computed from the old value and not needed for the new one"
        for node in users[id(t)]:
            result = node.outputs[0]
            overwrites = node.type in _SCATTER and all(i is not t for i in node.inputs[1:])
            pointwise = node.type.startswith("ElementWise") or node.type in _POINTWISE
            if not (overwrites or pointwise) or result.shape != source.shape:
                return False, f"{node.name} ({node.type}) reads the old value, not place by place"
            mode = node.params.get("reduction")
            adds = isinstance(mode, Scalar) and mode.value != 0
            idempotent = idempotent and overwrites and not adds
            if id(result) not in seen:
                seen.add(id(result))
                pending.append(result)
    if not idempotent and users.get(id(out)) and out.nbytes > _STAGED:
        name = users[id(out)][0].name
        return False, f"{name} reads the new value, and might compute it again from the old"
    return True, "the new value is computed place by place from the old one"
