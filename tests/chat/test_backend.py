"""Texts are encoded and decoded as transformers does it, for tokenizers of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from asyncrl.chat.backend import ByteLevelDecoder, decoder_of, encoder_of
from asyncrl.commands.demo.tokenizer import build_tokenizer
from tests.episode.fakes import byte_level, make_tokenizer
from tests.templates.families import FAMILIES
from tests.templates.families import tokenizer as family

TEXTS = ("", "two  words\n\n", "<|im_end|>\n<|im_start|>user", "Käse 日本 \U0001f600", "\x00\x7f\xa0\xad", "a" * 3000)


def with_added_tokens() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer whose added tokens have characters that are no bytes, such as a blank."""
    backend = byte_level()
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<two words>", "日本", "é\n", "Ġx")])
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def tokenizers() -> dict[str, Any]:
    return {"demo": build_tokenizer(), "added": with_added_tokens(), **{name: family(name) for name in FAMILIES}}


@pytest.mark.parametrize("name", ["demo", "added", *FAMILIES])
def test_texts_are_encoded_and_decoded_as_by_transformers(name: str) -> None:
    tokenizer = tokenizers()[name]
    encode, decode, rng = encoder_of(tokenizer), decoder_of(tokenizer), np.random.default_rng(0)
    for text in TEXTS:
        assert encode(text) == list(tokenizer.encode(text, add_special_tokens=False))
    # Random tokens have parts of characters, and bytes that are no UTF-8 at all. The last id does not exist.
    for length in (0, 1, 2, 3, 4, 300):
        for tokens in rng.integers(0, len(tokenizer) + 1, (20, length)).tolist():
            expected = tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            assert decode(tokens) == expected


def test_tokens_of_bytes_are_joined_here() -> None:
    assert isinstance(decoder_of(make_tokenizer()), ByteLevelDecoder)


def test_options_of_earlier_calls_do_not_last() -> None:
    tokenizer = make_tokenizer()
    encode, expected = encoder_of(tokenizer), tokenizer.encode("<|im_end|> and on", add_special_tokens=False)
    tokenizer.encode("a text", split_special_tokens=True, truncation=True, max_length=2, padding="max_length")
    assert encode("<|im_end|> and on") == expected
    assert encode("<|im_end|> and on") == expected


def test_a_tokenizer_with_methods_of_its_own_keeps_them() -> None:
    class Own(PreTrainedTokenizerFast):
        def _decode(self, *tokens: Any, **options: Any) -> str:
            return "its own text"

        def _encode_plus(self, *texts: Any, **options: Any) -> Any:
            return {"input_ids": [7]}

    tokenizer = Own(tokenizer_object=byte_level())
    assert decoder_of(tokenizer)([1, 2]) == "its own text"
    assert encoder_of(tokenizer)("a text") == [7]
