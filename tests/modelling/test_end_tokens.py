"""A model's `generation_config.json` and actor.end_tokens name further tokens that end a turn."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from asyncrl.chat.from_config import open_chat
from asyncrl.config.schema import ActorConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.end_tokens import end_tokens
from tests.episode.fakes import END, QWEN3, make_tokenizer

TOKENIZER = make_tokenizer(QWEN3)
TEXT_END, TURN_END, START = TOKENIZER.convert_tokens_to_ids(["<|endoftext|>", END, "<|im_start|>"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    TOKENIZER.save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def listing(folder: Path, ends: Any) -> ModelConfig:
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "eos_token_id": ends}))
    return ModelConfig(str(folder))


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        (TEXT_END, (TEXT_END,)),
        ([TURN_END, TEXT_END], (TURN_END, TEXT_END)),
        ([TEXT_END, TEXT_END], (TEXT_END,)),
        ([], ()),
        (None, ()),
    ],
)
def test_the_file_has_one_id_or_several(folder: Path, ends: Any, expected: tuple[int, ...]) -> None:
    assert end_tokens(listing(folder, ends), [], TOKENIZER) == expected


def test_a_model_without_the_file_has_no_further_end_tokens(folder: Path) -> None:
    assert end_tokens(ModelConfig(str(folder)), [], TOKENIZER) == ()


def test_a_file_without_end_tokens_has_none(folder: Path) -> None:
    (folder / "generation_config.json").write_text('{"temperature": 0.6}')
    assert end_tokens(ModelConfig(str(folder)), [], TOKENIZER) == ()


def test_an_id_that_is_a_word_to_the_tokenizer_ends_no_turn_and_is_told(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert end_tokens(listing(folder, [2, TEXT_END]), [], TOKENIZER) == (TEXT_END,)
    assert "[2]. They are ordinary words" in caplog.text


@pytest.mark.parametrize("text", ['{"eos_token_id": "</s>"}', '{"eos_token_id": [true]}', "[1]", "{", '"\udcff"'])
def test_a_file_that_cannot_be_read_is_refused(folder: Path, text: str) -> None:
    (folder / "generation_config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        end_tokens(ModelConfig(str(folder)), [], TOKENIZER)


def test_the_key_adds_tokens_and_refuses_what_is_none(folder: Path) -> None:
    model = listing(folder, TEXT_END)
    assert end_tokens(model, ["<|im_start|>", "<|endoftext|>"], TOKENIZER) == (TEXT_END, START)
    with pytest.raises(ConfigError, match=r"actor\.end_tokens: '<\|eot\|>', 'end': .*<\|im_start\|>"):
        end_tokens(model, ["<|eot|>", "<|im_start|>", "end"], TOKENIZER)


@pytest.fixture
def url(folder: Path) -> Iterator[str]:
    """The folder with a list of end tokens in a remote store."""
    listing(folder, [TURN_END, TEXT_END])
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.put(str(folder), "/bucket/ends", recursive=True)
    yield "memory://bucket/ends"
    system.store.clear()


def test_the_policys_chat_ends_turns_with_all_of_them(folder: Path, url: str, tmp_path: Path) -> None:
    actor = ActorConfig(end_tokens=["<|im_start|>"])
    for model in (ModelConfig(str(folder)), ModelConfig(url, copies=str(tmp_path / "copies"))):
        assert open_chat(TrainConfig(model=model, actor=actor)).stop_ids == (TURN_END, TEXT_END, START)
