"""Turns trajectories into the text that rules read: the answer without the thoughts before it, and the whole response.

The answer is the text after the last closed thought. Thoughts are recognised by the tags of several model families;
some tags are special tokens. If the chat template itself opens the thought, in the generation prompt, the model writes
only the closing tag.

If an agent rewrote its history, the episode has several token sequences, called branches. Only the last one is read.
"""

from __future__ import annotations

import re

from asyncrl.scoring.rules.base import RuleInput
from asyncrl.scoring.transcript import Decoder, decode, special_tokens, without_template
from asyncrl.types import Finish, Role, Task, Trajectory

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
)
"""Pairs of the tag that opens a thought and the tag that closes it."""

_CHANNEL = r"<\|channel\|>\s*{}\b[^<]*+(?:<\|constrain\|>[^<]*+)?<\|message\|>"
"""The header of a gpt-oss message. It names a channel, `analysis` for thoughts or `final` for the answer, and may name
the message's format, as in `final <|constrain|>json`."""

_OPENING = re.compile(
    "|".join([*(re.escape(opening) for opening, _ in TAGS), _CHANNEL.format("analysis")]), re.IGNORECASE
)
_CLOSING = re.compile("|".join([*(re.escape(closing) for _, closing in TAGS), _CHANNEL.format("final")]), re.IGNORECASE)
_TAG = re.compile(f"({_OPENING.pattern}|{_CLOSING.pattern})", re.IGNORECASE)
_GENERATION_PROMPT = 64
"""The number of tokens before an assistant turn that are searched for an opening tag written by the template."""


def answer_texts(trajectory: Trajectory, tokenizer: Decoder, strip_thoughts: bool = True) -> tuple[str, str]:
    """The answer, and the whole last assistant turn. Without `strip_thoughts` the answer is the whole turn too.

    Both are without special tokens, except tags of thoughts. Both are empty if the episode was cut off while its last
    turn still called tools.
    """
    last = next(turn for turn in reversed(trajectory.turns) if turn.role is Role.ASSISTANT)
    if last.tool_calls and trajectory.finish is Finish.TRUNCATED:
        return "", ""
    turn = _with_tags(trajectory.tokens[last.start : last.end].tolist(), tokenizer)
    if not strip_thoughts:
        return turn, turn
    before = trajectory.tokens[max(0, last.start - _GENERATION_PROMPT) : last.start].tolist()
    _, *after_tags = _OPENING.split(decode(before, tokenizer, skip_special=False))
    return after_thoughts(turn, begins_open=after_tags != [] and not after_tags[-1].strip()), turn


def prompt_and_response(trajectory: Trajectory) -> tuple[int, int]:
    """The indices of the tokens at which the prompt and the response of the last branch begin."""
    start, _ = trajectory.branches[-1]
    return start, next(turn.start for turn in trajectory.turns if turn.role is Role.ASSISTANT and turn.start >= start)


def response_text(trajectory: Trajectory, tokenizer: Decoder) -> str:
    """All text after the last branch's prompt, tool results included, without special tokens."""
    _, start = prompt_and_response(trajectory)
    return decode(trajectory.tokens[start:].tolist(), tokenizer, skip_special=True)


def texts_of_steps(trajectory: Trajectory, tokenizer: Decoder) -> list[str]:
    """The text of each step, without special tokens."""
    tokens = [trajectory.tokens[step.start : step.end].tolist() for step in trajectory.steps]
    return [decode(each, tokenizer, skip_special=True) for each in tokens]


def rule_input(task: Task, trajectory: Trajectory, tokenizer: Decoder, strip_thoughts: bool = True) -> RuleInput:
    """The input of rules for an episode."""
    answer, full_answer = answer_texts(trajectory, tokenizer, strip_thoughts)
    response, turns = response_text(trajectory, tokenizer), _turn_texts(trajectory, tokenizer)
    return RuleInput(task, trajectory, answer, response, full_answer=full_answer, turn_texts=turns)


def _turn_texts(trajectory: Trajectory, tokenizer: Decoder) -> list[str]:
    """The text of each turn after the prompt of the last branch, without special tokens. Turns that are not the
    assistant's, such as tool results, are also without system messages and the chat template's role headers."""
    _, start = prompt_and_response(trajectory)
    spans = [(turn.role, trajectory.tokens[turn.start : turn.end].tolist()) for turn in trajectory.turns]
    return [
        decode(tokens, tokenizer, skip_special=True) if role is Role.ASSISTANT else without_template(tokens, tokenizer)
        for turn, (role, tokens) in zip(trajectory.turns, spans, strict=True)
        if turn.start >= start
    ]


def after_thoughts(text: str, begins_open: bool = False) -> str:
    """The text after the last closed thought; the whole text if there are no thoughts; empty if a thought is still open
    at the end. `begins_open` says that a thought is already open at the beginning."""
    closed = list(_CLOSING.finditer(text))
    if not closed:
        return "" if begins_open or _OPENING.search(text) else text
    rest = text[closed[-1].end() :]
    return "" if _OPENING.search(rest) else rest.lstrip()


def _with_tags(tokens: list[int], tokenizer: Decoder) -> str:
    """The text without special tokens, except tags of thoughts."""
    text = decode(tokens, tokenizer, skip_special=False)
    if not _TAG.search(text):
        return decode(tokens, tokenizer, skip_special=True)
    special = {decode([token], tokenizer, skip_special=False) for token in special_tokens(tokens, tokenizer)}
    if not special:
        return text
    unwanted = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    return "".join(piece if index % 2 else unwanted.sub("", piece) for index, piece in enumerate(_TAG.split(text)))
