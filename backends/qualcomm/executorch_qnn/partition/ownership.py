# SPDX-License-Identifier: BSD-3-Clause
"""Who owns each mutable buffer of a program, and which delegates must be called before which.

A buffer that a delegate owns lives in a slot that every partition, method and delegate of the
program shares by name.  ExecuTorch calls delegates one after another, so a slot holds the old value
until the delegate has run that makes the new one.  From this the rule:

* A buffer is the delegates' when no node on the CPU reads its old value or makes its new one.
  (The new value may be used anywhere: that is an ordinary result.)
* Every partition that reads the old value reads the slot; none of them comes after the one that
  makes the new value.

The second point can be had for every buffer at once, because it holds for nodes: `guard_updates`
put each reader before the writer in the graph, and what depends on the new value reads a copy.  So
the edges "reader, writer" are added to those of the data, partitions are levels over both, and
calling delegates by level is calling them in an order that no edge contradicts.

What the CPU touches stays the host's, unless methods share it (`staged`): ExecuTorch gives each
method its own memory, so that only delegates can share.  Then the CPU reads a copy that a delegate
puts out, and what it computes goes in through a delegate.

Without `ordered` (in ExecuTorch's own flow, where no graph may be changed and no call be moved) a
buffer is a delegate's only when everything that touches it lies in one partition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch.export import ExportedProgram

from ..aliasing.updates import Update, guarded, is_guard, updates

TAG = "delegation_tag"
Reasons: TypeAlias = Mapping[torch.fx.Node, str | None]
Order: TypeAlias = Mapping[torch.fx.Node, list[torch.fx.Node]]


@dataclass(frozen=True)
class Ownership:
    """Who owns a mutable buffer: `delegate` or `host`, and why.

    Attributes:
        fqn: the buffer's name in this method; `slot`: that of its slot in the program.
    """

    fqn: str
    slot: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    owner: str
    reason: str


def cpu_touch(u: Update, reasons: Reasons, through_guards: bool) -> torch.fx.Node | None:
    """A node on the CPU that reads a buffer's old value or makes its new one.

    Args:
        reasons: node to the reason why it is on the CPU, `None` for the nodes of delegates.
        through_guards: a copy for the CPU, or from it, counts as the CPU's touch.
    """
    touching = [*u.readers(), *([] if u.new is None else [u.new])]
    if through_guards:
        guards = [n for n in touching if is_guard(n)]
        touching += [n for g in guards for n in (guarded(g), *g.users)]
    return next((n for n in touching if reasons.get(n) is not None), None)


def read_before_written(ups: Iterable[Update]) -> Order:
    """Reader of an old value to the nodes that make the new ones."""
    order: dict[torch.fx.Node, list[torch.fx.Node]] = {}
    for u in ups:
        for reader in u.readers() if u.new is not None else ():
            assert u.new is not None
            order.setdefault(reader, []).append(u.new)
    return order


def partitions_of(u: Update) -> tuple[list[str], str | None]:
    """The partitions that read a buffer's old value, in graph order, and the one that writes it."""
    readers = dict.fromkeys(n.meta[TAG] for n in u.readers() if TAG in n.meta)
    return list(readers), None if u.new is None else u.new.meta.get(TAG)


def not_in_one_partition(ep: ExportedProgram, u: Update) -> str | None:
    """Why ExecuTorch's own flow cannot give a buffer that only delegates touch to one of them."""
    readers, writer = partitions_of(u)
    tags = dict.fromkeys([*readers, *([] if writer is None else [writer])])
    returned = Counter(s.arg.name for s in ep.graph_signature.output_specs)
    if not tags:
        return "nothing touches it"
    if len(tags) > 1:
        return f"several partitions touch it: {', '.join(tags)}"
    if u.new is not None and u.new.op == "placeholder":
        return f"its new value {u.new.name} is an input that no delegate computes"
    if returned[u.old.name]:
        return f"its old value {u.old.name} is returned as it stands"
    if u.new is not None:
        outside = [n for n in u.new.users if n.op != "output" and n.meta.get(TAG) not in tags]
        if outside or returned[u.new.name] > 1:
            return f"its new value {u.new.name} is used outside of {writer} as well"
    return None


def who_touches(u: Update) -> str:
    """For a buffer of delegates: which of them read and write it, in words."""
    readers, writer = partitions_of(u)
    others = [r for r in readers if r != writer]
    if writer is None:
        return f"read by {', '.join(others)}"
    if not others:
        return f"all that touches it is in {writer}"
    return f"written by {writer}, read before that by {', '.join(others)}"


def keep_shared_state(
    ep: ExportedProgram, states: Container[str], shared: Container[str]
) -> list[str]:
    """Takes back state that a partitioner gave to a delegate which cannot own it alone.

    `tag_mutated_buffer` and `tag_constant_data` of ExecuTorch look at the tagged users of a buffer
    only, and at one method: a delegate would update a copy of its own, or hold as a constant what
    another method writes.  What is taken back is an input and an output of the delegate.

    Args:
        states: the buffers of this method that any method of the program writes.
        shared: those that other methods have as well.

    Returns:
        The buffers that were taken back.
    """
    taken = []
    for u in updates(ep, states):
        tag = u.old.meta.get(TAG)
        touching = [*u.readers(), *([] if u.new is None else [u.new])]
        alone = all(n.meta.get(TAG) == tag for n in touching) and not not_in_one_partition(ep, u)
        if tag is not None and (u.fqn in shared or not alone):
            del u.old.meta[TAG]
            taken.append(u.fqn)
    return taken
