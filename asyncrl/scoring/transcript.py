"""Trajectories as text: the answer that rules read, and the transcripts that process models read.

An episode whose agent rewrote its history has a transcript for each branch. Its answer and response are those of the
last one, in which the policy spoke last.

Text is decoded from the policy's tokens and never mapped back onto them: the k-th step of a transcript is the k-th step
of its trajectory, counted through the transcripts of all branches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from asyncrl.scoring.thoughts import after_thoughts, ends_open, has_tags, without_special
from asyncrl.types import Finish, Role, Task, Trajectory

_ROLE_HEADER = re.compile(r"\A(system|user|assistant|tool|ipython|function|model)(\n|\Z)")
"""What a chat template writes behind a special token to say whose turn it is."""


_GENERATION_PROMPT = 64
"""Tokens before an assistant turn among which the template's own beginning of a thought is looked for."""


class Decoder(Protocol):
    """The policy's tokenizer, as far as it is needed here."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a transcript: a step to score, or context. Context before the first step is the prompt, later context
    is tool results.

    `text` is as the policy's template has it, special tokens included. `bare` is what it says without them: for a model
    that knows another template. None says that the text has none. `runs` are its stretches of special tokens (True)
    and of other ones: what looks like a special token in one of these was written in letters.
    """

    text: str
    is_step: bool
    bare: str | None = None
    runs: Sequence[tuple[bool, str]] = field(default=(), compare=False)

    @property
    def plain(self) -> str:
        """The text without the policy's special tokens."""
        return self.text if self.bare is None else self.bare


Transcript = Sequence[Segment]


def answer_texts(trajectory: Trajectory, tokenizer: Decoder, strip_thoughts: bool = True) -> tuple[str, str]:
    """The answer, and the last assistant turn that it is part of: the answer is what follows the turn's thoughts, with
    `strip_thoughts`, else the whole turn. Both are without special tokens, apart from those around thoughts, and empty
    where the episode was cut at its call of a tool."""
    last = next(turn for turn in reversed(trajectory.turns) if turn.role is Role.ASSISTANT)
    if last.tool_calls and trajectory.finish is Finish.TRUNCATED:
        return "", ""
    turn = _with_thoughts(trajectory.tokens[last.start : last.end].tolist(), tokenizer)
    if not strip_thoughts:
        return turn, turn
    before = trajectory.tokens[max(0, last.start - _GENERATION_PROMPT) : last.start].tolist()
    return after_thoughts(turn, ends_open(_decode(before, tokenizer, skip_special=False))), turn


def prompt_and_response(trajectory: Trajectory) -> tuple[int, int]:
    """Where in the tokens the prompt of the last branch begins, and where what follows it does."""
    start, _ = trajectory.branches[-1]
    return start, next(turn.start for turn in trajectory.turns if turn.role is Role.ASSISTANT and turn.start >= start)


def response_text(trajectory: Trajectory, tokenizer: Decoder) -> str:
    """All that follows the prompt, tool results included, without special tokens."""
    _, start = prompt_and_response(trajectory)
    return _decode(trajectory.tokens[start:].tolist(), tokenizer, skip_special=True)


def transcripts(trajectory: Trajectory, tokenizer: Decoder, task: Task) -> list[Transcript]:
    """For each branch the text up to the end of its last step, cut at the bounds of the steps.

    Bare, the prompt is what the task's messages say without the system's, each behind its role where several speak; of
    several branches each has a prompt of its own. Tool results stand without the template's role headers.
    """
    branches = trajectory.branches
    problem = _problem(task) if len(branches) == 1 else None
    return [list(_segments(trajectory, span, tokenizer, problem)) for span in branches]


def _segments(
    trajectory: Trajectory, span: tuple[int, int], tokenizer: Decoder, problem: str | None
) -> Iterator[Segment]:
    start, end = span
    position = start
    for step in trajectory.steps:
        if not position <= step.start < end:
            continue
        if step.start > position:
            tokens = trajectory.tokens[position : step.start].tolist()
            told = problem if position == start else None
            bare = _without_template(tokens, tokenizer) if told is None else told
            yield _segment(tokens, tokenizer, False, bare)
        tokens = trajectory.tokens[step.start : step.end].tolist()
        bare = _decode(tokens, tokenizer, skip_special=True)
        yield _segment(tokens, tokenizer, True, bare)
        position = step.end


def _segment(tokens: list[int], tokenizer: Decoder, is_step: bool, bare: str) -> Segment:
    runs = [
        (is_special, _decode(piece, tokenizer, skip_special=False)) for is_special, piece in _runs(tokens, tokenizer)
    ]
    return Segment(_decode(tokens, tokenizer, skip_special=False), is_step, bare, runs)


def _runs(tokens: list[int], tokenizer: Decoder) -> Iterator[tuple[bool, list[int]]]:
    """The stretches of special and of other tokens."""
    special = {token for token in set(tokens) if not _decode([token], tokenizer, skip_special=True)}
    for is_special, piece in groupby(tokens, special.__contains__):
        yield is_special, list(piece)


def _problem(task: Task) -> str:
    said = [message for message in task.messages if message["role"] != "system"] or task.messages
    several = len({message["role"] for message in said}) > 1
    return "\n\n".join(f"{each['role']}: " * several + _content(each["content"]) for each in said)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or ())


def _without_template(tokens: list[int], tokenizer: Decoder) -> str:
    """What is said in the tokens, but not by the system."""
    said, role = "", ""
    for is_special, piece in _runs(tokens, tokenizer):
        text = "" if is_special else _decode(piece, tokenizer, skip_special=True)
        if header := _ROLE_HEADER.match(text):
            role, text = header[1], text[header.end() :]
        said += text if role != "system" else ""
    return said.strip()


def _with_thoughts(tokens: list[int], tokenizer: Decoder) -> str:
    """The text without special tokens, except where they are thought tags."""
    plain = _decode(tokens, tokenizer, skip_special=True)
    if not has_tags(text := _decode(tokens, tokenizer, skip_special=False)):
        return plain
    special = [token for token in set(tokens) if not _decode([token], tokenizer, skip_special=True)]
    return without_special(text, {_decode([token], tokenizer, skip_special=False) for token in special})


def _decode(tokens: list[int], tokenizer: Decoder, skip_special: bool) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))
