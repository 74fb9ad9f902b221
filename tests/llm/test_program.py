# SPDX-License-Identifier: BSD-3-Clause
"""Exported decoders on the HTP simulator, against eager PyTorch."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import executorch_qnn as qnn
from executorch_qnn.cli import main
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.export import example_inputs, export
from executorch_qnn.llm.generate import Generator, open_program
from executorch_qnn.llm.tokenizer import Tokenizer
from executorch_qnn.llm.weights import Checkpoint, load_decoder

from .conftest import random_decoder, run, tiny_config
from .files import byte_tokens, write_hf

PROMPT = "The capital of France is"
MAX_SEQ_LEN = 128
TARGET = qnn.Target("SM8650")


def sqnr(got: Sequence[Tensor], want: Sequence[Tensor]) -> float:
    """Signal to noise of all logits together, in dB."""
    g, w = torch.stack(list(got)).double(), torch.stack(list(want)).double()
    return 10 * math.log10(float((w * w).sum() / ((g - w) ** 2).sum()))


def lowered(
    decoder: Decoder, folder: Path, qnn_libraries: str, tokens: int = 1
) -> tuple[qnn.Program, qnn.Session]:
    program = qnn.lower(decoder, example_inputs(tokens), target=TARGET, qnn_libraries=qnn_libraries)
    program.save(str(folder / "model.pte"))
    return program, qnn.load(str(folder / "model.pte"), qnn_libraries=qnn_libraries)


def assert_all_on_the_npu(program: qnn.Program, layers: int, binding: str = "in_place") -> None:
    """Caches of a few KB are written whole, in place; of larger ones only the new rows."""
    method = program.report.methods["forward"]
    assert [op.node for op in method.cpu_ops] == []
    assert len(method.delegates) == 1
    assert sorted(s.fqn for s in method.state) == sorted(
        f"layers.{i}.self_attn.{cache}" for i in range(layers) for cache in ("k_cache", "v_cache")
    )
    assert {(s.owner, s.binding) for s in method.state} == {("delegate", binding)}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"n_kv_heads": 1},
        {"n_kv_heads": 6},
        {"tied_embeddings": True},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 16},
    ],
    ids=str,
)
def test_tiny_decoder_equals_eager_step_by_step(
    options: dict[str, object], tmp_path: Path, qnn_libraries: str
) -> None:
    decoder = random_decoder(tiny_config(**options))
    program, session = lowered(decoder, tmp_path, qnn_libraries)
    assert_all_on_the_npu(program, layers=2)
    tokens = [3, 91, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]
    steps = [(torch.tensor([[t]]), torch.tensor([i])) for i, t in enumerate(tokens)]
    got = [session(*step)[0] for step in steps]
    decoder.reset_state()
    assert sqnr(got, [run(decoder, [t], i) for i, t in enumerate(tokens)]) > 44
    for i in range(2):  # what the delegate kept is what eager kept
        kept = session.read_state(f"layers.{i}.self_attn.v_cache")
        assert torch.allclose(kept, decoder.layers[i].self_attn.v_cache, atol=0.05)
    session.reset_state()
    assert all(
        torch.equal(session(*step)[0], first) for step, first in zip(steps, got, strict=True)
    )


def test_tiny_decoder_reads_chunks(tmp_path: Path, qnn_libraries: str) -> None:
    decoder = random_decoder(tiny_config())
    program, session = lowered(decoder, tmp_path, qnn_libraries, tokens=4)
    assert_all_on_the_npu(program, layers=2)
    chunks = [[3, 91, 14, 15], [92, 65, 35, 89], [79, 32, 38, 46]]
    decoder.reset_state()
    for i, chunk in enumerate(chunks):
        got = session(torch.tensor([chunk]), torch.tensor([4 * i]))[0]
        assert sqnr([got], [run(decoder, chunk, 4 * i)]) > 44


def test_prefill_methods_fill_the_cache_of_decode(tmp_path: Path, qnn_libraries: str) -> None:
    eager = random_decoder(tiny_config(vocab_size=len(byte_tokens())), max_seq_len=16)
    write_hf(tmp_path, eager)
    model = export(
        tmp_path, target=TARGET, max_seq_len=16, prefill=[2, 4], qnn_libraries=qnn_libraries
    )
    file, *_ = model.save(tmp_path / "model.pte")
    generator = open_program(file, qnn_libraries=qnn_libraries)
    assert list(generator.prefill) == [4, 2]
    prompt = list(range(20, 31))
    generator.generate(prompt, max_new_tokens=1)
    run(eager, prompt)
    for i in range(2):
        kept = generator.model.read_state(f"layers.{i}.self_attn.k_cache")
        assert torch.allclose(kept, eager.layers[i].self_attn.k_cache, atol=0.05)
    got = generator.model(torch.tensor([[5]]), torch.tensor([11]))[0]
    assert sqnr([got], [run(eager, [5], 11)]) > 44


def test_commands_from_a_folder_to_text(
    tmp_path: Path, qnn_libraries: str, capsys: pytest.CaptureFixture[str]
) -> None:
    eager = random_decoder(tiny_config(vocab_size=len(byte_tokens()), n_layers=1), max_seq_len=16)
    write_hf(tmp_path, eager)
    file = str(tmp_path / "model.pte")
    common = ["--qnn-libraries", qnn_libraries]
    export_ = ["llm", "export", "--model", str(tmp_path), "-o", file, "--max-seq-len", "16"]
    assert main([*export_, *common]) == 0
    assert file in capsys.readouterr().out
    assert (tmp_path / "model.tokenizer.json").exists()
    options = ["--prompt", "abc", "--max-new-tokens", "2", "--json"]
    assert main(["llm", "generate", file, *options, *common]) == 0
    document = json.loads(capsys.readouterr().out)
    want = Generator(eager, Tokenizer.load(Path(file)), max_context=16)
    assert document["tokens"] == want.generate("abc", max_new_tokens=2).tokens


def test_garbage_on_the_heap_does_not_reach_the_cache(tmp_path: Path, qnn_libraries: str) -> None:
    lowered(random_decoder(tiny_config()), tmp_path, qnn_libraries)
    code = (
        "import torch, executorch_qnn as qnn, sys\n"
        "s = qnn.load(sys.argv[1], qnn_libraries=sys.argv[2])\n"
        "print([s(torch.tensor([[5]]), torch.tensor([i])).tolist() for i in range(3)])\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "model.pte"), qnn_libraries]
    printed = [
        subprocess.check_output(command, env={**os.environ, **extra}, text=True).splitlines()[-1]
        for extra in ({}, {"MALLOC_PERTURB_": "128"})
    ]
    assert printed[0] == printed[1]


class Exported(NamedTuple):
    file: Path
    program: qnn.Program
    eager: Decoder
    generator: Generator


def exported(
    checkpoint: Checkpoint, folder: Path, qnn_libraries: str, layers: int | None
) -> Exported:
    model = export(
        "smollm2-135m",
        target=TARGET,
        max_seq_len=MAX_SEQ_LEN,
        layers=layers,
        qnn_libraries=qnn_libraries,
    )
    file, *_ = model.save(folder / "smollm2.pte")
    return Exported(
        file,
        model.program,
        load_decoder(checkpoint, max_seq_len=MAX_SEQ_LEN, layers=layers),
        open_program(file, qnn_libraries=qnn_libraries),
    )


def compare(model: Exported, ids: Sequence[int]) -> float:
    """SQNR of the logits after each of `ids`, fed one by one."""
    session = model.generator.model
    session.reset_state()
    model.eager.reset_state()
    got = [session(torch.tensor([[t]]), torch.tensor([i]))[0] for i, t in enumerate(ids)]
    return sqnr(got, [run(model.eager, [t], i) for i, t in enumerate(ids)])


@pytest.fixture(scope="module")
def two_layers(
    smollm: Checkpoint, tmp_path_factory: pytest.TempPathFactory, qnn_libraries: str
) -> Exported:
    return exported(smollm, tmp_path_factory.mktemp("two_layers"), qnn_libraries, 2)


@pytest.fixture(scope="module")
def whole(
    smollm: Checkpoint, tmp_path_factory: pytest.TempPathFactory, qnn_libraries: str
) -> Exported:
    return exported(smollm, tmp_path_factory.mktemp("whole"), qnn_libraries, None)


def test_two_layers_of_smollm2_lie_on_the_npu(two_layers: Exported) -> None:
    assert_all_on_the_npu(two_layers.program, layers=2, binding="delta")


def test_two_layers_of_smollm2_have_eager_logits(two_layers: Exported) -> None:
    ids = two_layers.generator.tokenizer.encode(PROMPT)
    assert compare(two_layers, ids) >= 50


@pytest.mark.slow
def test_two_layers_of_smollm2_generate_a_likeliest_token(two_layers: Exported) -> None:
    # Logits of a cut model are close to each other: another token of the same rank is right, too.
    result = two_layers.generator.generate(PROMPT, max_new_tokens=4)
    ids = [*result.prompt_tokens, *result.tokens]
    two_layers.eager.reset_state()
    for i, token in enumerate(ids[:-1]):
        logits = run(two_layers.eager, [token], i)
        if i + 1 >= len(result.prompt_tokens):
            assert float(logits.max() - logits[ids[i + 1]]) < 0.02 * float(logits.std())


@pytest.mark.slow
def test_smollm2_lies_on_the_npu(whole: Exported) -> None:
    assert_all_on_the_npu(whole.program, layers=30, binding="delta")


@pytest.mark.slow
def test_smollm2_generates_eager_tokens(whole: Exported) -> None:
    got = whole.generator.generate(PROMPT, max_new_tokens=8)
    eager = Generator(whole.eager, whole.generator.tokenizer, max_context=MAX_SEQ_LEN)
    assert got.tokens == eager.generate(PROMPT, max_new_tokens=8).tokens


@pytest.mark.slow
def test_smollm2_has_eager_logits(whole: Exported) -> None:
    assert compare(whole, whole.generator.tokenizer.encode(PROMPT)) >= 44


@pytest.mark.slow
def test_smollm2_generates_the_same_on_a_dirty_heap(whole: Exported, qnn_libraries: str) -> None:
    command = [sys.executable, "-m", "executorch_qnn.cli", "llm", "generate", str(whole.file)]
    command += ["--prompt", PROMPT, "--max-new-tokens", "4", "--qnn-libraries", qnn_libraries]
    out = subprocess.check_output(
        [*command, "--json"], env={**os.environ, "MALLOC_PERTURB_": "128"}, text=True
    )
    assert json.loads(out)["text"] == " Paris.\n\n"


@pytest.mark.slow
def test_stock_runner_of_executorch_runs_smollm2(whole: Exported, qnn_libraries: str) -> None:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    qnn.register(qnn_libraries=qnn_libraries)
    runner = TextLLMRunner(str(whole.file), str(whole.file.with_suffix(".tokenizer.json")))
    pieces: list[str] = []
    options = GenerationConfig(echo=False, max_new_tokens=4, temperature=0.0)
    runner.generate(PROMPT, options, pieces.append)
    assert "".join(pieces) == " Paris.\n\n"
