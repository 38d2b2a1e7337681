"""Transcripts in a model's own tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from asyncrl.errors import ScoringError
from asyncrl.scoring.transcript import Transcript


def tokenize(transcript: Transcript, tokenizer: Any) -> tuple[list[int], list[int]]:
    """A transcript in the model's own tokens, and the index of each step's last token among them.

    Segments are tokenised one by one, so that no token spans a step's end. A step without a token of its own is
    represented by the token before it.

    Raises ScoringError: a step without a token comes first.
    """
    ids: list[int] = []
    ends: list[int] = []
    for segment in transcript:
        ids += tokenizer.encode(segment.text, add_special_tokens=False)
        if segment.is_step:
            if not ids:
                raise ScoringError("the transcript begins with a step that has no text")
            ends.append(len(ids) - 1)
    return ids, ends


def micro_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Every index once, in batches of at most `max_tokens` tokens when padded to their longest; one that is longer by
    itself is a batch of its own."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
