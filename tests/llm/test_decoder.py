# SPDX-License-Identifier: BSD-3-Clause
"""The decoder against a plain forward pass, and what its exported graph looks like."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from executorch_qnn.errors import LoweringError
from executorch_qnn.llm.decoder import MASKED, Decoder
from executorch_qnn.llm.export import example_inputs

from . import reference
from .conftest import random_decoder, run, tiny_config

TOKENS = [3, 91, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46]

OPTIONS = {
    "grouped queries": {},
    "one key head": {"n_kv_heads": 1},
    "as many key heads as heads": {"n_kv_heads": 6},
    "tied embeddings": {"tied_embeddings": True},
    "biases": {"attention_bias": True},
    "heads wider than the model": {"head_dim": 16},
    "long wavelengths": {"rope_theta": 1e6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_step_by_step_equals_attention_without_a_cache(options: dict[str, object]) -> None:
    decoder = random_decoder(tiny_config(**options))
    want = reference.logits(decoder.config, decoder.state_dict(), TOKENS)
    got = torch.stack([run(decoder, [token], i) for i, token in enumerate(TOKENS)])
    assert torch.allclose(got.double(), want, atol=1e-4)


@pytest.mark.parametrize("chunk", [2, 5, len(TOKENS)])
def test_chunks_equal_single_steps(chunk: int) -> None:
    steps, chunks = random_decoder(tiny_config()), random_decoder(tiny_config())
    for start in range(0, len(TOKENS), chunk):
        part = TOKENS[start : start + chunk]
        for i, token in enumerate(part):
            want = run(steps, [token], start + i)
        assert torch.allclose(run(chunks, part, start), want, atol=1e-5)
    for (name, got), (_, cache) in zip(chunks.named_buffers(), steps.named_buffers(), strict=True):
        assert torch.allclose(got, cache, atol=1e-5), name


def test_all_logits_are_those_of_single_steps() -> None:
    steps, whole = random_decoder(tiny_config()), random_decoder(tiny_config())
    whole.all_logits = True
    want = torch.stack([run(steps, [token], i) for i, token in enumerate(TOKENS)])
    got = whole(torch.tensor([TOKENS]), torch.tensor([0]))
    assert torch.allclose(got, want, atol=1e-5)


def test_cache_beyond_the_current_position_does_not_matter() -> None:
    decoder, other = random_decoder(tiny_config()), random_decoder(tiny_config())
    for layer in other.layers:
        layer.self_attn.k_cache.fill_(50.0)
        layer.self_attn.v_cache.fill_(-50.0)
    for i, token in enumerate(TOKENS):
        assert torch.equal(run(decoder, [token], i), run(other, [token], i))


def test_rewinding_to_a_position_forgets_what_came_after() -> None:
    decoder, fresh = random_decoder(tiny_config()), random_decoder(tiny_config())
    run(decoder, TOKENS)
    run(fresh, TOKENS[:4])
    assert torch.equal(run(decoder, [7], 4), run(fresh, [7], 4))


def test_reset_empties_every_cache() -> None:
    decoder = random_decoder(tiny_config())
    want = run(decoder, TOKENS)
    decoder.reset_state()
    assert not any(b.any() for n, b in decoder.named_buffers() if n.endswith("_cache"))
    assert torch.equal(run(decoder, TOKENS), want)


def test_context_longer_than_the_model_knows_is_refused() -> None:
    with pytest.raises(LoweringError, match="1 to 64"):
        Decoder(tiny_config(), 65)


def test_writing_beyond_the_cache_fails_in_eager() -> None:
    with pytest.raises((IndexError, RuntimeError)):
        run(random_decoder(tiny_config(), max_seq_len=4), [1], 4)


def test_mask_is_finite_in_float16_and_hides_completely() -> None:
    scores = torch.tensor([500.0, 500.0 + MASKED], dtype=torch.float16)
    assert scores.isfinite().all()
    assert torch.softmax(scores, 0).tolist() == [1.0, 0.0]


@pytest.mark.parametrize("tokens", [1, 4])
def test_exports_without_guards_and_only_caches_are_state(tokens: int) -> None:
    decoder = random_decoder(tiny_config())
    exported = torch.export.export(decoder, example_inputs(tokens), strict=False)
    assert not exported.range_constraints
    exported = exported.run_decompositions({})
    assert sorted(exported.graph_signature.buffers_to_mutate.values()) == [
        f"layers.{i}.self_attn.{cache}" for i in range(2) for cache in ("k_cache", "v_cache")
    ]
    names = {n for n in exported.state_dict if "self_attn" not in n}
    assert not [n for n in names if "rope" in n or "position" in n]  # tables are constants


def test_a_layer_of_the_decode_graph_has_few_ops() -> None:
    def ops(layers: int) -> Counter[str]:
        decoder = random_decoder(tiny_config(n_layers=layers))
        exported = torch.export.export(decoder, example_inputs(), strict=False)
        return Counter(str(n.target) for n in exported.graph.nodes if n.op == "call_function")

    layer = ops(2) - ops(1)
    # 7 linear, 2 norms, 2 cache updates, 2 matmuls, softmax, silu, 2 residuals, mask, gate * up,
    # rotation 6, joining and splitting q and k 3, transpose of the keys, 4 reshapes
    assert layer.total() <= 34
    assert layer["aten.linear.default"] == 7
    assert layer["aten.index_copy_.default"] == 2
    # The cache is never repeated, copied or reshaped.
    assert not [op for op in layer if "repeat" in op or "expand" in op or "clone" in op]
