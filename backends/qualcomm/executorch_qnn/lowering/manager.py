# SPDX-License-Identifier: BSD-3-Clause
"""ExecuTorch's manager of an edge program, with state that survives `to_executorch`."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from executorch.exir import (
    EdgeCompileConfig,
    EdgeProgramManager,
    ExecutorchBackendConfig,
    ExecutorchProgramManager,
)
from executorch.exir.emit._emitter import _Emitter
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.schema import EValue
from executorch.exir.tensor import TensorSpec
from torch._ops import OpOverload
from torch.export import ExportedProgram

from ..aliasing import mutated_buffers
from ..aliasing.planning import AliasAwareMemoryPlanning
from ..errors import LoweringError
from ..partition import Plan
from .delegates import called_by_shape, check_calls
from .kernels import check_written_by_custom_ops
from .sizes import explained


class Manager(EdgeProgramManager):  # type: ignore[misc]
    """What `to_edge_transform_and_lower` returns.

    Its `to_executorch` differs from ExecuTorch's in this:

    * The registered values of mutable buffers that stay with the host are in the program.
      (ExecuTorch drops them unless `InitializedMutableBufferPass` names the buffer.)
    * Memory is planned by `AliasAwareMemoryPlanning` unless the caller brings a pass of his own.
    * Host buffers that several methods use lie in memory that the methods share.  The runtime must
      load all methods before the first call, as `executorch_qnn.load` does: loading a method
      writes the registered values.
    """

    def __init__(
        self,
        programs: dict[str, ExportedProgram],
        constant_methods: dict[str, Any],
        config: EdgeCompileConfig,
        preserved: list[OpOverload],
        plans: Mapping[str, Plan],
    ) -> None:
        super().__init__(programs, constant_methods, config, preserve_ops=preserved)
        self._plans = dict(plans)

    def transform(self, *args: Any, **kwargs: Any) -> Manager:
        return self._like(super().transform(*args, **kwargs))

    def to_backend(self, *args: Any, **kwargs: Any) -> Manager:
        return self._like(super().to_backend(*args, **kwargs))

    def to_executorch(
        self, config: ExecutorchBackendConfig | None = None
    ) -> ExecutorchProgramManager:
        """The program for ExecuTorch's runtime; see the class for what is different."""
        config = copy.copy(config or ExecutorchBackendConfig())
        config.emit_mutable_buffer_names = True
        for name in self.methods:
            check_written_by_custom_ops(name, self.exported_program(name))
        by_name = {name: self.exported_program(name) for name in self.methods}
        programs = list(by_name.values())
        shared = _initialise(programs)
        config.memory_planning_pass = _planning(config.memory_planning_pass, shared)
        # The passes execute writes to buffers, which may have come out of what has gradients.
        shapes, errors = called_by_shape(programs), explained(by_name)
        with torch.no_grad(), shapes, errors, _values_of_their_own():
            made = super().to_executorch(config)
        for name, plan in self._plans.items():
            check_calls(made.exported_program(name), plan)
        return made

    def _like(self, edge: EdgeProgramManager) -> Manager:
        manager: Any = copy.copy(edge)
        manager.__class__, manager._plans = Manager, self._plans
        return cast(Manager, manager)


def _planning(given: Any, shared: bool) -> Any:
    """The caller's planning pass, or ours for ExecuTorch's own; with `shared`, one that shares.

    Raises:
        LoweringError: methods share a buffer, and the caller's passes cannot.
    """
    if type(given) is MemoryPlanningPass:
        settings, given = vars(given), AliasAwareMemoryPlanning()
        for name, setting in settings.items():
            setattr(given, name, copy.deepcopy(setting))
    if shared and isinstance(given, MemoryPlanningPass):
        given = copy.deepcopy(given)
        given.share_mutable_buffers = True
    elif shared:
        raise LoweringError(
            "methods share a mutable buffer that stays with the host, which one "
            "MemoryPlanningPass for all methods can plan: give that as memory_planning_pass"
        )
    return given


def _initialise(programs: Sequence[ExportedProgram]) -> bool:
    """Has the values of mutable buffers emitted; returns whether methods share one."""
    written = set().union(*map(mutated_buffers, programs))
    uses: Counter[str] = Counter()
    for ep in programs:
        nodes = {n.name: n for n in ep.graph.find_nodes(op="placeholder")}
        for name, fqn in ep.graph_signature.inputs_to_buffers.items():
            if fqn in written:
                uses[fqn] += 1
                nodes[name].meta["et_init_buffer"] = True
    return max(uses.values(), default=0) > 1


@contextmanager
def _values_of_their_own() -> Iterator[None]:
    """While this is active, initial values of buffers are not taken for constants.

    ExecuTorch 1.5.1's emitter looks the bytes of a named mutable buffer up among those of the
    constants, and gives the buffer the constant's place in another list: a buffer of zeros beside
    a constant of as many zeros gets other values, or the program does not load.
    """
    original = _Emitter._tensor_spec_to_evalue

    def emit(self: Any, spec: TensorSpec, constant_tag: str | None = None) -> EValue:
        state = self.program_state
        constants = state.cached_spec_hash_values
        if spec.const and spec.mem_id is not None:
            state.cached_spec_hash_values = state.cached_spec_mutable_hash_values
        try:
            return original(self, spec, constant_tag)
        finally:
            state.cached_spec_hash_values = constants

    _Emitter._tensor_spec_to_evalue = emit
    try:
        yield
    finally:
        _Emitter._tensor_spec_to_evalue = original
