# SPDX-License-Identifier: BSD-3-Clause
"""From ATen to ExecuTorch's edge dialect in one pass over the graph.

ExecuTorch's `_generate_edge_program` interprets the graph once for each of its passes.  The passes
are cooperative (each changes a call and hands it on), so that one class that inherits them all does
the same in one interpretation.
"""

from __future__ import annotations

import torch
from executorch.exir import EdgeCompileConfig
from executorch.exir.pass_base import ExportPass, PassResult
from executorch.exir.passes import dead_code_elimination_pass
from executorch.exir.passes.convert_constant_dim_order_pass import (
    convert_constant_dim_order_pass,
)
from executorch.exir.passes.debug_handle_generator_pass import DebugHandleGeneratorPass
from executorch.exir.passes.fold_redundant_qdq_pass import FoldRedundantDequantizeQuantizePass
from executorch.exir.passes.memory_format_ops_pass import MemoryFormatOpsPass
from executorch.exir.passes.normalize_transpose_pass import NormalizeTransposePass
from executorch.exir.passes.prune_empty_tensors_pass import PruneEmptyTensorsPass
from executorch.exir.passes.remove_mixed_type_operators import RemoveMixedTypeOperators
from executorch.exir.passes.remove_noop_pass import RemoveNoopPass, RemoveToCopyPass
from executorch.exir.passes.remove_unused_parameters_pass import remove_unused_parameters_pass
from executorch.exir.passes.replace_aten_with_edge_pass import OpReplacePass
from executorch.exir.passes.replace_broken_ops_with_function_ops_pass import (
    ReplaceBrokenOpsWithFunctionalOpsPass,
)
from executorch.exir.passes.replace_sym_size_op_pass import ReplaceSymSizeOpPass
from executorch.exir.passes.scalar_to_tensor_pass import ScalarToTensorPass
from executorch.exir.passes.sym_to_tensor_pass import SymToTensorPass
from executorch.exir.program._program import (
    RemoveNonCoreAtenOpGraphAssertsPass,
    _get_updated_graph_signature,
    lift_constant_tensor_pass,
)
from executorch.exir.verification.verifier import EXIREdgeDialectVerifier
from torch.export import ExportedProgram

from .decompose import graphs

aten = torch.ops.aten


class _Operators(
    NormalizeTransposePass,  # type: ignore[misc]
    ReplaceBrokenOpsWithFunctionalOpsPass,  # type: ignore[misc]
    ScalarToTensorPass,  # type: ignore[misc]
    SymToTensorPass,  # type: ignore[misc]
    RemoveMixedTypeOperators,  # type: ignore[misc]
    OpReplacePass,  # type: ignore[misc]
):
    """What the passes above do to a call, one after another."""

    def __init__(self) -> None:
        ExportPass.__init__(self)
        self._modified = False

    def call(self, graph_module: torch.fx.GraphModule) -> PassResult:
        return ExportPass.call(self, graph_module)


class _OperatorsInDimOrder(_Operators, MemoryFormatOpsPass):  # type: ignore[misc]
    pass


def _dense_results(body: torch.fx.GraphModule) -> None:
    """Makes what the bodies of one operator return equal in the order of the dimensions."""
    output = body.graph.output_node()

    def dense(node: torch.fx.Node) -> torch.fx.Node:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.is_contiguous():
            return node
        with body.graph.inserting_before(output):
            copy = body.graph.call_function(
                aten.clone.default, (node,), {"memory_format": torch.contiguous_format}
            )
        copy.meta = {**node.meta, "val": value.contiguous()}
        return copy

    output.args = torch.fx.map_arg(output.args, dense)
    body.recompile()


def to_edge(ep: ExportedProgram, config: EdgeCompileConfig) -> ExportedProgram:
    """The edge dialect form of an ATen program, or of one that is in it in part already."""
    ep = remove_unused_parameters_pass(ep)
    gm = ep.graph_module
    for node in gm.graph.find_nodes(op="call_function", target=aten._unsafe_view.default):
        node.target = aten.view.default
    for body in graphs(gm):
        if body is not gm:
            _dense_results(body)
    for change in (
        RemoveNonCoreAtenOpGraphAssertsPass(),
        ReplaceSymSizeOpPass(),
        RemoveNoopPass(),
        PruneEmptyTensorsPass(),
        RemoveToCopyPass(),
        FoldRedundantDequantizeQuantizePass(),
        _Operators() if config._skip_dim_order else _OperatorsInDimOrder(),
    ):
        gm = change(gm).graph_module
    for finish in (dead_code_elimination_pass, DebugHandleGeneratorPass()):
        gm = finish(gm).graph_module
    verifier = EXIREdgeDialectVerifier(edge_compile_config=config, class_only=True)
    edge = ExportedProgram(
        root=gm,
        graph=gm.graph,
        graph_signature=_get_updated_graph_signature(ep.graph_signature, gm),
        state_dict=ep.state_dict,
        range_constraints=ep.range_constraints,
        module_call_graph=ep.module_call_graph,
        example_inputs=ep.example_inputs,
        constants=ep.constants,
        verifiers=[verifier],
    )
    lifted: ExportedProgram = convert_constant_dim_order_pass(lift_constant_tensor_pass(edge))
    return lifted
