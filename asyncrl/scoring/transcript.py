"""Turns trajectories into the text that reward models read, split at the bounds of the steps.

An episode whose agent rewrote its history has one transcript for each branch. The text of a step is decoded from its
tokens. Scores are assigned to steps by number, never by a search for the text: the k-th step of the transcripts,
counted through all branches, is the k-th step of the trajectory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Protocol

from asyncrl.types import Task, Trajectory

_ROLE_HEADER = re.compile(r"\A(system|user|assistant|tool|ipython|function|model)(\n|\Z)")
"""The role that a chat template writes after the special token that begins a turn."""


class Decoder(Protocol):
    """The part of the policy's tokenizer that scoring needs."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: Any) -> Any: ...


def decode(tokens: list[int], tokenizer: Decoder, skip_special: bool) -> str:
    """The exact text of the tokens, without cleaning up spaces."""
    return str(tokenizer.decode(tokens, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


def special_tokens(tokens: list[int], tokenizer: Decoder) -> set[int]:
    """The special tokens among `tokens`."""
    return {token for token in set(tokens) if not decode([token], tokenizer, skip_special=True)}


@dataclass(frozen=True, slots=True)
class Passage:
    """A piece of a transcript: a step to score, or context. Context before the first step is the prompt. Later context
    is what others said, such as the results of tools.

    - `text` includes the special tokens of the policy's template.
    - `bare` is the text without them, for reward models with their own template. If it is None, `text` has no special
      tokens.
    - `runs` splits the text into stretches of special tokens (True) and of ordinary tokens (False). If ordinary tokens
      spell out a special token, their stretch is still ordinary.
    """

    text: str
    is_step: bool
    bare: str | None = None
    runs: Sequence[tuple[bool, str]] = field(default=(), compare=False)

    @property
    def plain(self) -> str:
        """The text without the policy's special tokens."""
        return self.text if self.bare is None else self.bare


Transcript = Sequence[Passage]


def transcripts(trajectory: Trajectory, tokenizer: Decoder, task: Task) -> list[Transcript]:
    """One transcript for each branch, up to the end of the branch's last step.

    With one branch, the bare prompt is the text of the task's messages, without system messages. If the messages have
    several roles, each message begins with its role. With several branches, the bare prompt is decoded from each
    branch's own tokens. Bare tool results have no role headers.
    """
    branches = trajectory.branches
    problem = _problem(task) if len(branches) == 1 else None
    return [list(_passages(trajectory, span, tokenizer, problem)) for span in branches]


def _passages(
    trajectory: Trajectory, span: tuple[int, int], tokenizer: Decoder, problem: str | None
) -> Iterator[Passage]:
    position, end = span
    for step in trajectory.steps:
        if not position <= step.start < end:
            continue
        if step.start > position:
            bare = problem if position == span[0] else None
            yield _passage(trajectory.tokens[position : step.start].tolist(), tokenizer, False, bare)
        yield _passage(trajectory.tokens[step.start : step.end].tolist(), tokenizer, True, None)
        position = step.end


def _passage(tokens: list[int], tokenizer: Decoder, is_step: bool, bare: str | None) -> Passage:
    runs = _runs(tokens, tokenizer)
    if bare is None:
        bare = decode(tokens, tokenizer, skip_special=True) if is_step else _without_template(runs)
    return Passage(decode(tokens, tokenizer, skip_special=False), is_step, bare, runs)


def without_template(tokens: list[int], tokenizer: Decoder) -> str:
    """The text of context without the chat template's special tokens and role headers."""
    return _without_template(_runs(tokens, tokenizer))


def _runs(tokens: list[int], tokenizer: Decoder) -> list[tuple[bool, str]]:
    """The stretches of special tokens (True) and of ordinary tokens (False), each as text."""
    stretches = groupby(tokens, special_tokens(tokens, tokenizer).__contains__)
    return [(is_special, decode(list(piece), tokenizer, skip_special=False)) for is_special, piece in stretches]


def _problem(task: Task) -> str:
    messages = [message for message in task.messages if message["role"] != "system"] or task.messages
    several = len({message["role"] for message in messages}) > 1
    return "\n\n".join(f"{each['role']}: " * several + _content(each.get("content")) for each in messages)


def _content(content: Any) -> str:
    if isinstance(content, str):
        return content
    # In data from tables, a part that is an image has a `text` too, which is None.
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content or ())


def _without_template(runs: Sequence[tuple[bool, str]]) -> str:
    """The text without special tokens, role headers and system messages."""
    texts, role = "", ""
    for is_special, text in runs:
        if is_special:
            continue
        if header := _ROLE_HEADER.match(text):
            role, text = header[1], text[header.end() :]
        texts += text if role != "system" else ""
    return texts.strip()
