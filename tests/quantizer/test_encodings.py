# SPDX-License-Identifier: BSD-3-Clause
"""Encodings go out and come in as AIMET's JSON, bit for bit."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import executorch_qnn as qnn
from executorch_qnn.cli import main
from executorch_qnn.errors import LoweringError
from executorch_qnn.quantizer import quantized_methods
from executorch_qnn.quantizer.encodings import Encoding, Encodings

from .test_quantize import TARGET, Attention, Batch, Vision, noise

ATTENTION = [(noise(i, 1, 32), torch.tensor([i])) for i in range(4)]
VISION = [(noise(i, 1, 3, 16, 16),) for i in range(2)]
RECIPES: dict[str, Any] = {
    "8a8w": "8a8w",
    "16a4w": "16a4w",
    "blocks": qnn.QuantRecipe("16a4w_block", block_size=16, state={"k_cache": 8}),
    "16a16w": "16a16w",
}


class Shared(nn.Module):
    """Rows of a table that is the weight of the last layer, too, kept in a window."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table = nn.Embedding(12, 32)
        self.register_buffer("window", torch.full((4, 32), 0.25))

    def forward(self, at: Tensor) -> Tensor:
        self.window.copy_(torch.cat([self.window[at.shape[0] :], torch.tanh(self.table(at))]))
        return (self.window @ self.table.weight.t()).softmax(-1)


def quantized(
    models: dict[str, tuple[nn.Module, list[Batch]]], recipe: Any, **how: Any
) -> tuple[dict[str, torch.fx.GraphModule], dict[str, Any]]:
    """Quantized modules and the document, without lowering."""
    torch.set_num_threads(1)
    exported = {
        name: torch.export.export(copy.deepcopy(model).eval(), batches[0], strict=False)
        for name, (model, batches) in models.items()
    }
    data = how.pop("data", True)
    calibration = {name: batches for name, (_, batches) in models.items()} if data else None
    modules, found = quantized_methods(exported, recipe, calibration, qnn.Target(TARGET), **how)
    return modules, found.to_json(recipe)


def assert_same(got: dict[str, Any], want: dict[str, Any]) -> None:
    for name, module in want.items():
        assert str(got[name].graph) == str(module.graph)
        theirs = dict(got[name].named_buffers()) | dict(got[name].named_parameters())
        for key, tensor in (*module.named_buffers(), *module.named_parameters()):
            assert torch.equal(theirs[key], tensor), key


def named(document: dict[str, Any], name: str) -> dict[str, Any]:
    both = document["activation_encodings"] + document["param_encodings"]
    (found,) = (e for e in both if e["name"] == name)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", ["attention", "vision"])
def test_a_file_gives_the_same_program_without_data(
    model: str, recipe: str, tmp_path: Path
) -> None:
    module, batches = (Attention(), ATTENTION) if model == "attention" else (Vision(), VISION)
    given = {"forward": (module, batches)}
    first, document = quantized(given, RECIPES[recipe])
    file = tmp_path / "encodings.json"
    file.write_text(json.dumps(document))
    again, same = quantized(given, RECIPES[recipe], data=False, encodings=file)
    assert same == document
    assert_same(again, first)
    weight = named(document, "q.weight" if model == "attention" else "body.6.weight")
    kinds = {"blocks": "LPBQ", "16a16w": "PER_TENSOR"}
    assert weight["enc_type"] == kinds.get(recipe, "PER_CHANNEL")
    assert weight["is_sym"]
    if model == "attention":
        assert named(document, "k_cache")["bw"] == (8 if recipe in ("blocks", "8a8w") else 16)


def test_methods_share_parameters_and_state() -> None:
    model = Shared()
    batches = [(torch.tensor([i, i + 3]),) for i in range(4)]
    models: Any = {"two": (model, batches), "one": (model, [(b[:1],) for (b,) in batches])}
    first, document = quantized(models, "16a8w")
    again, same = quantized(models, "16a8w", data=False, encodings=document)
    assert same == document
    assert_same(again, first)
    assert named(document, "table.weight")["bw"] == 8
    assert named(document, "table.weight:embedding")["bw"] == 16
    assert named(document, "one/softmax")["offset"] == [0]
    tanh = named(document, "two/tanh")
    assert named(document, "window") == {**tanh, "name": "window"}


