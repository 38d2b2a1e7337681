from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.dashboard.pieces import TokenSpan, token_pieces, window_pieces
from asyncrl.runs.decoding import Decode

WORDS = ("<unk>", "▁Hello", "▁", "Hello", "▁world", "wor", "ld", ",", "\N{REPLACEMENT CHARACTER}", "é", "\n")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Two ways in which tokenizers make text: of bytes, and of words with bytes for all else, as Llama 2 does."""
    if kind == "bytes":
        backend = build_tokenizer().backend_tokenizer
        assert isinstance(backend, Tokenizer)
        return backend
    vocabulary = {word: number for number, word in enumerate([*WORDS, *(f"<0x{byte:02X}>" for byte in range(256))])}
    found = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


def decoder(kind: str) -> Decode:
    return lambda ids: str(tokenizer(kind).decode(ids, skip_special_tokens=False))


KINDS = ("bytes", "words")
# A few ids beyond the vocabulary: a model may have more outputs than its tokenizer has tokens.
IDS = {kind: st.lists(st.integers(0, 275), max_size=40) for kind in KINDS}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_the_pieces_joined_are_the_text(kind: str, data: st.DataObject) -> None:
    ids = data.draw(IDS[kind])
    pieces = token_pieces(ids, decoder(kind))
    assert len(pieces) == len(ids)
    assert "".join(pieces) == decoder(kind)(ids)


WIDE = st.text(st.characters(codec="utf-8", min_codepoint=0x80), max_size=30)


@given(text=WIDE)
def test_a_character_of_several_tokens_stands_at_the_first(text: str) -> None:
    ids = tokenizer("bytes").encode(text, add_special_tokens=False).ids
    pieces = token_pieces(ids, decoder("bytes"))
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_characters_are_shown_one_by_one() -> None:
    start = next(id for id in range(256) if decoder("bytes")([id]) == "\N{REPLACEMENT CHARACTER}")
    assert token_pieces([start] * 5, decoder("bytes")) == ["\N{REPLACEMENT CHARACTER}"] * 5


def test_words_keep_the_blank_that_their_tokens_have_behind_the_first() -> None:
    ids = [1, 4, 7, 4]
    assert token_pieces(ids, decoder("words")) == ["Hello", " world", ",", " world"]


@given(text=WIDE, size=st.integers(1, 10))
def test_windows_one_behind_the_other_are_the_text(text: str, size: int) -> None:
    ids = tokenizer("bytes").encode(text, add_special_tokens=False).ids
    windows = [TokenSpan(start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
    assert "".join(piece for window in windows for piece in window_pieces(ids, window, decoder("bytes"))) == text


def test_a_decoder_that_changes_what_it_wrote_still_loses_no_text() -> None:
    def reversed_text(ids: list[int]) -> str:
        return "".join(chr(97 + id) for id in reversed(ids))

    pieces = token_pieces([0, 1, 2, 3], reversed_text)
    assert "".join(pieces) == "dcba"
