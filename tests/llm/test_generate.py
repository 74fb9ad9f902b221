# SPDX-License-Identifier: BSD-3-Clause
"""Generation over a scripted model and over a tiny decoder."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch
from torch import Tensor

from executorch_qnn.errors import QnnError
from executorch_qnn.llm.generate import Generator
from executorch_qnn.llm.tokenizer import Tokenizer

from .conftest import random_decoder, run, tiny_config
from .files import byte_tokenizer

TOKENIZER = Tokenizer(byte_tokenizer(), bos_id=None, eos_ids=frozenset([0]))


class Scripted:
    """Says a text whatever the prompt; remembers what it was fed."""

    def __init__(self, answer: list[int], prompt: int) -> None:
        self.answer, self.prompt = answer, prompt
        self.fed: list[tuple[int, int]] = []
        self.resets = 0

    def reset_state(self) -> None:
        self.resets += 1
        self.fed.clear()

    def __call__(self, tokens: Tensor, start_pos: Tensor) -> Tensor:
        assert (tokens.shape, tokens.dtype) == ((1, 1), torch.int64)
        assert (start_pos.shape, start_pos.dtype) == ((1,), torch.int64)
        self.fed.append((int(tokens), int(start_pos)))
        step = len(self.fed) - self.prompt
        logits = torch.zeros(1, TOKENIZER.vocab_size)
        if step >= 0:
            logits[0, self.answer[step]] = 5.0
        return logits


def scripted(answer: str, prompt: str) -> Generator:
    model = Scripted([*TOKENIZER.encode(answer), 0, 0], len(TOKENIZER.encode(prompt)))
    return Generator(model, TOKENIZER, max_context=32)


def test_continues_a_prompt_until_an_end_token() -> None:
    generator = scripted("wörld", "he t")
    pieces: list[str] = []
    result = generator.generate("he t", on_text=pieces.append)
    assert result.prompt_tokens == TOKENIZER.encode("he t")
    assert result.tokens == [*TOKENIZER.encode("wörld"), 0]
    assert result.text == "wörld" == "".join(pieces)
    assert pieces == list("wörld")
    assert result.finish_reason == "stop"
    fed = [*result.prompt_tokens, *result.tokens[:-1]]
    assert generator.model.fed == list(zip(fed, range(len(fed)), strict=True))


def test_stops_at_the_limit_and_starts_afresh_each_time() -> None:
    generator = scripted("world", "abc")
    first = generator.generate("abc", max_new_tokens=3)
    assert (first.text, first.finish_reason) == ("wor", "length")
    assert generator.generate("abc", max_new_tokens=3).tokens == first.tokens
    assert generator.model.resets == 2


def test_half_a_character_at_the_limit_is_shown_as_such() -> None:
    pieces: list[str] = []
    result = scripted("é", "abc").generate("abc", max_new_tokens=1, on_text=pieces.append)
    assert result.text == "�" == "".join(pieces)


def test_result_is_json() -> None:
    document = scripted("hi", "abc").generate("abc").to_json()
    assert json.loads(json.dumps(document)) == document
    assert document.keys() >= {
        "prompt_tokens",
        "tokens",
        "text",
        "time_to_first_token_s",
        "tokens_per_s",
    }
    assert document["time_to_first_token_s"] > 0
    assert document["tokens_per_s"] > 0


@pytest.mark.parametrize(
    ("prompt", "new", "message"),
    [
        ("", 1, "no tokens"),
        ("x" * 33, 1, "prompt has 33 tokens.*context holds 32"),
        ("x" * 30, 4, "at most 3"),
        ("x" * 33, None, "33 tokens"),
        ("x", 0, "max_new_tokens"),
    ],
)
def test_what_does_not_fit_the_context_is_refused_before_running(
    prompt: str, new: int | None, message: str
) -> None:
    generator = scripted("hi", prompt)
    with pytest.raises(QnnError, match=message):
        generator.generate(prompt, max_new_tokens=new)
    assert generator.model.resets == 0


def test_a_full_context_is_used_to_the_last_position() -> None:
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size), max_seq_len=8)
    tokenizer = Tokenizer(TOKENIZER.core, None, frozenset())
    result = Generator(decoder, tokenizer, max_context=8).generate("abc")
    assert len(result.prompt_tokens) + len(result.tokens) == 8 + 1


def test_greedy_takes_the_likeliest_token_of_the_decoder() -> None:
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size))
    tokenizer = Tokenizer(TOKENIZER.core, None, frozenset())
    result = Generator(decoder, tokenizer, max_context=16).generate("abc", max_new_tokens=8)
    want = tokenizer.encode("abc")
    for _ in range(8):
        decoder.reset_state()
        want.append(int(run(decoder, want).argmax()))
    assert [*result.prompt_tokens, *result.tokens] == want


@pytest.mark.parametrize("length", [1, 2, 3, 8, 13, 14])
def test_prompts_are_read_in_the_largest_chunks_that_fit(length: int) -> None:
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size))
    sizes: list[int] = []

    def chunk(tokens: Tensor, start_pos: Tensor) -> Tensor:
        sizes.append(tokens.shape[1])
        return run(decoder, tokens[0].tolist(), int(start_pos))[None]

    prompt = list(range(20, 20 + length))
    want = Generator(decoder, TOKENIZER, max_context=16).generate(prompt, max_new_tokens=3)
    chunked = Generator(decoder, TOKENIZER, max_context=16, prefill={2: chunk, 8: chunk})
    assert chunked.generate(prompt, max_new_tokens=3).tokens == want.tokens
    assert sizes == {1: [], 2: [], 3: [2], 8: [2] * 3, 13: [8, 2, 2], 14: [8, 2, 2]}[length]


def test_drawing_follows_the_distribution_and_the_seed() -> None:
    class Coin:
        def reset_state(self) -> None: ...

        def __call__(self, tokens: Tensor, start_pos: Tensor) -> Tensor:
            logits = torch.full((1, TOKENIZER.vocab_size), -30.0)
            logits[0, 100], logits[0, 101] = 1.0, 0.0
            return logits

    generator = Generator(Coin(), TOKENIZER, max_context=1000)
    drawn = generator.generate([1], temperature=0.5, seed=7).tokens
    counts = Counter(drawn)
    share = 1 / (1 + torch.tensor(-1 / 0.5).exp().item())
    assert counts[100] / len(drawn) == pytest.approx(share, abs=0.05)
    assert generator.generate([1], temperature=0.5, seed=7).tokens == drawn
    assert generator.generate([1], temperature=0.5, seed=8).tokens != drawn
    assert set(generator.generate([1], temperature=0.0, max_new_tokens=9).tokens) == {100}


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_senseless_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(QnnError, match="temperature"):
        scripted("hi", "abc").generate("abc", temperature=temperature)


def test_logits_that_are_not_finite_are_an_error_not_a_token() -> None:
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size))
    decoder.norm.weight.fill_(float("nan"))
    with pytest.raises(QnnError, match="not finite"):
        Generator(decoder, TOKENIZER, max_context=16).generate("abc")