def test_what_a_file_does_not_name_is_calibrated() -> None:
    given = {"forward": (Attention(), ATTENTION)}
    first, document = quantized(given, "16a8w")
    rows = named(document, "linear_2")
    changed = {**rows, "scale": [2.0**-12], "offset": [-(2**15)]}
    part = {"version": "1.0.0", "activation_encodings": [changed], "param_encodings": []}
    _, other = quantized(given, "16a8w", encodings=part)
    assert named(other, "linear_2") == changed
    assert [e for e in other["activation_encodings"] if e["name"] != "linear_2"] == [
        e for e in document["activation_encodings"] if e["name"] != "linear_2"
    ]
    # Scales of constants need no data.
    values = {**document, "param_encodings": []}
    again, same = quantized(given, "16a8w", data=False, encodings=values)
    assert same == document
    assert_same(again, first)


def _old(entry: dict[str, Any], ranges: bool) -> list[dict[str, Any]]:
    made = []
    for scale, offset in zip(entry["scale"], entry["offset"], strict=True):
        steps = 2 ** entry["bw"] - 1
        numbers = {"min": scale * offset, "max": scale * (steps + offset)}
        if not ranges:
            numbers |= {"scale": scale, "offset": float(offset)}
        about = {"bitwidth": entry["bw"], "dtype": "int", "is_symmetric": str(entry["is_sym"])}
        made.append(about | numbers)
    return made


@pytest.mark.parametrize("ranges", [False, True])
def test_older_versions_are_read(ranges: bool) -> None:
    given = {"forward": (Vision(), VISION)}
    first, document = quantized(given, "8a8w")
    old = {"version": "0.6.1"} | {
        section: {e["name"]: _old(e, ranges) for e in document[section]}
        for section in ("activation_encodings", "param_encodings")
    }
    again, same = quantized(given, "8a8w", data=False, encodings=old)
    if not ranges:
        assert same == document
        assert_same(again, first)
    for section in ("activation_encodings", "param_encodings"):
        for got, want in zip(same[section], document[section], strict=True):
            assert got["offset"] == want["offset"]
            assert got["scale"] == pytest.approx(want["scale"], rel=1e-6)


def _edited(section: str, which: str, **changes: Any) -> Any:
    def edit(document: dict[str, Any]) -> dict[str, Any]:
        entries = [{**e, **changes} for e in document[section] if e["name"] == which]
        return {"version": "1.0.0", section: entries}

    return edit


BAD: list[tuple[Any, str]] = [
    (lambda d: {**d, "version": "9.0"}, "its version is 9.0; 1.0.0 and those before"),
    (lambda _: {"version": "1.0.0"}, "no encodings of AIMET"),
    (_edited("activation_encodings", "linear_2", name="linear_q"), "nothing in it has a name"),
    (
        lambda d: {**d, "param_encodings": [{**named(d, "q.weight"), "name": "q.weigth"}]},
        "nothing named q.weigth; did you mean q.weight",
    ),
    (
        _edited("activation_encodings", "linear_2", bw=8),
        "linear_2 has 8 bits there, and 16 by the recipe",
    ),
    (
        _edited("activation_encodings", "linear_2", dtype="FLOAT"),
        "of linear_2 is not right: it is FLOAT",
    ),
    (_edited("activation_encodings", "linear_2", offset=[7]), "linear_2 has the offset 7"),
    (_edited("activation_encodings", "linear_2", scale=[0.0]), "finite and above zero"),
    (_edited("activation_encodings", "linear_2", scale=[1.0, 2.0]), "a scale for each channel"),
    (_edited("activation_encodings", "linear_2", enc_type="VECTOR"), "no enc_type 'VECTOR'"),
    (_edited("activation_encodings", "v_cache", scale=[1e-9]), "the buffer starts from 0.1 to"),
    (_edited("param_encodings", "q.weight", bw=4), "q.weight has 4 bits there, and 8"),
    (
        _edited("param_encodings", "q.weight", scale=[0.1] * 31, offset=[-128] * 31),
        "has 31 channels, and the weight 32",
    ),
    (_edited("param_encodings", "q.weight", offset=[-100] * 32), "weights are symmetric"),
    (
        _edited("param_encodings", "q.weight", enc_type="PER_BLOCK", block_size=32),
        "blocks of 32 there, and no blocks by the recipe",
    ),
    (
        lambda d: {
            **d,
            "activation_encodings": [
                {**e, "scale": [9.0]} if e["name"] == "k_cache" else e
                for e in d["activation_encodings"]
            ],
        },
        "have one encoding, because",
    ),
]


