# SPDX-License-Identifier: BSD-3-Clause
"""Which composite nodes stay whole: what partitioners ask for, per node, on the functional graph.

ExecuTorch's own flow runs one decomposition per partitioner, so that what one asks for is taken
apart by the table of the next (upstream issue #8781).  Here all are asked once, and a node that any
of them wants stays whole until the last one that wants it has had its turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

import torch
from executorch.exir.backend.partitioner import Partitioner
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ..ops.registry import aten_op, table
from ..partition import QnnPartitioner

aten = torch.ops.aten
_log = logging.getLogger(__name__)
_WANTED_BY = "qnn_wanted_by"
_CALLER = -1  # stands for the caller's `EdgeCompileConfig.preserve_ops`

# What composite views and ops that do not say what they do become in a functional graph.
_TWINS = {
    aten.reshape.default: aten.view.default,
    aten.view_as.default: aten.view.default,
    aten._unsafe_view.default: aten.view.default,
    aten.flatten.using_ints: aten.view.default,
    aten.unflatten.int: aten.view.default,
    aten.movedim.int: aten.permute.default,
    aten.movedim.intlist: aten.permute.default,
    aten.moveaxis.int: aten.permute.default,
    aten.swapaxes.default: aten.transpose.int,
    aten.swapdims.default: aten.transpose.int,
    aten.mT.default: aten.transpose.int,
    aten.numpy_T.default: aten.permute.default,
    aten.narrow.default: aten.slice.Tensor,
    aten.chunk.default: aten.split.Tensor,
    aten.expand_as.default: aten.expand.default,
    aten.broadcast_to.default: aten.expand.default,
    aten.contiguous.default: aten.clone.default,
    aten.to.dtype: aten._to_copy.default,
    aten.type_as.default: aten._to_copy.default,
    aten.batch_norm.default: aten._native_batch_norm_legit_no_training.default,
}


def twin(op: OpOverload) -> OpOverload | None:
    """The op that stands for `op` in a functional graph: itself, or its functional twin.

    In-place ops become the op without the underscore, `*_copy` ops the view that the edge dialect
    copies again, composite views the view that they are.  `None` if there is none: out variants,
    and ops that a functional graph has no trace of.
    """
    op = _TWINS.get(op, op)
    name, overload = op._schema.name.split("::")[1], op._schema.overload_name or "default"
    packet = getattr(torch.ops, op.namespace)
    if any(a.is_out for a in op._schema.arguments):
        return None
    if op._schema.is_mutable:
        return _overload(packet, name.removesuffix("_"), overload) if name.endswith("_") else None
    if name.endswith("_copy") and (view := _overload(packet, name.removesuffix("_copy"), overload)):
        return view
    aliases = any(r.alias_info for r in op._schema.returns)
    return None if (aliases and op._can_decompose()) or name in _GONE else op


_GONE = frozenset({"dropout", "feature_dropout", "alpha_dropout", "detach", "lift_fresh"})


def _overload(packet: object, name: str, overload: str) -> OpOverload | None:
    found = getattr(getattr(packet, name, None), overload, None)
    return found if isinstance(found, OpOverload) and not found._schema.is_mutable else None


class Wishes:
    """The wishes of a program's partitioners, in the order of their turns.

    Args:
        ep: the functional program; what is asked is answered on its nodes.
        preserved: ops that stay whole whoever delegates them.
    """

    def __init__(
        self,
        ep: ExportedProgram,
        partitioners: Sequence[Partitioner],
        preserved: Iterable[OpOverload] = (),
    ) -> None:
        self._turn = _CALLER
        asked: list[tuple[Iterable[OpOverload], Callable[[torch.fx.Node], bool] | None, str]] = [
            (preserved, None, "EdgeCompileConfig.preserve_ops")
        ]
        for i, p in enumerate(partitioners):
            if isinstance(p, QnnPartitioner) and i == 0:
                # It opens what QNN refuses in its own turn, and nobody comes before it.
                asked.append(([op for op, row in table().items() if row.keep], None, "QNN"))
            else:
                asked.append((*p.ops_to_not_decompose(ep), type(p).__name__))
        self._asked = [({*_twins(ops, by)}, check) for ops, check, by in asked]
        self.ops = frozenset().union(*(ops for ops, _ in self._asked))

    def whole(self, node: torch.fx.Node) -> bool:
        """Whether somebody who has not had his turn wants `node` as it stands; notes who."""
        wanting = [
            turn
            for turn, (ops, check) in enumerate(self._asked, start=_CALLER)
            if (turn == _CALLER or turn > self._turn)
            and node.target in ops
            and (check is None or check(node))
        ]
        node.meta[_WANTED_BY] = wanting
        return bool(wanting)

    def done(self, turn: int) -> None:
        """The partitioner `turn` has had its turn."""
        self._turn = turn

    def wanted(self, node: torch.fx.Node) -> bool:
        """Whether a partitioner wants `node`, or the caller, whose turn is not over."""
        by = node.meta.get(_WANTED_BY, ())
        return any(turn == _CALLER or turn > self._turn for turn in by)

    def left(self, gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
        """Nodes of a graph that were kept whole and that nobody is going to take any more."""
        return [
            n
            for n in gm.graph.nodes
            if n.op == "call_function"
            and aten_op(n.target) is not None
            and n.meta.get(_WANTED_BY)
            and not self.wanted(n)
        ]


def _twins(ops: Iterable[OpOverload], by: str) -> Iterable[OpOverload]:
    for op in ops:
        if (found := twin(op)) is not None:
            if found is not op:
                _log.info("%s asks to keep %s: %s is kept", by, op, found)
            yield found
        else:
            _log.warning(
                "%s asks to keep %s whole: there is no such op in a functional graph, and no "
                "functional twin of it; ask for the op that it consists of",
                by,
                op,
            )
