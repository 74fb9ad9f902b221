# SPDX-License-Identifier: BSD-3-Clause
"""Which mutable buffers of a program's methods are one slot: identity of names and of memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind

from ..errors import LoweringError

Name = TypeVar("Name")


def mutated_buffers(ep: ExportedProgram) -> set[str]:
    """Fully qualified names of the buffers that the program writes."""
    return {
        s.target
        for s in ep.graph_signature.output_specs
        if s.kind is OutputKind.BUFFER_MUTATION and s.target is not None
    }


def buffer(ep: ExportedProgram, fqn: str) -> torch.Tensor:
    """The registered value of a buffer, persistent or not."""
    found = ep.state_dict.get(fqn)
    tensor = ep.constants[fqn] if found is None else found
    assert isinstance(tensor, torch.Tensor)
    return tensor


def state_slots(programs: Mapping[str, ExportedProgram]) -> dict[str, dict[str, str]]:
    """Method to its state: the buffer's name there, and the name of its slot.

    Buffers of two methods are one slot if they have one fully qualified name or are one tensor (a
    `reset` method often wraps the module whose buffer it clears, and sees it as `core.t`).  A slot
    is state if any method writes it, also for methods that only read it.

    Raises:
        LoweringError: buffers of one slot differ in shape, type or registered value, or some other
            tensor of the model lies in a part of a slot's memory.
    """
    buffers = {
        (method, spec.target): buffer(ep, spec.target)
        for method, ep in programs.items()
        for spec in ep.graph_signature.input_specs
        if spec.kind is InputKind.BUFFER and spec.target is not None
    }
    slot_of_name: dict[str, str] = {}
    slot_of_tensor: dict[object, str] = {}
    members: dict[str, list[tuple[str, str]]] = {}
    for (method, fqn), tensor in buffers.items():
        key = identity(tensor)
        slot = slot_of_name.get(fqn) or slot_of_tensor.get(key) or fqn
        slot_of_name.setdefault(fqn, slot)
        slot_of_tensor.setdefault(key, slot)
        members.setdefault(slot, []).append((method, fqn))
    slots: dict[str, dict[str, str]] = {method: {} for method in programs}
    written = {m: mutated_buffers(ep) for m, ep in programs.items()}
    for slot, names in members.items():
        if any(fqn in written[method] for method, fqn in names):
            _check(slot, {name: buffers[name] for name in names})
            for method, fqn in names:
                slots[method][fqn] = slot
    for (m, a), (n, b) in overlaps(
        {(m, s.target or ""): t for m, ep in programs.items() for s, t in tensors(ep)}
    ):
        one, other = slots[m].get(a), slots[n].get(b)
        if one != other:
            raise LoweringError(overlap_message(a, b))
    return slots


def tensors(ep: ExportedProgram) -> list[tuple[InputSpec, torch.Tensor]]:
    """The parameters, buffers and constants of a program."""
    found = []
    for spec in ep.graph_signature.input_specs:
        tensor = ep.state_dict.get(spec.target or "")
        tensor = ep.constants.get(spec.target or "") if tensor is None else tensor
        if isinstance(tensor, torch.Tensor):
            found.append((spec, tensor))
    return found


def overlaps(named: Mapping[Name, torch.Tensor]) -> Iterator[tuple[Name, Name]]:
    """Pairs of names whose tensors have memory in common, all of it or a part."""
    by_storage: dict[int, list[Name]] = {}
    for name, tensor in named.items():
        if tensor.numel() and (address := _storage(tensor)):
            by_storage.setdefault(address, []).append(name)
    for group in by_storage.values():
        for a, b in itertools.combinations(group, 2):
            (start, end), (other_start, other_end) = _bytes(named[a]), _bytes(named[b])
            if start < other_end and other_start < end:
                yield a, b


def overlap_message(a: str, b: str) -> str:
    return (
        f"{a!r} and {b!r} share memory, and one of them is written: that cannot be kept in a "
        "program; register one of them and make the other in forward, as a view"
    )


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and the one behind the last, in the tensor's storage."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset())
    return start * tensor.itemsize, (start + last + 1) * tensor.itemsize


def _storage(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a fake tensor
        return 0


def identity(tensor: torch.Tensor) -> object:
    """Equal for tensors that are one: the same elements at the same place."""
    address = _storage(tensor) or id(tensor)
    return address, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype


def _check(slot: str, tensors: Mapping[tuple[str, str], torch.Tensor]) -> None:
    (first, reference), *others = tensors.items()
    for name, tensor in others:
        where = f"{first[1]!r} of method {first[0]!r} and {name[1]!r} of method {name[0]!r}"
        if tensor.shape != reference.shape or tensor.dtype != reference.dtype:
            raise LoweringError(
                f"{where} are one state slot ({slot}) but differ: {reference.dtype}"
                f"{list(reference.shape)} and {tensor.dtype}{list(tensor.shape)}; give the buffers "
                "different names if they are not one state"
            )
        if identity(tensor) != identity(reference) and not torch.equal(tensor, reference):
            raise LoweringError(
                f"{where} are one state slot ({slot}) but are registered with different values; "
                "give the buffers different names if they are not one state"
            )