@pytest.fixture(scope="module")
def attention() -> dict[str, Any]:
    return quantized({"forward": (Attention(), ATTENTION)}, "16a8w")[1]


def test_what_does_not_fit_is_named(attention: dict[str, Any], tmp_path: Path) -> None:
    exported = {"forward": torch.export.export(Attention().eval(), ATTENTION[0], strict=False)}
    for edit, text in BAD:
        with pytest.raises(LoweringError) as caught:
            quantized_methods(exported, "16a8w", None, encodings=edit(attention))
        assert text in str(caught.value)
    part = {**attention, "activation_encodings": attention["activation_encodings"][:3]}
    with pytest.raises(LoweringError, match=r"have none for.*calibration="):
        quantized_methods(exported, "16a8w", None, encodings=part)
    for content, text in (("{", "is not JSON"), ("[1]", "no encodings"), (None, "cannot read")):
        file = tmp_path / f"{text}.json"
        if content is not None:
            file.write_text(content)
        with pytest.raises(LoweringError, match=text):
            Encodings.read(file)
    with pytest.raises(ValueError, match="encodings are for quantize="):
        qnn.lower(nn.Linear(4, 4), (torch.ones(1, 4),), target=TARGET, encodings=attention)


def test_a_program_has_the_encodings_of_its_file(tmp_path: Path, qnn_libraries: str) -> None:
    """Lowered from one file, state and results are the same to the bit."""
    sessions = []
    for i, data in enumerate((ATTENTION, None)):
        file = tmp_path / f"{i}.json"
        program = qnn.lower(
            Attention().eval(), ATTENTION[0], target=TARGET, quantize="16a8w", calibration=data,
            encodings=None if data else tmp_path / "0.json", qnn_libraries=qnn_libraries,
        )  # fmt: skip
        program.save_encodings(file)
        program.save(tmp_path / f"{i}.pte")
        sessions.append(qnn.load(tmp_path / f"{i}.pte", qnn_libraries=qnn_libraries))
    assert (tmp_path / "0.json").read_text() == (tmp_path / "1.json").read_text()
    document = json.loads((tmp_path / "0.json").read_text())
    for batch in ATTENTION:
        a, b = (session(*batch)[0] for session in sessions)
        assert torch.equal(a, b)
    cache = named(document, "k_cache")
    assert sessions[1].state()["k_cache"].encoding == (cache["scale"][0], cache["offset"][0])


def test_scales_of_blocks_are_written_to_the_bit() -> None:
    """As LPBQ where they are multiples of their channel's, else one by one."""
    generator = torch.Generator().manual_seed(0)
    channels = torch.rand(300, 1, generator=generator) * 2.0**-7
    factors = torch.randint(1, 17, (300, 6), generator=generator)
    for scale, kind in ((channels * factors, "LPBQ"), (channels + factors, "PER_BLOCK")):
        written = Encoding(4, scale, (-8,) * 300, True, 16).to_json("w")
        assert (written["enc_type"], written["block_size"]) == (kind, 16)
        assert written["bw"] == (8 if kind == "LPBQ" else 4)
        read = Encodings.read({"param_encodings": [written], "version": "1.0.0"})
        (encoding,) = read.parameters.values()
        assert (encoding.bits, encoding.block) == (4, 16)
        assert torch.equal(encoding.scale.reshape(scale.shape), scale)


def test_the_command_line_writes_and_reads_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], qnn_libraries: str
) -> None:
    (tmp_path / "nets.py").write_text(
        "import torch\n\ndef net():\n    torch.manual_seed(0)\n"
        "    return torch.nn.Linear(8, 8).eval(), (torch.ones(1, 8),)\n"
    )
    np.savez(tmp_path / "x.npz", x=np.ones((1, 8), np.float32))
    first, second = (str(tmp_path / f"{name}.json") for name in ("first", "second"))
    lower = ["lower", f"{tmp_path}/nets.py:net", "-o", f"{tmp_path}/net.pte"]
    found = [*lower, "--quantize", "8a8w", "--save-encodings"]
    common = ["--qnn-libraries", qnn_libraries]
    assert main([*found, first, "--calibration", str(tmp_path / "x.npz"), *common]) == 0
    assert main([*found, second, "--encodings", first, *common]) == 0
    assert Path(first).read_text() == Path(second).read_text()
    assert main([*lower, "--save-encodings", first, *common]) == 2
    assert "are for --quantize" in capsys.readouterr().err
