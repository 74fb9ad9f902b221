# SPDX-License-Identifier: BSD-3-Clause
"""`compare`: eager, fake-quant and delegate, layer by layer over consecutive calls."""

from __future__ import annotations

import copy
import dataclasses
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from ..aliasing import buffer
from ..aliasing.slots import identity
from ..errors import IncompatiblePayload, StateError
from ..lowering import Program
from ..lowering.lower import export, lower_exported
from ..lowering.stages import Stages
from ..quantizer.functional import functional, mutated_buffers
from ..quantizer.program import rewritten_methods
from ..session import Session, load
from .accuracy import Comparison, LayerAccuracy, OutputAccuracy
from .figures import Pairs
from .taps import Tap, sources, tapped, taps_of

_APART_DB = 3.0
"""Differences between the program and the one with taps are noted from here on."""


def compare(
    program: Program,
    inputs: Iterable[Any],
    *,
    file: str | os.PathLike[str] | None = None,
    layers: str = "modules",
    progress: Callable[[str], None] | None = None,
) -> Comparison:
    """Says what quantization and the NPU cost, and in which layer.

    Three run beside each other, each with state of its own that starts as the program's does: the
    model in floats, `Program.fake_quantized`, and the delegate.  A `.pte` puts out no values of
    layers, so that the program is lowered once more with these as further outputs ("tapped"), in
    the same encodings.  That may change what QNN fuses; outputs and state are those of the program
    itself, beside those of the tapped one.

    Args:
        program: what `lower` returned; the model itself is not needed.
        inputs: consecutive calls, each a tuple of inputs, or `(method, inputs)`; anything else
            stands for a tuple of one.
        file: the `.pte` whose outputs are compared; that of `program` by default.
        layers: `modules` looks at the last value of each module, `nodes` at each node that
            computes.
        progress: called with the name of each stage as it starts.

    Raises:
        StateError: there is no such method, or inputs do not fit it; names the call.
        IncompatiblePayload: `file` is a program of another model.
    """
    if layers not in ("modules", "nodes"):
        raise ValueError(f"layers is 'modules' or 'nodes', not {layers!r}")
    calls = [_call(program, i, given) for i, given in enumerate(inputs)]
    if not calls:
        raise ValueError("there is no call to compare: inputs is empty")
    stage = Stages(progress)
    with stage("lower with taps"):
        models = _Models(program, {method for method, _ in calls}, layers)
        lowered = models.lower()
    with tempfile.TemporaryDirectory(prefix="executorch-qnn-") as folder, stage("compare"):
        path = Path(folder, "program.pte") if file is None else Path(file)
        if file is None:
            program.save(path)
        lowered.save(Path(folder, "tapped.pte"))
        libraries = program.origin.partitioner.options.qnn_libraries
        own, with_taps = load(path, libraries), load(Path(folder, "tapped.pte"), libraries)
        _check_file(path, own, with_taps)
        run = _Run(models, own, with_taps, path)
        for method, given in calls:
            run.call(method, given)
        run.end()
    return run.result(program, len(calls), given=file is not None)


# -- calls -----------------------------------------------------------------------------------------


def _call(program: Program, number: int, given: Any) -> tuple[str, tuple[Any, ...]]:
    """Method, or the variant of it for these sizes, and inputs of a call."""
    methods = program.origin.exported
    method, inputs = next(iter(methods)) if len(methods) == 1 else "forward", given
    if isinstance(given, tuple | list) and len(given) == 2 and isinstance(given[0], str):
        method, inputs = given
    if method not in methods:
        raise StateError(
            f"call {number}: there is no method {method!r}; the program has {', '.join(methods)}. "
            "A call is a tuple of inputs, or (method, inputs)"
        )
    inputs = tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)
    names = [method, *program.variants.get(method, ())]
    problems = [_misfit(methods[name], inputs) for name in names]
    if None not in problems:
        raise StateError(f"call {number} of {method}: {problems[0]}")
    return names[problems.index(None)], inputs


def _misfit(ep: ExportedProgram, inputs: tuple[Any, ...]) -> str | None:
    """What is wrong with the inputs of a call."""
    leaves = pytree.tree_leaves((inputs, {}))
    specs = [s for s in ep.graph_signature.input_specs if s.kind is InputKind.USER_INPUT]
    if len(leaves) != len(specs):
        return f"it takes {len(specs)} inputs, not {len(leaves)}"
    nodes = {n.name: n for n in ep.graph.find_nodes(op="placeholder")}
    for i, (leaf, spec) in enumerate(zip(leaves, specs, strict=True)):
        if not isinstance(spec.arg, TensorArgument):
            continue
        want = nodes[spec.arg.name].meta["val"]
        if not isinstance(leaf, torch.Tensor):
            return f"input {i} must be a tensor, not {type(leaf).__name__}"
        if leaf.shape != want.shape or leaf.dtype is not want.dtype:
            return (
                f"input {i} must be {want.dtype}{list(want.shape)}, "
                f"not {leaf.dtype}{list(leaf.shape)}"
            )
    return None


