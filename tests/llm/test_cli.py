# SPDX-License-Identifier: BSD-3-Clause
"""`llm export` and `llm generate` as a user types them, without the compiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executorch_qnn import libraries
from executorch_qnn.cli import main
from executorch_qnn.llm import generate
from executorch_qnn.llm.generate import Generator
from executorch_qnn.llm.tokenizer import Tokenizer

from .conftest import random_decoder, tiny_config
from .files import byte_tokenizer, write_hf

TOKENIZER = Tokenizer(
    byte_tokenizer(), None, frozenset(), "<{{ messages[0]['role'] }}>{{ messages[0]['content'] }}"
)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that loads as a tiny eager decoder with a context of 16."""
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size))
    opened: list[Any] = []

    def open_program(file: Path, *, qnn_libraries: str) -> Generator:
        opened.append((file, qnn_libraries))
        return Generator(decoder, TOKENIZER, max_context=16)

    monkeypatch.setattr(generate, "open_program", open_program)
    monkeypatch.setattr(libraries, "find", lambda path=None: Path(path or "/found"))
    file = tmp_path / "model.pte"
    file.touch()
    return file


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_text_goes_to_stdout_and_figures_to_stderr(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(
        capsys, "llm", "generate", program, "--prompt", "abc", "--max-new-tokens", 5
    )
    decoder = random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size))
    want = Generator(decoder, TOKENIZER, max_context=16).generate("abc", max_new_tokens=5)
    assert code == 0
    assert out == want.text + "\n"
    assert "3 prompt tokens" in err
    assert "tokens/s" in err


def test_json_is_one_document(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "llm", "generate", program, "--prompt", "abc", "--json")
    document = json.loads(out)
    assert code == 0
    assert document["prompt_tokens"] == TOKENIZER.encode("abc")
    assert len(document["tokens"]) == 14  # as many as the context holds
    assert document["text"] == TOKENIZER.decode(document["tokens"])


def test_chat_applies_the_template(program: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "llm", "generate", program, "--chat", "--prompt", "hi", "--json")
    assert json.loads(out)["prompt_tokens"] == TOKENIZER.encode("<user>hi")


def test_drawn_text_repeats_with_its_seed(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--prompt", "abc", "--temperature", "5", "--json", "--seed"]
    texts = [
        json.loads(run(capsys, "llm", "generate", program, *options, seed)[1])["tokens"]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_prompt_longer_than_the_context_fails_with_one(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "llm", "generate", program, "--prompt", "x" * 17)
    assert (code, out) == (1, "")
    assert "context holds 16" in err


def test_missing_program_fails_with_one(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "llm", "generate", "nowhere.pte", "--prompt", "x")
    assert code == 1
    assert "nowhere.pte" in err


@pytest.mark.parametrize(
    "arguments",
    [
        ["llm"],
        ["llm", "export", "-o", "x.pte"],
        ["llm", "export", "--model", "m"],
        ["llm", "export", "--model", "m", "-o", "x.pte", "--layers", "0"],
        ["llm", "export", "--model", "m", "-o", "x.pte", "--prefill", "8,"],
        ["llm", "generate", "x.pte"],
        ["llm", "generate", "x.pte", "--prompt", "x", "--temperature", "-1"],
        ["llm", "generate", "x.pte", "--prompt", "x", "--max-new-tokens", "no"],
    ],
    ids=" ".join,
)
def test_bad_usage_exits_with_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "_positive" not in capsys.readouterr().err


def test_unknown_place_to_run_is_bad_usage(
    program: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "llm", "generate", program, "--prompt", "x", "--on", "moon")[0] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "no-such-model"], "smollm2-135m"),
        (["--prefill", "8,1"], "prefill sizes"),
        (["--prefill", "1024"], "between 2 and 512"),
        (["--quantize", "7a3w"], "7a3w"),
        (["--layers", "9"], "2 layers, not 9"),
        (["--max-seq-len", "65"], "1 to 64"),
    ],
)
def test_export_that_cannot_work_fails_and_writes_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(libraries, "find", lambda path=None: Path("/found"))
    model = tmp_path / "model"
    model.mkdir()
    write_hf(model, random_decoder(tiny_config(vocab_size=TOKENIZER.vocab_size)))
    code, out, err = run(
        capsys, "llm", "export", "--model", model, "-o", tmp_path / "out.pte", *options
    )
    assert (code, out) == (1, "")
    assert message in err
    assert [f.name for f in tmp_path.iterdir()] == ["model"]
