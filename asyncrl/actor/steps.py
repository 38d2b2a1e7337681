"""Where the steps of an episode lie, in policy tokens: the spans that each get one process score.

Nothing is tokenised again: the tokens are read one by one. A newline is a character of its own in UTF-8, so that a
token's own text shows its newlines even where it holds only a part of some other character.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from asyncrl.types import Role, Step, Turn

_NEWLINES = {"line": 1, "paragraph": 2}
"""Newlines with only blanks between them that end a step."""


def split_steps(
    split: str, tokens: NDArray[np.int32], turns: Sequence[Turn], piece: Callable[[int], str]
) -> tuple[Step, ...]:
    """The steps of all assistant turns: whole turns (`turn`), paragraphs (`paragraph`) or lines (`line`) of them.

    `piece` gives the text of one token. The steps of a turn cover it: the newlines that end a step, and the stop token,
    belong to the step before them.
    """
    spans = [turn for turn in turns if turn.role is Role.ASSISTANT]
    if split == "turn":
        return tuple(Step(turn.start, turn.end) for turn in spans)
    return tuple(step for turn in spans for step in _split_turn(turn, tokens, piece, _NEWLINES[split]))


def _split_turn(turn: Turn, tokens: NDArray[np.int32], piece: Callable[[int], str], needed: int) -> list[Step]:
    starts = [turn.start]
    text_end = turn.end - 1 if turn.finish_reason == "stop" else turn.end
    newlines, has_text, ended = 0, False, False
    for index in range(turn.start, text_end):
        text = piece(int(tokens[index]))
        if ended and text.strip():
            starts.append(index)
            newlines, has_text, ended = 0, False, False
        for character in text:
            if character == "\n":
                newlines += 1
                ended = ended or (has_text and newlines >= needed)
            elif not character.isspace():
                newlines, has_text = 0, True
    return [Step(start, end) for start, end in zip(starts, [*starts[1:], turn.end], strict=True)]
