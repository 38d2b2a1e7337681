"""Divides the turns of an episode into steps. A step is a span of tokens that gets one score from a process reward
model.

Steps are found in the texts of single tokens, without tokenising anything again. In UTF-8 a newline is one byte. So the
text of a token shows the token's newlines, even if the token also has a part of a character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.imports import imported
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.text import reason_of
from asyncrl.types import Role, Step, Turn

Split = str | Callable[[Sequence[str]], Sequence[int]]
"""`turn`, `paragraph`, `line`, or a user's function.

The function gets the texts of a turn's tokens, without the stop token. It returns the indices of the tokens that begin
a step; the first token always begins a step. A token with a part of a character has the text U+FFFD.
"""

_NEWLINES = {"line": 1, "paragraph": 2}
"""The number of newlines that end a step. There may be blanks between them."""


def find_split(name: str) -> Split:
    """The split that `actor.step_split` names. Raises ConfigError: the name is unknown, or is not the dotted path of a
    function."""
    if name in ("turn", *_NEWLINES):
        return name
    setting = f"actor.step_split={name}"
    if "." not in name:
        raise ConfigError(f"{setting}: use turn, {', '.join(reversed(_NEWLINES))}, or the dotted path of a function")
    function = imported(name, setting)
    if not callable(function):
        raise ConfigError(f"{setting} is not a function; it must take the texts of a turn's tokens")
    split: Split = function
    return split


def split_steps(
    split: Split, tokens: NDArray[np.int32], turns: Sequence[Turn], piece: Callable[[int], str]
) -> tuple[Step, ...]:
    """Return the steps of all assistant turns. The steps cover these turns completely.

    The newlines after a step, and the stop token, belong to the step before them. `piece` returns the text of one
    token. Raises InvariantError: the user's function failed, or did not return ascending indices.
    """
    spans = [turn for turn in turns if turn.role is Role.ASSISTANT]
    if split == "turn":
        return tuple(Step(turn.start, turn.end) for turn in spans)
    return tuple(step for turn in spans for step in _split_turn(turn, tokens, piece, split))


def _split_turn(turn: Turn, tokens: NDArray[np.int32], piece: Callable[[int], str], split: Split) -> list[Step]:
    text_end = turn.end - 1 if turn.finish_reason == "stop" else turn.end
    pieces = [piece(int(token)) for token in tokens[turn.start : text_end]]
    begins = _by_newlines(pieces, _NEWLINES[split]) if isinstance(split, str) else _by_function(pieces, split)
    starts = [turn.start, *(turn.start + index for index in begins if index > 0)]
    return [Step(start, end) for start, end in zip(starts, [*starts[1:], turn.end], strict=True)]


def _by_function(pieces: Sequence[str], function: Callable[[Sequence[str]], Sequence[int]]) -> list[int]:
    try:
        begins = [int(index) for index in function([*pieces])]
    except Exception as error:
        raise InvariantError(f"the function of actor.step_split failed: {reason_of(error)}") from error
    if sorted(set(begins)) != begins or not all(0 <= index < max(1, len(pieces)) for index in begins):
        raise InvariantError(
            f"the function of actor.step_split gave {begins!r:.200} for {len(pieces)} tokens; it must give "
            "ascending indices of tokens"
        )
    return begins


def _by_newlines(pieces: Sequence[str], needed: int) -> list[int]:
    begins = []
    newlines, has_text, ended = 0, False, False
    for index, text in enumerate(pieces):
        if ended and text.strip():
            begins.append(index)
            newlines, has_text, ended = 0, False, False
        for character in text:
            if character == "\n":
                newlines += 1
                ended = ended or (has_text and newlines >= needed)
            elif not character.isspace():
                newlines, has_text = 0, True
    return begins
