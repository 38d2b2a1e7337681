"""Chooses the kept episodes that a report shows, and makes their texts.

From the first and from the last step with kept episodes, it chooses the best, a middle and the worst one by reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.errors import AsyncrlError
from asyncrl.observe.kept.episode import HELD_OUT, KeptEpisode, KeptRow
from asyncrl.observe.shown_text import shown_text
from asyncrl.runs.decoding import Decode
from asyncrl.runs.inspect.episode import step_scores
from asyncrl.runs.run import Run
from asyncrl.types import Turn

MOST_TOKENS = 600
"""The maximum number of tokens that are shown of a turn. The middle of a longer turn is left out."""
MOST_TURNS = 40
MOST_CHARS = 12_000


@dataclass(frozen=True, slots=True)
class ShownTurn:
    """A turn as text. `scores` has the scores of the steps that end in it."""

    role: str
    text: str
    tokens: int
    scores: Sequence[str]
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class ShownEpisode:
    """An episode for a page: its row, its turns, and its scores by name. `left_out` counts the turns that are not
    shown."""

    row: KeptRow
    turns: Sequence[ShownTurn]
    scores: Sequence[tuple[str, str]]
    left_out: int


def sample_episodes(run: Run, decode: Callable[[], Decode]) -> tuple[list[ShownEpisode], str]:
    """Episodes of the run, or the reason why there are none. `decode` loads the tokenizer."""
    kept = run.kept()
    try:
        rows = [row for row in kept.rows() if HELD_OUT not in row.flags]
        if not rows:
            return [], "The run kept no episodes: observe.keep_episodes sets the number of kept groups of a step."
        episodes = [kept.read(row.step, row.id) for row in chosen(rows)]
        to_text = decode()
        return [_shown(episode, to_text) for episode in episodes], ""
    except (AsyncrlError, OSError) as error:
        return [], f"The kept episodes cannot be read: {error}"


def chosen(rows: Sequence[KeptRow]) -> list[KeptRow]:
    """The best, the middle and the worst row by reward, from the first and from the last step. No row is chosen
    twice."""
    found = []
    for step in dict.fromkeys((rows[0].step, rows[-1].step)):
        of_step = sorted((row for row in rows if row.step == step), key=_reward)
        found += [of_step[at] for at in dict.fromkeys((len(of_step) - 1, len(of_step) // 2, 0))]
    return found


def _reward(row: KeptRow) -> tuple[bool, float]:
    """A key that sorts by reward, with NaN first."""
    return not math.isnan(row.reward), row.reward


def visible(text: str) -> str:
    """The text with codes for characters that hide or reverse other text: a policy or a tool may have written some."""
    return "".join(each if each.isprintable() or each in "\n\t" else f"\\u{ord(each):04x}" for each in text)


def cut(text: str) -> str:
    """Cut a text to `MOST_CHARS` characters."""
    more = len(text) - MOST_CHARS
    return f"{text[:MOST_CHARS]}\n[{more} more characters]" if more > 0 else text


def _shown(episode: KeptEpisode, decode: Decode) -> ShownEpisode:
    turns, labels = episode.trajectory.turns, episode.labels
    extra = [(name, f"{value:.4g}") for name, value in labels.extra.items()]
    scores = [("reward", f"{labels.reward:.4g}"), ("outcome", f"{labels.outcome:.4g}"), ("judged by", labels.scorer)]
    shown = [_turn(episode, turn, decode) for turn in turns[:MOST_TURNS]]
    return ShownEpisode(episode.row, shown, scores + extra, max(0, len(turns) - MOST_TURNS))


def _turn(episode: KeptEpisode, turn: Turn, decode: Decode) -> ShownTurn:
    trajectory = episode.trajectory
    count = turn.end - turn.start
    if count > MOST_TOKENS:
        head = shown_text(trajectory, turn.start, turn.start + MOST_TOKENS // 2, decode)
        tail = shown_text(trajectory, turn.end - MOST_TOKENS // 2, turn.end, decode)
        text = f"{head}\n[{count - MOST_TOKENS} tokens left out]\n{tail}"
    else:
        text = shown_text(trajectory, turn.start, turn.end, decode)
    scores = step_scores(episode.labels)
    return ShownTurn(
        role=turn.role.value,
        text=cut(text),
        tokens=count,
        scores=[f"{score:.3g}" for end, score in scores.items() if turn.start < end <= turn.end],
        is_sampled=bool(trajectory.loss_mask[turn.start : turn.end].any()),
    )