def _check_file(file: Path, own: Session, tapped: Session) -> None:
    """Refuses a file with other methods or state than the model has."""
    if missing := [m for m in tapped.methods if m not in own.methods]:
        raise IncompatiblePayload(
            f"{file} is no program of this model: it has no method {', '.join(missing)}"
        )
    states = ({n: (s.shape, s.dtype) for n, s in of.state().items()} for of in (own, tapped))
    its, models = states
    if its != models:
        differ = sorted(n for n in {*its, *models} if its.get(n) != models.get(n))
        raise IncompatiblePayload(
            f"{file} is no program of this model: they differ in the mutable buffer "
            f"{', '.join(differ)}"
        )


# -- the models ------------------------------------------------------------------------------------


class _Bound:
    """Modules, one for each method, over state of their own that starts as the program's does."""

    def __init__(self, modules: Mapping[str, GraphModule], program: Program) -> None:
        self.modules = modules
        self.state: dict[str, torch.Tensor] = {}
        # A tensor may have several names, of which each export takes another one.
        known = {
            identity(buffer(program.origin.exported[method], fqn)): slot
            for method, slots in program.slots.items()
            for fqn, slot in slots.items()
        }
        for method, module in modules.items():
            written = mutated_buffers(module)
            for fqn, value in list(module.named_buffers(remove_duplicate=False)):
                slot = program.slots[method].get(fqn) or known.get(identity(value))
                if slot is None and fqn not in written:
                    continue
                if slot is None:
                    slot, start = fqn, value
                else:
                    start = program.starts.get(slot, torch.zeros_like(value))
                owner, _, name = fqn.rpartition(".")
                own = self.state.setdefault(slot, start.detach().clone())
                module.get_submodule(owner)._buffers[name] = own

    def run(self, method: str, inputs: tuple[Any, ...]) -> list[Any]:
        """The outputs; inputs that the model writes to are copies."""
        given = pytree.tree_map_only(torch.Tensor, torch.clone, inputs)
        with torch.no_grad():
            return list(self.modules[method](*given))


class _Models:
    """The model in floats, as it is and rewritten for quantization, and fake-quantized.

    Attributes:
        taps: method to its taps, of the methods that are called.
        before: see `sources`.
        places: of taps among the outputs of the rewritten and of the fake-quantized model.
    """

    def __init__(self, program: Program, called: set[str], layers: str) -> None:
        self.program = program
        exported, fake = program.origin.exported, program.fake_quantized
        slots, recipe = program.slots, program.origin.quantize
        plain = {name: ep.module() for name, ep in exported.items()}
        if recipe is None:
            floats = {name: functional(ep.module()) for name, ep in exported.items()}
        else:
            floats = rewritten_methods(exported, recipe, program.target)
        self.outputs = {n: len(ep.graph_signature.user_outputs) for n, ep in exported.items()}
        self.taps: dict[str, list[Tap]] = {
            name: taps_of(module, None if fake is None else _graph(fake[name]), slots[name], layers)
            for name, module in floats.items()
            if name in called
        }
        self.before = sources(floats, self.taps, slots)

        def bound(modules: Mapping[str, Any], names: Callable[[Tap], str] | None) -> Any:
            made, places = {}, {}
            for m, module in modules.items():
                of = [] if names is None else [names(t) for t in self.taps.get(m, ())]
                made[m], places[m] = tapped(_graph(module), of)
            return _Bound(made, program), places

        self.plain, _ = bound(plain, None)
        self.floats, self.float_places = bound(floats, lambda t: t.node)
        self.fake: _Bound | None = None
        self.places = self.float_places
        if fake is not None:
            self.fake, self.places = bound(fake, lambda t: t.seen)

    def lower(self) -> Program:
        """The tapped program."""
        exported = {}
        for name, module in (self.fake or self.floats).modules.items():
            inputs, _ = self.program.origin.exported[name].example_inputs
            exported[name] = export(module, inputs, None, name)
        partitioner = copy.copy(self.program.origin.partitioner)
        partitioner.fallback = "cpu"
        origin = dataclasses.replace(self.program.origin, partitioner=partitioner)
        return lower_exported(exported, origin)


