"""Transcripts as a model's input: its own tokens, and where in them each step is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.transcript import Transcript

_MARK = "asyncrlmark"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each of K steps the positions at which it is read: what is read there adds up to its logit."""

    ids: Sequence[int]
    reads: Sequence[Sequence[int]]


Encode = Callable[[Transcript], Encoded]


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """What becomes of inputs over `max_tokens`: see `encode_within`. `reader` is who cannot read more."""

    max_tokens: int
    drop_oldest: bool
    reader: str


def encode_within(transcript: Transcript, encode: Encode, limit: LengthLimit) -> Encoded:
    """The model's input, of at most `limit.max_tokens` tokens.

    With `drop_oldest`, tool results are left out, the oldest first, until the rest fits. The prompt and the steps
    always stay: nothing is cut, and no step goes unseen.

    Raises ScoringError: it is too long.
    """
    kept = list(transcript)
    encoded = encode(kept)
    while len(encoded.ids) > limit.max_tokens:
        tool_result = _oldest_tool_result(kept) if limit.drop_oldest else None
        if tool_result is None:
            told = " without its tool results" if limit.drop_oldest else ""
            raise ScoringError(
                f"the transcript has {len(encoded.ids)} tokens{told}; {limit.reader} reads {limit.max_tokens}"
            )
        del kept[tool_result]
        encoded = encode(kept)
    return encoded


def _oldest_tool_result(transcript: Transcript) -> int | None:
    steps = [index for index, segment in enumerate(transcript) if segment.is_step]
    if not steps:
        return None
    return next((index for index in range(steps[0], steps[-1]) if not transcript[index].is_step), None)


def tokenize(transcript: Transcript, tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """The transcript as it is, special tokens included, and the token span [start, end) of each step.

    Segments are tokenised one by one, so that no token spans a step's end. What the policy's tokens spell in letters,
    such as an end of a turn in a result, stays letters.
    """
    with_runs = any(segment.runs for segment in transcript)
    added = tokenizer.added_tokens_decoder.values() if with_runs else ()
    special = [token.content for token in added if token.special]
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for segment in transcript:
        start = len(ids)
        if any(mark in text for is_special, text in segment.runs if not is_special for mark in special):
            for is_special, text in segment.runs:
                ids += tokenizer.encode(text, add_special_tokens=False) if is_special else words(tokenizer, text)
        else:
            ids += tokenizer.encode(segment.text, add_special_tokens=False)
        if segment.is_step:
            spans.append((start, len(ids)))
    return ids, spans


def problem_and_steps(transcript: Transcript) -> tuple[str, list[str]]:
    """Plain texts: the problem, and each step behind the tool results that came since the last one."""
    problem: list[str] = []
    steps: list[str] = []
    context: list[str] = []
    for segment in transcript:
        text = segment.plain.strip()
        if segment.is_step:
            steps.append("\n".join([*context, text]))
            context = []
        elif steps:
            context.append(text)
        else:
            problem.append(text)
    return "\n".join(problem), steps


@dataclass(frozen=True, slots=True)
class Marker:
    """The token that ends a step, and the tokens of its characters one by one: as which a text may hold it."""

    token: int
    spelled: Sequence[int]

    def written_out(self, ids: Sequence[int]) -> list[int]:
        """The ids of a text, in which no token is the marker."""
        return [each for token in ids for each in (self.spelled if token == self.token else (token,))]


def marker(tokenizer: Any, text: str, key: str) -> Marker:
    """Raises ConfigError: the tokenizer does not have it."""
    found = single_token(tokenizer, text, key)
    return Marker(found, [token for character in text.strip() or text for token in words(tokenizer, character)])


def words(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text that is only words: a special token written out in it stays the characters it is written in."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def single_token(tokenizer: Any, text: str, key: str) -> int:
    """The id of the token that `text` ends with, which must say all of it. Raises ConfigError."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    said = tokenizer.decode(ids[-1:], skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    if not ids or said.strip() != text.strip():
        raise ConfigError(f"{key}: the model's tokenizer has no token {text!r}; name the one that it was trained with")
    return int(ids[-1])


def chat_frame(tokenizer: Any, roles: Sequence[str], key: str, system: str | None = None) -> list[list[int]]:
    """What the chat template writes before, between and behind messages of these roles: a list of ids more than roles.

    Raises ConfigError: there is no template, or it does not show every message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{key}: the model's tokenizer has no chat template, which this family needs; save one with it"
        )
    marks = [f"{_MARK}{index:03d}" for index in range(len(roles))]
    messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    text = str(tokenizer.apply_chat_template(messages, tokenize=False))
    bounds = [-len(_MARK) - 3, *(text.find(mark) for mark in marks), len(text)]
    if any(after < before + len(_MARK) + 3 for before, after in pairwise(bounds)):
        raise ConfigError(f"{key}: the chat template does not show messages of the roles {', '.join(roles)} in order")
    pieces = [text[before + len(_MARK) + 3 : after] for before, after in pairwise(bounds)]
    return [list(tokenizer.encode(piece, add_special_tokens=False)) for piece in pieces]
