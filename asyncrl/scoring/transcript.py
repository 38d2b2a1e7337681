"""Trajectories as text: the answer that rules read, and the transcript that process models read.

Text is decoded from the policy's tokens and never mapped back onto them: the k-th step of a transcript is the k-th step
of its trajectory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from asyncrl.types import Role, Trajectory


class Decoder(Protocol):
    """The policy's tokenizer, as far as it is needed here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a transcript: a step to score, or context such as the prompt and tool results."""

    text: str
    is_step: bool


Transcript = Sequence[Segment]


def answer_text(trajectory: Trajectory, tokenizer: Decoder) -> str:
    """The last assistant turn without special tokens; empty where it called a tool, for then there is no answer."""
    last = next(turn for turn in reversed(trajectory.turns) if turn.role is Role.ASSISTANT)
    if last.tool_calls:
        return ""
    return _text(trajectory, last.start, last.end, tokenizer, skip_special=True)


def response_start(trajectory: Trajectory) -> int:
    """The first token behind the prompt."""
    return next(turn.start for turn in trajectory.turns if turn.role is Role.ASSISTANT)


def response_text(trajectory: Trajectory, tokenizer: Decoder) -> str:
    """All that follows the prompt, tool results included, without special tokens."""
    return _text(trajectory, response_start(trajectory), len(trajectory), tokenizer, skip_special=True)


def transcript(trajectory: Trajectory, tokenizer: Decoder) -> list[Segment]:
    """The text up to the end of the last step, special tokens included, cut at the bounds of the steps."""
    return [
        Segment(_text(trajectory, start, end, tokenizer, skip_special=False), is_step)
        for start, end, is_step in _spans(trajectory)
    ]


def _text(trajectory: Trajectory, start: int, end: int, tokenizer: Decoder, skip_special: bool) -> str:
    tokens = trajectory.tokens[start:end].tolist()
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


def _spans(trajectory: Trajectory) -> Iterator[tuple[int, int, bool]]:
    position = 0
    for step in trajectory.steps:
        if step.start > position:
            yield position, step.start, False
        yield step.start, step.end, True
        position = step.end
