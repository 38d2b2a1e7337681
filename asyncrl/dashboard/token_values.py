"""Collects the values of tokens, by which a page colours text, as plain lists."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.dashboard.pieces import TokenSpan, window_pieces
from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.observe.shown_text import image_mark
from asyncrl.types import Trajectory

LOW_QUANTILE, HIGH_QUANTILE = 0.02, 0.98
"""The scale of colours ends at these quantiles, so that a few extreme tokens do not take all of it."""


def by_token(episode: KeptEpisode) -> dict[str, NDArray[Any]]:
    """The values of all tokens: an array [T] for each name."""
    trajectory = episode.trajectory
    values = {
        "logprob": trajectory.logprobs,
        "proximal": episode.proximal_logprobs,
        "advantage": episode.advantages,
        "weight": episode.importance_weights,
        "version": trajectory.versions,
    }
    return {**values, "mass": trajectory.grammar_mass} if trajectory.grammar_mass.size else values


def tokens_of(episode: KeptEpisode, span: TokenSpan, within: TokenSpan, vocabulary: Vocabulary) -> dict[str, Any]:
    """The tokens of `span`: their ids, their texts, which of them are special, and the values of sampled tokens. The
    texts are those that the tokens have among all tokens of `within`.
    """
    ids = episode.trajectory.tokens[within.start : within.end].tolist()
    here = TokenSpan(span.start - within.start, span.end - within.start)
    shown = ids[here.start : here.end]
    found = {
        "start": span.start,
        "ids": shown,
        "pieces": _with_images(window_pieces(ids, here, vocabulary.decode), episode.trajectory, span.start),
        "special": [place for place, id in enumerate(shown) if id in vocabulary.special],
    }
    sampled = episode.trajectory.loss_mask[span.start : span.end]
    if not sampled.any():
        return found
    values = {name: plain(array[span.start : span.end]) for name, array in by_token(episode).items()}
    return {**found, "sampled": plain(sampled.astype(np.int8)), **values}


def _with_images(pieces: list[str], trajectory: Trajectory, start: int) -> list[str]:
    """The texts of the tokens from `start` on. The first token of an image has its mark, its other tokens no text."""
    found = list(pieces)
    for (begin, stop), name in zip(trajectory.image_spans.tolist(), trajectory.image_names, strict=True):
        for place in range(max(0, begin - start), min(len(found), stop - start)):
            found[place] = image_mark(name, stop - begin) if start + place == begin else ""
    return found


def scales(episode: KeptEpisode) -> dict[str, Any]:
    """The least, the mean and the largest of each value of sampled tokens, and the ends of the scale of colours."""
    sampled = episode.trajectory.loss_mask
    found = {}
    for name, array in by_token(episode).items():
        values = array[sampled]
        finite = values[np.isfinite(values)].astype(np.float64)
        if finite.size:
            low, high = np.quantile(finite, [LOW_QUANTILE, HIGH_QUANTILE])
            found[name] = plain(
                {"min": finite.min(), "mean": finite.mean(), "max": finite.max(), "low": low, "high": high}
            )
    return found
