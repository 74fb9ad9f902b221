# SPDX-License-Identifier: BSD-3-Clause
"""The entry points: `lower` from PyTorch modules, and ExecuTorch's own from exported programs."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from executorch.exir import EdgeCompileConfig, EdgeProgramManager
from executorch.exir.backend.partitioner import Partitioner
from executorch.exir.program._program import _create_empty_etrecord
from torch.export import ExportedProgram

from ..errors import LoweringError
from ..partition import QnnPartitioner
from ..target import Target
from .assigned import assignments_written_back
from .flow import Flow
from .program import Origin, Program
from .sizes import has_symbols, per_size, refuse_dynamic
from .stages import Stages

if TYPE_CHECKING:
    from ..quantizer import QuantRecipe

Module: TypeAlias = torch.nn.Module
Inputs: TypeAlias = Sequence[Any]


def lower(
    model: Module | Mapping[str, tuple[Module, Inputs]],
    example_inputs: Inputs | None = None,
    *,
    target: Target | str,
    quantize: QuantRecipe | str | None = None,
    calibration: Any = None,
    calibration_cache: str | os.PathLike[str] | None = None,
    encodings: str | os.PathLike[str] | Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    fallback: str = "cpu",
    state_update: str = "auto",
    state_dtype: Mapping[str, torch.dtype] | None = None,
    constant_methods: Mapping[str, Any] | None = None,
    qnn_libraries: str | os.PathLike[str] | None = None,
    in_place: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Program:
    """Lowers a model, or several methods over one state, to a program for QNN.

    Args:
        model: a module in eval mode, or `{method: (module, example_inputs)}`.
        example_inputs: of `model`, when that is a module.
        target: the SoC to compile for.
        quantize: name of a recipe (`8a8w`, `16a8w`, `16a4w`, `16a4w_block`, `16a16w`) or a
            `QuantRecipe`; fp16 when `None`.
        calibration: what the ranges are found with, an iterable of input tuples, which are
            consecutive calls; `{method: iterable}` for several methods.
        calibration_cache: a folder that keeps what calibration finds.  A model that is lowered
            again with the same weights, recipe and data is not run on the data again.
        encodings: of some or all values, which then are not found with `calibration`: a file of
            AIMET's schema, such as `Program.save_encodings` writes, or what is in one.
        dynamic_shapes: as for `torch.export`, or `{method: ...}` for several methods; with
            `Sizes` where a dimension may have one of several sizes: there is one method for each,
            and `Session.run` picks it.  Dimensions that are dynamic in any other way are refused.
        fallback: `"cpu"` runs what QNN refuses on the CPU and reports it; `"error"` raises, with
            all of it.
        state_update: how caches are updated that are written in rows at positions given at run
            time: `"scatter"` writes the whole buffer, in place where that is sound; `"delta"` puts
            out the new rows only, and the runtime places them; `"auto"` does what writes less.
        state_dtype: buffer to `torch.float16` or `torch.float32`, the type that it is held in.
            Floats that the model adds up over many calls are held in fp32, all others in fp16 as
            HTP computes; see `compile.precision` for the rule, and the report for what it did.
        constant_methods: methods of the program that return a constant.
        qnn_libraries: folder of the QNN libraries; searched for when `None`.
        in_place: bind state in place where that is sound; `False` gives each buffer two regions.
        progress: called with the name of each stage as it starts.

    Raises:
        UnsupportedOp: with `fallback="error"`, an op would run on the CPU.
        LibraryNotFound: there is no QNN library.
        LoweringError: the model cannot be exported or compiled.
    """
    if quantize is None and (calibration is not None or calibration_cache is not None):
        raise ValueError("calibration data and its cache are for quantize=, which is not given")
    if quantize is None and encodings is not None:
        raise ValueError("encodings are for quantize=, which is not given")
    if state_update not in ("auto", "delta", "scatter"):
        raise ValueError(f"state_update is 'auto', 'delta' or 'scatter', not {state_update!r}")
    state_dtype = dict(state_dtype or {})
    for fqn, dtype in state_dtype.items():
        if dtype not in (torch.float16, torch.float32):
            raise ValueError(f"state_dtype: {fqn} can be held in float16 or float32, not {dtype}")
    methods, shapes, variants = per_size(*_methods(model, example_inputs, dynamic_shapes))
    stage = Stages(progress)
    target = target if isinstance(target, Target) else Target(target)
    partitioner = QnnPartitioner(
        target,
        qnn_libraries=qnn_libraries,
        fallback=fallback,
        in_place=in_place,
        state_update=state_update,
        state_dtype=state_dtype,
    )
    with stage("export"):
        exported = {
            name: export(module, inputs, shapes[name], name)
            for name, (module, inputs) in methods.items()
        }
        refuse_dynamic(exported, methods, shapes)
        for name, (module, inputs) in methods.items():
            if has_symbols(exported[name]):  # of one value each: the model allows no other
                exported[name] = export(module, inputs, None, name)
    origin = Origin(dict(exported), partitioner, quantize)
    fake_quantized = found = None
    if quantize is not None:
        from ..quantizer import quantized_methods  # torchao takes its time to import

        with stage("quantize"):
            fake_quantized, found = quantized_methods(
                exported,
                quantize,
                calibration,
                target,
                encodings=encodings,
                cache=calibration_cache,
            )
        with stage("export quantized"):
            exported = {
                name: export(module, methods[name][1], None, name)
                for name, module in fake_quantized.items()
            }
    program = lower_exported(exported, origin, variants, stage, constant_methods)
    program.fake_quantized, program.found_encodings = fake_quantized, found
    return program


def lower_exported(
    exported: Mapping[str, ExportedProgram],
    origin: Origin,
    variants: Mapping[str, list[str]] | None = None,
    stage: Stages | None = None,
    constant_methods: Mapping[str, Any] | None = None,
) -> Program:
    """The end of `lower`: programs that are quantized, if they are to be, through one partitioner.

    Args:
        variants: see `per_size`.
    """
    stage = stage or Stages()
    flow = Flow(
        exported,
        {name: [origin.partitioner] for name in exported},
        EdgeCompileConfig(_check_ir_validity=False),
        stage=stage,
    )
    edge = flow.run(constant_methods=constant_methods)
    return Program(edge, exported, flow.plans, origin, stage.cpu_s, flow.retraces, variants or {})


def to_edge_transform_and_lower(
    programs: ExportedProgram | dict[str, ExportedProgram],
    transform_passes: Any = None,
    partitioner: Sequence[Partitioner] | Mapping[str, Sequence[Partitioner]] | None = None,
    constant_methods: dict[str, Any] | None = None,
    compile_config: EdgeCompileConfig | None = None,
    generate_etrecord: bool = False,
) -> EdgeProgramManager:
    """ExecuTorch's entry point of the same name and signature, for any partitioners.

    What is different (see `docs/lowering.md`): programs are retraced once at most, which keeps
    buffer updates that cross right; the wishes of all partitioners for ops that stay whole are
    united, per node, in control flow too; an op that is kept and that nobody takes is opened and
    not an error; neither `programs` nor `compile_config` is changed; state that one delegate cannot
    own stays with the host, whatever its partitioner has tagged; and the registered values of
    mutable buffers are in the program that `to_executorch` makes.

    A `QnnPartitioner` does best as the first: it then sees the programs of all methods before
    anything else is delegated.

    Raises:
        LoweringError: the program cannot be lowered; it names the node or buffer and a way out.
    """
    methods = programs if isinstance(programs, dict) else {"forward": programs}
    if not isinstance(partitioner, Mapping):
        partitioner = dict.fromkeys(methods, partitioner or ())
    config = copy.deepcopy(compile_config or EdgeCompileConfig())
    flow = Flow(methods, partitioner, config)
    if not generate_etrecord:
        return flow.run(transform_passes, constant_methods)
    record = _create_empty_etrecord()
    record.add_exported_program(methods)
    edge = flow.run(
        transform_passes,
        constant_methods,
        lambda edge: record.add_edge_dialect_program(copy.deepcopy(edge)),
    )
    edge._etrecord = record
    return edge


def _methods(
    model: Module | Mapping[str, tuple[Module, Inputs]],
    example_inputs: Inputs | None,
    dynamic_shapes: Any,
) -> tuple[dict[str, tuple[Module, tuple[Any, ...]]], Mapping[str, Any]]:
    """Modules, inputs and `dynamic_shapes` by method."""
    if isinstance(model, Mapping):
        if not model:
            raise ValueError("there is no method to lower")
        if unknown := set(dynamic_shapes or ()) - set(model):
            raise ValueError(f"dynamic_shapes has no method {', '.join(sorted(map(str, unknown)))}")
        methods = {name: (module, tuple(inputs)) for name, (module, inputs) in model.items()}
        return methods, dynamic_shapes or {}
    if example_inputs is None:
        raise ValueError("example_inputs are needed to export a module")
    return {"forward": (model, tuple(example_inputs))}, {"forward": dynamic_shapes}


def export(
    module: Module, inputs: tuple[Any, ...], dynamic_shapes: Any, name: str
) -> ExportedProgram:
    """`torch.export` of a method, with what it assigns to its buffers.

    Raises:
        LoweringError: it cannot be exported.
    """
    try:
        with torch.no_grad(), assignments_written_back(module):
            return torch.export.export(module, inputs, dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as e:
        raise LoweringError(f"torch.export cannot export method {name!r}: {e}") from e
