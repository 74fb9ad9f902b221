# SPDX-License-Identifier: BSD-3-Clause
"""The program's interface is ExecuTorch's: its stock runner generates the same text.

The decoder is lowered for the CPU here, which takes a second; what a runner sees is the same.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import executorch_qnn as qnn
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.export import constant_methods, example_inputs
from executorch_qnn.llm.generate import Generator, read_constants
from executorch_qnn.llm.tokenizer import Tokenizer

from .conftest import random_decoder, tiny_config
from .files import byte_tokenizer

MAX_SEQ_LEN = 32
TOKENIZER = Tokenizer(byte_tokenizer(), bos_id=0, eos_ids=frozenset([0, 9]))


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    """One that says ASCII only: the runner prints byte by byte."""
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size), max_seq_len=MAX_SEQ_LEN)
    assert decoder.lm_head is not None
    for token, i in TOKENIZER.core.get_vocab().items():
        if not token.isascii() or not token.isalnum():
            decoder.lm_head.weight[i] = 0
    return decoder


@pytest.fixture(scope="module")
def program(decoder: Decoder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from executorch.exir import to_edge_transform_and_lower

    exported = torch.export.export(decoder, example_inputs(), strict=False)
    lowered = to_edge_transform_and_lower(
        exported, constant_methods=constant_methods(decoder, TOKENIZER)
    )
    file = tmp_path_factory.mktemp("program") / "tiny.pte"
    file.write_bytes(lowered.to_executorch().buffer)
    TOKENIZER.save(file)
    return file


def test_constants_come_back(program: Path, qnn_libraries: str) -> None:
    assert read_constants(qnn.load(str(program), qnn_libraries=qnn_libraries)) == {
        "enable_dynamic_shape": False,
        "get_bos_id": 0,
        "get_eos_ids": [0, 9],
        "get_max_context_len": MAX_SEQ_LEN,
        "get_max_seq_len": MAX_SEQ_LEN,
        "get_vocab_size": TOKENIZER.vocab_size,
        "use_kv_cache": True,
    }


def test_stock_runner_generates_the_same_text(decoder: Decoder, program: Path) -> None:
    from executorch.extension.llm.runner import GenerationConfig, TextLLMRunner

    want = Generator(decoder, TOKENIZER, max_context=MAX_SEQ_LEN).generate(
        "the helm", max_new_tokens=12
    )
    assert want.text.isalnum()
    runner = TextLLMRunner(str(program), str(program.with_suffix(".tokenizer.json")))
    pieces: list[str] = []
    options = GenerationConfig(echo=False, max_new_tokens=12, temperature=0.0)
    runner.generate("the helm", options, pieces.append)
    assert "".join(pieces) == want.text
