# SPDX-License-Identifier: BSD-3-Clause
"""Text to tokens and back, over a Hugging Face `tokenizer.json`.

A program `NAME.pte` has its tokenizer beside it: `NAME.tokenizer.json`, which every runtime of
ExecuTorch reads, and `NAME.tokenizer_config.json` with the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from ..errors import LoweringError, QnnError
from .config import read_json

# What decoding shows for bytes that are no UTF-8 (yet).
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer and what its model adds to it.

    `bos_id` starts a text (encoding adds it where the model wants it), any of `eos_ids` ends the
    model's answer.
    """

    core: tokenizers.Tokenizer
    bos_id: int | None
    eos_ids: frozenset[int]
    chat_template: str | None = None

    @property
    def vocab_size(self) -> int:
        return self.core.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text that the model is to continue."""
        return self._encode(text, special=True)

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, up to where the model's answer starts.

        Each message has a `role` ("system", "user", "assistant") and `content`.
        """
        text = self.render_chat(messages)
        # The template writes the special tokens itself.
        return self._encode(text, special=False)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates; the library's error would not say so
            raise QnnError("the prompt is not valid Unicode text") from None
        return list(self.core.encode(text, add_special_tokens=special).ids)

    def render_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation by the model's own chat template."""
        if self.chat_template is None:
            raise QnnError("this model has no chat template: give a raw prompt instead")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise QnnError(f"the chat template refuses this conversation: {message}")

        # The options that templates are written for (transformers renders them so).
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        bos = "" if self.bos_id is None else self.core.id_to_token(self.bos_id)
        try:
            return environment.from_string(self.chat_template).render(
                messages=messages, add_generation_prompt=True, bos_token=bos
            )
        except TemplateError as error:
            raise QnnError(f"the model's chat template fails: {error}") from error

    def decode(self, ids: Iterable[int]) -> str:
        """The text of tokens; special ones (end of text, turns of a chat) have none."""
        return self.core.decode(list(ids), skip_special_tokens=True)

    def stream(self) -> StreamDecoder:
        """A decoder for tokens that come one by one."""
        return StreamDecoder(self)

    def save(self, program: Path) -> list[Path]:
        """Writes the files beside a program; returns their paths."""
        file, config = _files(program)
        self.core.save(str(file))
        values = {
            "bos_token": self.bos_id if self.bos_id is None else self.core.id_to_token(self.bos_id),
            "eos_token": [self.core.id_to_token(i) for i in sorted(self.eos_ids)],
            "chat_template": self.chat_template,
        }
        config.write_text(json.dumps(values, indent=1, ensure_ascii=False) + "\n", "utf-8")
        return [file, config]

    @staticmethod
    def load(program: Path) -> Tokenizer:
        """The tokenizer beside a program; a bare `tokenizer.json` does, without chat."""
        file, config = _files(program)
        core = _read(file)
        values = _read_optional(config)
        return Tokenizer(
            core,
            _token_id(core, values.get("bos_token")),
            _token_ids(core, values.get("eos_token")),
            values.get("chat_template"),
        )


