"""Splits a text into the texts of its tokens. Joined, they are the whole text.

If the bytes of a character are spread over several tokens, the character belongs to the first of them, and the others
have no text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncrl.runs.decoding import Decode

CONTEXT = 4
"""The number of tokens before a token that are decoded together with it. A character has at most four bytes, and some
tokenizers drop the blank before the first token that they decode."""
LONGEST = 8
"""The maximum number of tokens into which one character is split."""
MOST_CHARACTERS = 4096
"""The maximum length of the text in which the text of a token is looked for, in characters. Text that belongs to no
token is added to the last token."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"


def token_pieces(ids: Sequence[int], decode: Decode) -> list[str]:
    """Split the text of tokens into the text of each token. Joined they are `decode(ids)` for any tokenizer: text that
    belongs to no known token is added to the last one.
    """
    text = decode(list(ids))
    pieces, position, token = [""] * len(ids), 0, 0
    alone: dict[int, str] = {}
    while token < len(ids):
        piece, end = alone.setdefault(ids[token], decode([ids[token]])), token + 1
        if not piece or UNFINISHED in piece or not text.startswith(piece, position):
            piece, end = _among_neighbours(ids, token, text[position : position + MOST_CHARACTERS], decode)
        pieces[token] = piece
        position, token = position + len(piece), end
    if pieces:
        pieces[-1] += text[position:]
    return pieces


def _among_neighbours(ids: Sequence[int], token: int, rest: str, decode: Decode) -> tuple[str, int]:
    """The text of a token, and the index of the next token to split. If the following tokens complete a character that
    begins in this token, its text has the whole character. `rest` is the text from the token on."""
    start = max(0, token - CONTEXT)
    before = decode(list(ids[start:token]))
    for end in range(token + 1, min(token + LONGEST, len(ids)) + 1):
        after = decode(list(ids[start:end]))
        # An incomplete character is decoded differently from the complete one.
        if len(after) >= len(before) and (before + rest).startswith(after):
            return after[len(before) :], end
    return (UNFINISHED if rest.startswith(UNFINISHED) else ""), token + 1


class TokenSpan(NamedTuple):
    """Tokens [start, end)."""

    start: int
    end: int


def window_pieces(ids: Sequence[int], shown: TokenSpan, decode: Decode) -> list[str]:
    """The texts that the tokens in `shown` have among all of `ids`, at a cost that grows with `shown` alone."""
    start, end = max(0, shown.start - LONGEST), min(len(ids), shown.end + LONGEST)
    return token_pieces(ids[start:end], decode)[shown.start - start : shown.end - start]
