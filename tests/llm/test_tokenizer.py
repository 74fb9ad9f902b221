# SPDX-License-Identifier: BSD-3-Clause
"""Tokenizers: round trips, files beside a program, chat templates, text in pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models

from executorch_qnn.errors import LoweringError, QnnError
from executorch_qnn.llm.tokenizer import Tokenizer, from_gguf
from executorch_qnn.llm.weights import Checkpoint

from .files import END, byte_tokenizer, byte_tokens

BYTES = Tokenizer(byte_tokenizer(), bos_id=None, eos_ids=frozenset([0]))


def sentencepiece_like() -> Tokenizer:
    """Words begin with a mark, unknown characters are bytes, the first space is dropped."""
    words = ["<unk>", *(f"<0x{i:02X}>" for i in range(256)), "▁", "▁he", "llo", "o", "€"]
    core = tokenizers.Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(core, None, frozenset())


@given(st.text())
def test_any_text_survives_a_round_trip(text: str) -> None:
    assert BYTES.decode(BYTES.encode(text)) == text


@given(st.text())
def test_pieces_of_a_text_concatenate_to_it(text: str) -> None:
    stream = BYTES.stream()
    pieces = [stream.push(token) for token in BYTES.encode(text)]
    assert "".join([*pieces, stream.flush()]) == text
    # Nothing but a genuine replacement character is ever shown as one.
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(st.lists(st.integers(0, len(byte_tokens()) - 1)))
def test_pieces_of_arbitrary_tokens_concatenate_to_their_text(ids: list[int]) -> None:
    stream = BYTES.stream()
    pieces = [stream.push(token) for token in ids]
    assert "".join([*pieces, stream.flush()]) == BYTES.decode(ids)


@pytest.mark.parametrize("text", ["a€", "€€", "😀x", "na\N{COMBINING DIAERESIS}ive"])
def test_a_character_of_several_tokens_comes_whole(text: str) -> None:
    stream = BYTES.stream()
    pieces = [stream.push(token) for token in BYTES.encode(text)]
    assert [piece for piece in pieces if piece] == list(text)


def test_words_keep_the_spaces_between_them() -> None:
    tokenizer = sentencepiece_like()
    ids = [tokenizer.core.token_to_id(t) for t in ["▁he", "llo", "▁he", "▁", "o"]]
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert pieces == ["he", "llo", " he", " ", "o"]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_bytes_between_words_come_as_whole_characters() -> None:
    tokenizer = sentencepiece_like()
    ids = [tokenizer.core.token_to_id(f"<0x{b:02X}>") for b in "é😀".encode()]
    ids.append(tokenizer.core.token_to_id("▁he"))
    stream = tokenizer.stream()
    pieces = [stream.push(token) for token in ids]
    assert [piece for piece in pieces if piece] == ["é", "😀", " he"]


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(QnnError, match="Unicode"):
        BYTES.encode("\udcff")


def test_end_tokens_have_no_text() -> None:
    stream = BYTES.stream()
    assert [stream.push(t) for t in [*BYTES.encode("hi"), 0]] == ["h", "i", ""]


def test_files_beside_a_program(tmp_path: Path) -> None:
    program = tmp_path / "model.v2.pte"
    tokenizer = Tokenizer(byte_tokenizer(), 0, frozenset([0, 5]), "{{ bos_token }}…")
    files = tokenizer.save(program)
    assert [f.name for f in files] == ["model.v2.tokenizer.json", "model.v2.tokenizer_config.json"]
    loaded = Tokenizer.load(program)
    assert (loaded.bos_id, loaded.eos_ids) == (0, {0, 5})
    assert loaded.render_chat([]) == f"{END}…"
    assert loaded.encode("hé the") == tokenizer.encode("hé the")
    files[1].unlink()
    assert Tokenizer.load(program).chat_template is None


def test_missing_or_damaged_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QnnError, match=r"model\.tokenizer\.json is missing"):
        Tokenizer.load(tmp_path / "model.pte")
    (tmp_path / "model.tokenizer.json").write_text("{}")
    with pytest.raises(QnnError, match="not a readable tokenizer"):
        Tokenizer.load(tmp_path / "model.pte")


def chat(template: str | None) -> Tokenizer:
    return Tokenizer(byte_tokenizer(), None, frozenset(), template)


def test_chat_template_sees_the_conversation() -> None:
    template = (
        "{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{% endfor %}\n"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    assert chat(template).render_chat(messages) == "system: be brief\nuser: hi\nassistant:"


def test_chat_template_may_refuse_a_conversation() -> None:
    with pytest.raises(QnnError, match="users only"):
        chat("{{ raise_exception('users only') }}").render_chat([])


@pytest.mark.parametrize(
    "template",
    ["{{ messages.__class__.__mro__ }}", "{{ cycler.__init__.__globals__ }}", "{% if %}"],
)
def test_hostile_or_broken_templates_fail_cleanly(template: str) -> None:
    with pytest.raises(QnnError, match="template fails"):
        chat(template).render_chat([])


def test_model_without_a_chat_template_says_so() -> None:
    with pytest.raises(QnnError, match="no chat template"):
        chat(None).encode_chat([{"role": "user", "content": "hi"}])


GGUF = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": [*byte_tokens(), "<tool>"],
    "tokenizer.ggml.token_type": [3] + [1] * (len(byte_tokens()) - 1) + [4],
    "tokenizer.ggml.merges": ["h e", "Ġ t"],
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 0,
    "tokenizer.ggml.eot_token_id": 7,
}


def test_gguf_tokenizer_splits_digits_and_keeps_marked_tokens_whole() -> None:
    tokenizer = from_gguf(GGUF)
    assert tokenizer.eos_ids == {0, 7}
    assert len(tokenizer.encode("2024")) == 4
    assert len(tokenizer.encode(f"{END}<tool>")) == 2
    assert tokenizer.decode(tokenizer.encode(f"{END}a<tool>")) == "a<tool>"


def test_gguf_tokenizer_adds_the_start_token_where_the_model_wants_it() -> None:
    tokenizer = from_gguf({**GGUF, "tokenizer.ggml.add_bos_token": True})
    assert tokenizer.encode("he")[0] == 0
    assert len(tokenizer.encode("he")) == 2
    from dataclasses import replace

    template = "{{ bos_token }}he"  # which writes it itself
    assert len(replace(tokenizer, chat_template=template).encode_chat([])) == 2


@pytest.mark.parametrize("change", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "x"}])
def test_unknown_gguf_tokenizer_is_refused(change: dict[str, str]) -> None:
    with pytest.raises(LoweringError, match="not supported yet"):
        from_gguf({**GGUF, **change})


def test_incomplete_gguf_tokenizer_is_refused() -> None:
    incomplete = {k: v for k, v in GGUF.items() if not k.endswith("merges")}
    with pytest.raises(LoweringError, match=r"tokenizer\.ggml\.merges"):
        from_gguf(incomplete)


def test_smollm2_tokenizer(smollm: Checkpoint, tmp_path: Path) -> None:
    tokenizer = smollm.tokenizer()
    assert tokenizer.vocab_size == smollm.config.vocab_size
    assert tokenizer.encode("The capital of France is") == [504, 3575, 282, 4649, 314]
    # ExecuTorch's own C++ tokenizer reads the file and cuts text the same way.
    from pytorch_tokenizers.pytorch_tokenizers_cpp import HFTokenizer

    file, _ = tokenizer.save(tmp_path / "model.pte")
    other = HFTokenizer()
    other.load(str(file))
    for text in ["The capital of France is 1234.", "naïve 😀\n\n  x = 0x7f", "<|im_start|>user\n"]:
        assert other.encode(text, 0, 0) == tokenizer.encode(text)