class StreamDecoder:
    """Turns tokens into text as they come, never splitting a character.

    The pieces concatenate to what decoding all tokens at once gives.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Decoding may depend on the neighbour to the left (a first space is dropped), so the piece
        # before the current one stays as context.
        self._ids: list[int] = []
        self._context = 0  # how many of `_ids` are context
        self._done = 0  # how many characters of their text are out

    def push(self, token: int) -> str:
        """The text that `token` completes; may be empty."""
        self._ids.append(token)
        text = self._tokenizer.decode(self._ids)
        # Bytes of an unfinished character decode to replacement characters.
        complete = len(text.rstrip(_REPLACEMENT))
        piece = text[self._done : complete]
        self._done = max(self._done, complete)
        if piece and complete == len(text):
            self._ids = self._ids[self._context :]
            self._context = len(self._ids)
            self._done = len(self._tokenizer.decode(self._ids))
        return piece

    def flush(self) -> str:
        """What is left at the end: replacement characters for bytes that never became text."""
        piece = self._tokenizer.decode(self._ids)[self._done :]
        self._ids, self._context, self._done = [], 0, 0
        return piece


def from_hf(folder: Path) -> Tokenizer:
    """The tokenizer of a folder in Hugging Face's layout."""
    core = _read(folder / "tokenizer.json")
    config = _read_optional(folder / "tokenizer_config.json")
    # The model's own generation settings know every token that ends an answer.
    generation = _read_optional(folder / "generation_config.json")
    generation = generation or _read_optional(folder / "config.json")
    eos = generation.get("eos_token_id")
    eos_ids = frozenset([eos] if isinstance(eos, int) else eos or ())
    template = config.get("chat_template")
    if isinstance(template, list):  # several named ones
        template = {t["name"]: t["template"] for t in template}.get("default")
    template_file = folder / "chat_template.jinja"
    if template is None and template_file.exists():
        template = template_file.read_text("utf-8")
    return Tokenizer(
        core,
        _token_id(core, config.get("bos_token")),
        eos_ids | _token_ids(core, config.get("eos_token")),
        template,
    )


# How text is cut into pieces before merging, by the name in `tokenizer.ggml.pre`.
_DIGITS = pre_tokenizers.Digits(individual_digits=True)
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)
_PRE_TOKENIZERS = {
    "smollm": pre_tokenizers.Sequence([_DIGITS, _BYTE_LEVEL]),
    "gpt-2": _BYTE_LEVEL,
    "default": _BYTE_LEVEL,
}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that GGUF metadata holds."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise LoweringError(
            f"the file's tokenizer ({kind}, {pre}) is not supported yet; supported: gpt2 with one "
            f"of {', '.join(_PRE_TOKENIZERS)}"
        )
    try:
        tokens: list[str] = metadata["tokenizer.ggml.tokens"]
        kinds: list[int] = metadata["tokenizer.ggml.token_type"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    except KeyError as error:
        raise LoweringError(f"the file's tokenizer lacks the field {error}") from None
    core = tokenizers.Tokenizer(
        models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    core.pre_tokenizer = _PRE_TOKENIZERS[pre]
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [AddedToken(t, special=True) for t, k in zip(tokens, kinds, strict=True) if k == _CONTROL]
    )
    core.add_tokens(
        [AddedToken(t) for t, k in zip(tokens, kinds, strict=True) if k == _USER_DEFINED]
    )
    bos_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is not None and metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = tokens[bos_id]
        core.post_processor = processors.TemplateProcessing(f"{bos} $0", None, [(bos, bos_id)])
    ends = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot"))
    return Tokenizer(
        core,
        bos_id,
        frozenset(i for i in ends if i is not None),
        metadata.get("tokenizer.chat_template"),
    )


def _files(program: Path) -> tuple[Path, Path]:
    return program.with_suffix(".tokenizer.json"), program.with_suffix(".tokenizer_config.json")


def _read(file: Path) -> tokenizers.Tokenizer:
    if not file.exists():
        raise QnnError(f"the tokenizer {file} is missing")
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise QnnError(f"{file} is not a readable tokenizer: {error}") from error


def _read_optional(file: Path) -> dict[str, Any]:
    return read_json(file) if file.exists() else {}


def _token_id(core: tokenizers.Tokenizer, token: Any) -> int | None:
    """The id of a token given as text, or as the dictionary that some configurations use."""
    text = token.get("content") if isinstance(token, dict) else token
    return core.token_to_id(text) if isinstance(text, str) else None


def _token_ids(core: tokenizers.Tokenizer, token: Any) -> frozenset[int]:
    listed = token if isinstance(token, list) else [token]
    return frozenset(i for t in listed if (i := _token_id(core, t)) is not None)
