"""`asyncrl inspect show`: one episode, turn by turn.

The text is split where the loss mask, a turn or a step changes, and each piece is decoded alone. Sampled text is green,
all other text is dim, and a step's score follows the end of the step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from msgspec import structs
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from asyncrl.observe.kept.episode import ARRAYS as KEPT_ARRAYS
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.observe.shown_text import shown_text
from asyncrl.replay.stored import StoredTrajectory
from asyncrl.runs.decoding import Decode
from asyncrl.runs.inspect.table import masked_tokens_text
from asyncrl.text import printable
from asyncrl.types import DEMONSTRATED, Labels, Trajectory, Turn, runs_of

SAMPLED, GIVEN = "green", "dim"
GOOD, BAD = 0.66, 0.33
ARRAYS = ("tokens", "logprobs", "version_runs", "grammar_mass", "routed_experts", "image_digests")


def describe(record: StoredTrajectory, decode: Decode, kept: KeptEpisode | None = None) -> dict[str, Any]:
    """The episode as plain values: its record, labels, turns with their text, tokens, versions and steps, and what the
    learner kept of it."""
    trajectory, scores = record.trajectory, step_scores(record.labels)
    values: dict[str, Any] = {
        "id": record.id,
        "facts": record.facts and structs.asdict(record.facts),
        "letter": record.dead_letter and structs.asdict(record.dead_letter),
        "labels": record.labels,
        "trajectory": trajectory
        and {
            **{field: value for field, value in structs.asdict(trajectory).items() if field not in ARRAYS},
            "turns": [_describe_turn(trajectory, turn, decode) for turn in trajectory.turns],
            "steps": [{**step._asdict(), "score": scores.get(step.end)} for step in trajectory.steps],
        },
        "kept": kept
        and {"row": kept.row, "task": kept.task, **{name: getattr(kept, name).tolist() for name in KEPT_ARRAYS}},
    }
    plain: dict[str, Any] = msgspec.to_builtins(values, enc_hook=np.ndarray.tolist)
    return plain


def _describe_turn(trajectory: Trajectory, turn: Turn, decode: Decode) -> dict[str, Any]:
    tokens = trajectory.tokens[turn.start : turn.end].tolist()
    return {
        **turn._asdict(),
        "tool_calls": [call._asdict() for call in turn.tool_calls],
        "versions": versions(trajectory, turn.start, turn.end),
        "tokens": tokens,
        "text": shown_text(trajectory, turn.start, turn.end, decode),
        **({"grammar_mass": trajectory.grammar_mass[turn.start : turn.end].tolist()} if turn.grammar else {}),
    }


def step_scores(labels: Labels | None) -> dict[int, float]:
    """Map the end of each step to the score of the step."""
    if labels is None:
        return {}
    return dict(zip(labels.step_ends.tolist(), labels.step_scores.tolist(), strict=True))


def versions(trajectory: Trajectory, start: int, end: int) -> dict[int, int]:
    """Count the tokens of [start, end) by the policy version that sampled them."""
    sampled = trajectory.versions[start:end][trajectory.loss_mask[start:end]]
    found, counts = np.unique(sampled, return_counts=True)
    return dict(zip(found.tolist(), counts.tolist(), strict=True))


def readable(record: StoredTrajectory, decode: Decode, kept: KeptEpisode | None = None) -> RenderableType:
    """The episode for a terminal, with the facts that the learner kept."""
    parts: list[RenderableType] = [_head(record, kept)]
    if record.trajectory is not None:
        parts += turns(record.trajectory, record.labels, decode)
    return Group(*parts)


def _head(record: StoredTrajectory, kept: KeptEpisode | None) -> Table:
    table = Table(show_header=False, box=None, pad_edge=False)
    for key, value in {"id": record.id, **_facts(record), **_labels(record.labels), **_kept(kept)}.items():
        if value:
            table.add_row(Text(key, "dim"), Text(printable(value)))
    return table


def _facts(record: StoredTrajectory) -> dict[str, str]:
    facts, letter, trajectory = record.facts, record.dead_letter, record.trajectory
    found = {}
    if facts is not None:
        planned = f", last planned for step {facts.last_plan}" if facts.plans else ""
        found["group"] = f"{facts.group}, member {facts.member}"
        found["state"] = f"{facts.state}{planned}"
        found["reason"] = "" if letter else facts.reason
        by = "shown" if facts.is_demonstration else f"sampled, by version {facts.oldest} or newer"
        found["tokens"] = f"{facts.tokens}, of which {facts.sampled} {by}{masked_tokens_text(facts.masked)}"
    if letter is not None:
        found["dead letter"] = f"attempt {letter.attempt + 1}: {letter.reason}"
    if trajectory is None:
        removed = "removed; replay.retention=all keeps all texts, observe.keep_episodes those of a few groups"
        return {**found, "text": removed if facts else "none, the episode failed"}
    return {
        **found,
        "task": trajectory.task_id,
        "finish": trajectory.finish.value,
        "rewards": _numbers(trajectory.rewards),
        "seconds": _numbers(trajectory.timings),
    }


def _labels(labels: Labels | None) -> dict[str, str]:
    if labels is None:
        return {}
    outcome = f"{labels.outcome:.4g}, judged by {labels.scorer}"
    said = {f"{name} says": text for name, text in labels.reasons}
    return {"reward": f"{labels.reward:.4g}", "outcome": outcome, "extra": _numbers(labels.extra), **said}


def _kept(kept: KeptEpisode | None) -> dict[str, str]:
    if kept is None:
        return {}
    mask, flags = kept.trajectory.loss_mask, ", ".join(kept.row.flags)
    advantages, weights = kept.advantages[mask], kept.importance_weights[mask]
    return {
        "kept": f"of step {kept.row.step}{f' ({flags})' if flags else ''}",
        "truth": "" if kept.task is None else kept.task.truth_text,
        "advantage": f"{advantages.mean():.4g} on average, from {advantages.min():.4g} to {advantages.max():.4g}",
        "weight": f"{weights.mean():.4g} on average, from {weights.min():.4g} to {weights.max():.4g}",
    }


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


def turns(trajectory: Trajectory, labels: Labels | None, decode: Decode) -> Iterator[RenderableType]:
    """Yield a heading and the text of each turn. With several branches, the heading of a branch's first turn has the
    number of the branch."""
    scores = step_scores(labels)
    branches = {start: number for number, (start, _) in enumerate(trajectory.branches)}
    for number, turn in enumerate(trajectory.turns):
        by_version = versions(trajectory, turn.start, turn.end)
        parts = [
            f"branch {branches[turn.start]}" if len(branches) > 1 and turn.start in branches else "",
            f"turn {number}",
            turn.role.value,
            f"{turn.end - turn.start} tokens",
            *(
                f"{count} shown" if version == DEMONSTRATED else f"{count} by version {version}"
                for version, count in by_version.items()
            ),
            turn.finish_reason,
            "" if turn.score is None else f"score {turn.score:.3g}",
            _under(trajectory, turn),
        ]
        yield Rule(Text(" · ".join(filter(None, parts)), "bold"), align="left", style="dim")
        yield _text(trajectory, turn.start, turn.end, scores, decode)


def _under(trajectory: Trajectory, turn: Turn) -> str:
    """The grammar under which the turn was sampled, and its mean mass. The mass at a token is the probability that the
    policy gave to all tokens that the grammar allowed there."""
    mass = trajectory.grammar_mass[turn.start : turn.end]
    return f"under a grammar ({turn.grammar}), mass {mass.mean():.2f}" if turn.grammar and len(mass) else ""


def _text(trajectory: Trajectory, start: int, end: int, scores: Mapping[int, float], decode: Decode) -> Text:
    changes = runs_of(trajectory.loss_mask[start:end].astype(np.int32))[:, 0] + start if end > start else ()
    edges = {*scores, *(edge for step in trajectory.steps for edge in (step.start, step.end))}
    cuts = {start, end, *map(int, changes), *(edge for edge in edges if start < edge < end)}
    text = Text()
    for left, right in pairwise(sorted(cuts)):
        style = SAMPLED if trajectory.loss_mask[left] else GIVEN
        text.append(printable(shown_text(trajectory, left, right, decode)), style)
        if right in scores:
            text.append(f" ⟨{scores[right]:.3g}⟩ ", _colour(scores[right]))
    return text


def _colour(score: float) -> str:
    return "bold green" if score >= GOOD else "bold red" if score < BAD else "bold yellow"
