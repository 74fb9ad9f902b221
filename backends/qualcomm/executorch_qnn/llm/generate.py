# SPDX-License-Identifier: BSD-3-Clause
"""Text from a decoder: the same code for the eager module and for a program on the NPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from ..errors import QnnError
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from ..session import Session


# `tokens int64[1, T]` and `start_pos int64[1]` to logits `float32[1, vocab]` after the last token.
Step = Callable[[Tensor, Tensor], Tensor]


class CausalModel(Protocol):
    """What generation needs; a `Decoder` and a `Session` both are one.

    Calls are a `Step` of one token.
    """

    def __call__(self, tokens: Tensor, start_pos: Tensor, /) -> Tensor: ...

    def reset_state(self) -> None: ...


@dataclass(frozen=True)
class Generation:
    """One answer.

    `tokens` are the generated ids (with the one that ended the answer, if any did), `text` is what
    they say. Times are wall clock: `time_to_first_token_s` from the call until the first token was
    known, `tokens_per_s` over the steps that made tokens.
    """

    prompt_tokens: list[int]
    tokens: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    time_to_first_token_s: float
    tokens_per_s: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class Generator:
    """Generates from a prompt, one token per step. Errors are QnnError.

    Args:
        model: keeps at most `max_context` positions.
        tokenizer: the model's.
        max_context: positions of the cache.
        prefill: ways to read several tokens of a prompt at once, by their number; they share
            `model`'s cache.
    """

    def __init__(
        self,
        model: CausalModel,
        tokenizer: Tokenizer,
        *,
        max_context: int,
        prefill: Mapping[int, Step] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.max_context = max_context
        self.prefill = dict(sorted((prefill or {}).items(), reverse=True))

    @torch.no_grad()
    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int | None = None,
        temperature: float = 0.0,
        seed: int | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generation:
        """Continues `prompt` (text or token ids) from an empty context.

        Stops at an end token, after `max_new_tokens`, or where the context is full if that is
        None. `temperature` 0 always takes the likeliest token; above, tokens are drawn, with `seed`
        the same ones each time. `on_text` gets the text in pieces as it comes.
        """
        start = time.perf_counter()
        if not 0 <= temperature < float("inf"):
            raise QnnError(f"temperature must be a number from 0 up, not {temperature}")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        limit = self._limit(len(ids), max_new_tokens)
        draw = torch.Generator().manual_seed(seed) if seed is not None else None

        tokens: list[int] = []
        pieces: list[str] = []
        stream = self.tokenizer.stream()

        def emit(piece: str) -> None:
            pieces.append(piece)
            if piece and on_text is not None:
                on_text(piece)

        self.model.reset_state()
        self._read(ids[:-1])
        token, generating, first = ids[-1], time.perf_counter(), 0.0
        for position in range(len(ids) - 1, len(ids) - 1 + limit):
            token = _sample(self._step(token, position), temperature, draw)
            tokens.append(token)
            first = first or time.perf_counter()
            if token in self.tokenizer.eos_ids:
                break
            emit(stream.push(token))
        emit(stream.flush())
        return Generation(
            prompt_tokens=ids,
            tokens=tokens,
            text="".join(pieces),
            finish_reason="stop" if token in self.tokenizer.eos_ids else "length",
            time_to_first_token_s=first - start,
            tokens_per_s=len(tokens) / (time.perf_counter() - generating),
        )

    def _limit(self, prompt: int, max_new_tokens: int | None) -> int:
        """How many tokens to generate at most. The last one is never fed back."""
        if prompt == 0:
            raise QnnError("the prompt has no tokens")
        room = self.max_context + 1 - prompt
        if room < 1:
            raise QnnError(
                f"the prompt has {prompt} tokens, the program's context holds {self.max_context}: "
                "shorten it, or export with a larger --max-seq-len"
            )
        if max_new_tokens is None:
            return room
        if max_new_tokens < 1:
            raise QnnError(f"max_new_tokens must be 1 or more, not {max_new_tokens}")
        if max_new_tokens > room:
            raise QnnError(
                f"{prompt} prompt tokens and {max_new_tokens} new ones exceed the program's "
                f"context of {self.max_context}: ask for at most {room}, or export with a larger "
                "--max-seq-len"
            )
        return max_new_tokens

    def _read(self, ids: list[int]) -> None:
        """Fills an empty cache, with the largest chunks that fit."""
        position = 0
        for size, chunk in self.prefill.items():
            while size <= len(ids) - position:
                tokens = torch.tensor([ids[position : position + size]])
                chunk(tokens, torch.tensor([position]))
                position += size
        for rest in range(position, len(ids)):
            self._step(ids[rest], rest)

    def _step(self, token: int, position: int) -> Tensor:
        """Logits float32[vocab] after `token` at `position`."""
        logits = self.model(torch.tensor([[token]]), torch.tensor([position]))
        return logits.view(-1)


def _sample(logits: Tensor, temperature: float, draw: torch.Generator | None) -> int:
    if not torch.isfinite(logits).all():
        raise QnnError("the model's logits are not finite: its numbers left the range of float16")
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial((logits / temperature).softmax(-1), 1, generator=draw))


def open_program(program: Path, *, qnn_libraries: str | None = None) -> Generator:
    """A generator over a `.pte` that `llm export` wrote and the tokenizer beside it.

    Raises QnnError if either is missing or is no language model.
    """
    import executorch_qnn as qnn

    session = qnn.load(str(program), qnn_libraries=qnn_libraries)
    constants = read_constants(session)
    if "get_max_context_len" not in constants:
        raise QnnError(f"{program} is no language model: it has no get_max_context_len")
    tokenizer = Tokenizer.load(program)
    # The program's own word on what ends an answer counts.
    eos_ids = frozenset(constants.get("get_eos_ids", tokenizer.eos_ids))
    return Generator(
        session,
        replace(tokenizer, eos_ids=eos_ids),
        max_context=constants["get_max_context_len"],
        prefill={
            int(name.removeprefix("prefill_")): partial(session.run, name)
            for name in session.methods
            if name.startswith("prefill_")
        },
    )


def read_constants(session: Session) -> dict[str, Any]:
    """What a program says about itself, by name; `get_eos_ids` is a list, all others one value."""
    values: dict[str, Any] = {}
    for name in session.methods:
        if name.startswith(("get_", "use_", "enable_")):
            value = session.run(name)
            several = list(value) if isinstance(value, tuple) else [value]
            values[name] = several if name == "get_eos_ids" else several[0]
    return values
