"""Converts a kept episode for the sinks of metrics: its facts to plain values, its turns to messages."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.observe.metrics import LoggedEpisode, Value
from asyncrl.observe.shown_text import shown_text
from asyncrl.text import cut

MAX_CHARS = 20_000
"""The maximum length of a text. The middle of a longer text is left out."""


def _facts(episode: KeptEpisode) -> dict[str, Value]:
    """The row of an episode as numbers and texts, with the episode's mean advantage, its mean importance weight and its
    extra scores."""
    row, mask = episode.row, episode.trajectory.loss_mask
    return {
        "id": row.id,
        "group": row.group_id,
        "task": row.task_id,
        "truth": "" if episode.task is None else cut(episode.task.truth_text, MAX_CHARS),
        "flags": ", ".join(row.flags),
        "reward": row.reward,
        "outcome": row.outcome,
        "advantage": float(episode.advantages[mask].mean()),
        "importance_weight": float(episode.importance_weights[mask].mean()),
        "tokens": row.tokens,
        "sampled": row.sampled,
        "turns": row.turns,
        "branches": row.branches,
        "tools": ", ".join(row.tools),
        "tool_calls": row.tool_calls,
        "finish": row.finish,
        "lag": row.lag,
        "version": row.version,
        **{f"score/{name}": score for name, score in episode.labels.extra.items()},
    }


def logged(episode: KeptEpisode, decode: Callable[[list[int]], str]) -> LoggedEpisode:
    """Convert an episode: its facts, and a message for each turn in order. `decode` makes text of token ids."""
    trajectory = episode.trajectory
    messages = [
        {"role": turn.role.value, "content": cut(shown_text(trajectory, turn.start, turn.end, decode), MAX_CHARS)}
        for turn in trajectory.turns
    ]
    return LoggedEpisode(_facts(episode), messages)
