# SPDX-License-Identifier: BSD-3-Clause
"""Writes decoders as the files in which checkpoints come."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from executorch_qnn.llm.decoder import Decoder

END = "<|end|>"


def byte_tokens() -> list[str]:
    """An end token, one token for each byte, and two merged ones."""
    return [END, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "Ġt"]


def byte_tokenizer() -> Tokenizer:
    """A byte-level tokenizer over `byte_tokens`."""
    vocab = {token: i for i, token in enumerate(byte_tokens())}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("Ġ", "t")]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([END])
    return core


def write_hf(
    folder: Path, decoder: Decoder, *, shards: int = 1, dtype: torch.dtype | None = None
) -> None:
    """A folder in Hugging Face's layout."""
    from safetensors.torch import save_file

    c = decoder.config
    config = {
        "model_type": "llama",
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "intermediate_size": c.hidden_dim,
        "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads,
        "num_key_value_heads": c.n_kv_heads,
        "head_dim": c.head_dim,
        "max_position_embeddings": c.context_length,
        "rms_norm_eps": c.norm_eps,
        "rope_theta": c.rope_theta,
        "tie_word_embeddings": c.tied_embeddings,
        "attention_bias": c.attention_bias,
        "eos_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer_config = {"eos_token": END, "chat_template": "{{ messages[0]['content'] }}!"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    tensors = {
        name if name.startswith("lm_head") else f"model.{name}": p.detach().to(dtype or p.dtype)
        for name, p in decoder.named_parameters()
    }
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    weight_map = {}
    for i in range(shards):
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        names = sorted(tensors)[i::shards]
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    index = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index)


_GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(file: Path, decoder: Decoder, *, quantize: bool = False, extra: str = "") -> None:
    """A GGUF file as llama.cpp's converter orders it; `extra` names one more tensor."""
    from gguf import GGMLQuantizationType, GGUFWriter, quants

    c = decoder.config
    writer = GGUFWriter(file, "llama")
    writer.add_context_length(c.context_length)
    writer.add_embedding_length(c.dim)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.hidden_dim)
    writer.add_head_count(c.n_heads)
    writer.add_head_count_kv(c.n_kv_heads)
    writer.add_key_length(c.head_dim)
    writer.add_layer_norm_rms_eps(c.norm_eps)
    writer.add_rope_freq_base(c.rope_theta)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(byte_tokens())
    writer.add_token_types([3] + [1] * (len(byte_tokens()) - 1))
    writer.add_token_merges(["h e", "Ġ t"])
    writer.add_eos_token_id(0)
    for name, parameter in decoder.named_parameters():
        *path, module, leaf = name.split(".")
        array = parameter.detach().numpy()
        if module in ("q_proj", "k_proj"):
            heads = c.n_heads if module == "q_proj" else c.n_kv_heads
            rows = array.reshape(heads, 2, c.head_dim // 2, *array.shape[1:])
            array = np.ascontiguousarray(rows.swapaxes(1, 2).reshape(array.shape))
        prefix = f"blk.{path[1]}." if path else ""
        target = f"{prefix}{_GGUF_NAMES[module]}.{leaf}"
        if quantize and array.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(target, quants.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, array)
    if extra:
        writer.add_tensor(extra, np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