def _graph(module: torch.nn.Module) -> GraphModule:
    assert isinstance(module, GraphModule)
    return module


# -- running ---------------------------------------------------------------------------------------


class _Run:
    """Runs calls on all and gathers the figures."""

    def __init__(self, models: _Models, own: Session, tapped: Session, file: Path) -> None:
        self.models, self.own, self.tapped, self.file = models, own, tapped, file
        self.layers: dict[tuple[str, str], Pairs] = {}
        self.outputs: dict[str, Pairs] = {}

    def call(self, method: str, inputs: tuple[Any, ...]) -> None:
        models = self.models
        eager = models.plain.run(method, inputs)
        floats = models.floats.run(method, inputs)
        fake = None if models.fake is None else models.fake.run(method, inputs)
        with_taps = pytree.tree_leaves(self.tapped.run(method, *inputs))
        got = self._own(method, inputs)
        for i in range(models.outputs[method]):
            if isinstance(eager[i], torch.Tensor):
                pairs = self.outputs.setdefault(f"{method}: output {i}", Pairs())
                its, want = list(got[i].shape), list(eager[i].shape)
                if its != want:
                    raise self._foreign(f"output {i} of {method} is {its}, not {want}")
                pairs.add(eager[i], None if fake is None else fake[i], got[i])
                pairs.tapped.add(with_taps[i], eager[i])
        for tap, at, place in zip(
            models.taps[method], models.float_places[method], models.places[method], strict=True
        ):
            pairs = self.layers.setdefault((method, tap.node), Pairs())
            pairs.add(floats[at], None if fake is None else fake[place], with_taps[place])

    def end(self) -> None:
        """Compares what is left in the buffers."""
        for fqn in self.own.state():
            if (eager := self.models.plain.state.get(fqn)) is None:
                continue
            fake = None if self.models.fake is None else self.models.fake.state.get(fqn)
            pairs = self.outputs.setdefault(f"state {fqn}", Pairs())
            pairs.add(eager, fake, self.own.read_state(fqn))
            pairs.tapped.add(self.tapped.read_state(fqn), eager)
            pairs.by_call = []

    def _own(self, method: str, inputs: tuple[Any, ...]) -> list[Any]:
        try:
            got = pytree.tree_leaves(self.own.run(method, *inputs))
        except StateError as error:
            raise self._foreign(str(error)) from None
        if len(got) != self.models.outputs[method]:
            raise self._foreign(f"{method} returns {len(got)} values")
        return got

    def _foreign(self, why: str) -> IncompatiblePayload:
        return IncompatiblePayload(f"{self.file} is no program of this model: {why}")

    def result(self, program: Program, calls: int, *, given: bool) -> Comparison:
        """All figures; `given` says that the file is not the program's own."""
        noise = {at: pairs.total.relative for at, pairs in self.layers.items()}
        layers = []
        for method, taps in self.models.taps.items():
            for tap in taps:
                at = method, tap.node
                before = max((noise[b] for b in self.models.before[at]), default=0.0)
                # Noise without a signal says nothing: a value that should be zero.
                known = self.layers[at].total.signal > 0
                added = noise[at] - before if known and noise[at] > before else 0.0
                figures = self.layers[at].figures()
                layers.append(
                    LayerAccuracy(method, tap.layer, tap.node, tap.op, added_noise=added, **figures)
                )
        outputs = tuple(
            OutputAccuracy(
                name,
                tapped_vs_eager=pairs.tapped.accuracy(),
                sqnr_db_by_call=tuple(pairs.by_call),
                **pairs.figures(),
            )
            for name, pairs in self.outputs.items()
        )
        recipe = program.origin.quantize
        return Comparison(
            program.target.name,
            recipe if recipe is None or isinstance(recipe, str) else "recipe",
            calls,
            tuple(layers),
            outputs,
            tuple(self._notes(outputs, given)),
        )

    def _notes(self, outputs: Sequence[OutputAccuracy], given: bool) -> Iterator[str]:
        also = f", or {self.file} has other weights, encodings or options" if given else ""
        for v in outputs:
            own, taps = v.delegate_vs_eager.sqnr_db, v.tapped_vs_eager.sqnr_db
            if own != taps and abs(own - taps) > _APART_DB:
                yield (
                    f"{v.name} is {own:.1f} dB from eager, and {taps:.1f} dB in the program with "
                    f"taps: they change what QNN fuses{also}"
                )
