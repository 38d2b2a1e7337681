"""Turns transcripts into a reward model's input: token ids of the model's own tokenizer, and the positions at which the
score of each step is read."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from torch import nn

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.transcript import Transcript

_MARK = "asyncrlmark"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each of K steps the positions at which the model's values are read. The sum of these values is
    the step's logit."""

    ids: Sequence[int]
    reads: Sequence[Sequence[int]]


Encode = Callable[[Transcript], Encoded]


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes transcripts into at most `max_tokens` tokens, for the model named `model`, whose embedding has `rows`
    rows.

    With `drop_oldest`, a longer transcript loses its tool results, the oldest first, until the rest fits. The prompt
    and the steps always stay, and no text is shortened.
    """

    encode: Encode
    max_tokens: int
    rows: int
    drop_oldest: bool
    model: str

    def __call__(self, transcript: Transcript) -> Encoded:
        """Raises ScoringError: the transcript is too long, or has a token that the model does not know."""
        kept = list(transcript)
        encoded = self.encode(kept)
        while len(encoded.ids) > self.max_tokens:
            steps = [index for index, passage in enumerate(kept) if passage.is_step]
            between = range(steps[0], steps[-1]) if steps and self.drop_oldest else range(0)
            tool_result = next((index for index in between if not kept[index].is_step), None)
            if tool_result is None:
                without = " without its tool results" if self.drop_oldest else ""
                raise ScoringError(
                    f"the transcript has {len(encoded.ids)} tokens{without}; {self.model} reads {self.max_tokens}"
                )
            del kept[tool_result]
            encoded = self.encode(kept)
        # On a GPU, a token id beyond the embedding would end the process.
        if (largest := max(encoded.ids, default=0)) >= self.rows:
            raise ScoringError(
                f"the transcript has the token id {largest}; the embedding of {self.model} has {self.rows} rows"
            )
        return encoded


def longest_input(model: Any) -> int:
    """The maximum number of tokens that the model was made for; sys.maxsize if its configuration has no such limit."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    for name, module in model.named_modules():
        # RoBERTa and similar models count positions from padding_idx + 1, so they never use the rows before it.
        if name.endswith("position_embeddings") and isinstance(module, nn.Embedding) and module.padding_idx is not None:
            limit = module.num_embeddings - module.padding_idx - 1
    return limit if isinstance(limit, int) and limit > 0 else sys.maxsize


def embedding_rows(model: Any) -> int:
    """The number of token ids in the model's embedding."""
    return int(model.get_input_embeddings().weight.shape[0])


def tokenize(transcript: Transcript, tokenizer: Any) -> tuple[list[int], list[tuple[int, int]]]:
    """The transcript with its special tokens, as ids and the token span [start, end) of each step.

    Each passage is tokenised separately, so that no token spans a step's end. If ordinary text spells out a special
    token, such as an end of turn in a tool result, it becomes ordinary tokens.
    """
    with_runs = any(passage.runs for passage in transcript)
    added = tokenizer.added_tokens_decoder.values() if with_runs else ()
    special = [token.content for token in added if token.special]
    ids: list[int] = []
    spans: list[tuple[int, int]] = []
    for passage in transcript:
        start = len(ids)
        if any(mark in text for is_special, text in passage.runs if not is_special for mark in special):
            for is_special, text in passage.runs:
                ids += tokenizer.encode(text, add_special_tokens=False) if is_special else words(tokenizer, text)
        else:
            ids += tokenizer.encode(passage.text, add_special_tokens=False)
        if passage.is_step:
            spans.append((start, len(ids)))
    return ids, spans


def problem_and_steps(transcript: Transcript) -> tuple[str, list[str]]:
    """Plain texts: the problem, and each step preceded by the tool results since the last step."""
    problem: list[str] = []
    steps: list[str] = []
    context: list[str] = []
    for passage in transcript:
        text = passage.plain.strip()
        if passage.is_step:
            steps.append("\n".join([*context, text]))
            context = []
        else:
            (context if steps else problem).append(text)
    return "\n".join(problem), steps


def marker(tokenizer: Any, text: str, key: str) -> tuple[int, Callable[[Sequence[int]], list[int]]]:
    """The id of the marker that ends a step, and a function for the ids of all other text. The function replaces the
    marker's id by the ids of the marker's characters, so that a marker in the text ends no step. Raises ConfigError:
    the tokenizer lacks the marker.
    """
    marker = single_token(tokenizer, text, key)
    spelled = [token for character in text.strip() or text for token in words(tokenizer, character)]

    def written_out(ids: Sequence[int]) -> list[int]:
        return [each for token in ids for each in (spelled if token == marker else (token,))]

    return marker, written_out


def words(tokenizer: Any, text: str) -> list[int]:
    """The ids of a text. A special token that the text spells out becomes ordinary tokens."""
    return list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))


def single_token(tokenizer: Any, text: str, key: str) -> int:
    """The id of the last token of `text`. Raises ConfigError: this token is not the whole text."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    last = tokenizer.decode(ids[-1:], skip_special_tokens=False, clean_up_tokenization_spaces=False) if ids else ""
    if not ids or last.strip() != text.strip():
        raise ConfigError(f"{key}: the model's tokenizer has no token {text!r}; name the token used in its training")
    return int(ids[-1])


def chat_frame(tokenizer: Any, roles: Sequence[str], key: str, system: str | None = None) -> list[list[int]]:
    """The ids that the chat template writes before, between and after messages of these roles: len(roles) + 1 lists.

    Raises ConfigError: there is no template, or it does not show every message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"{key}: the model's tokenizer has no chat template, which this family needs; save the tokenizer with one"
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
