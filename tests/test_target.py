# SPDX-License-Identifier: BSD-3-Clause
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from executorch_qnn import QnnError, Target, targets


def test_a_name_in_any_case_is_the_same_target() -> None:
    assert Target("sm8650") == Target(" SM8650 ") == Target("SM8650")
    assert len({Target("sm8650"), Target("SM8650")}) == 1
    assert Target("sm8650").name == "SM8650"


@pytest.mark.parametrize(
    ("name", "soc_model", "htp_arch"),
    [("SM8550", 43, 73), ("SM8650", 57, 75), ("SM8750", 69, 79), ("SM8850", 87, 81)],
)
def test_facts_of_the_main_targets(name: str, soc_model: int, htp_arch: int) -> None:
    target = Target(name)
    assert (target.soc_model, target.htp_arch, target.vtcm_mb) == (soc_model, htp_arch, 8)
    assert target.fp16


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(QnnError, match=r"SM8650.*SM8750") as caught:
        Target("SM9999")
    assert isinstance(caught.value, ValueError)
    assert "'SM9999'" in str(caught.value)


def test_a_target_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Target("SM8650").soc_model = 1  # type: ignore[misc]


def test_every_target_is_listed_once() -> None:
    names = [target.name for target in targets()]
    models = [target.soc_model for target in targets()]
    assert len(set(names)) == len(names)
    assert len(set(models)) == len(models)


def _relu(dtype: int, encoding: tuple[float, int] | None) -> tuple[Any, ...]:
    from executorch_qnn.compile.ir import Kind

    def tensor(name: str, kind: Kind) -> tuple[Any, ...]:
        return (name, int(kind), dtype, [1, 64], encoding, None)

    return ("relu", "Relu", [tensor("x", Kind.INPUT)], [tensor("y", Kind.OUTPUT)], [])


def _add(graph: Any, node: tuple[Any, ...]) -> None:
    name, op, inputs, outputs, params = node
    ids = [[graph.add_tensor(*tensor) for tensor in side] for side in (inputs, outputs)]
    graph.add_node(name, op, *ids, params)


@pytest.mark.parametrize("target", targets(), ids=lambda target: target.name)
def test_the_compiler_agrees_with_the_table(
    target: Target, qnn_libraries: str, tmp_path: Path
) -> None:
    from executorch_qnn import _native
    from executorch_qnn.compile.ir import DType

    library = _native.Library(qnn_libraries)
    backend = _native.Backend(library, target.soc_model)
    refused = backend.validate(_relu(DType.FLOAT16, None))
    assert (refused is None) is target.fp16, refused

    context = _native.Context(backend)
    # A VTCM of 0 is all that the SoC has.
    graph = context.graph("g", {"vtcm_mb": 0})
    _add(graph, _relu(DType.UFIXED8, (0.1, 0)))
    graph.finalize()
    context.write_binary(str(tmp_path / "context.bin"))
    found = _native.inspect_context(library, str(tmp_path / "context.bin"))
    assert (found["soc_model"], found["htp_arch"]) == (target.soc_model, target.htp_arch)
    assert found["graphs"][0]["vtcm_bytes"] == target.vtcm_mb << 20
