"""Describes one kept episode as plain values for a page: its turns with their tokens, branches, labels and task."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs

from asyncrl.dashboard.pieces import TokenSpan
from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.token_values import scales, tokens_of
from asyncrl.dashboard.vocabulary import Vocabulary
from asyncrl.errors import RefusedError
from asyncrl.observe.kept.episode import KeptEpisode
from asyncrl.runs.inspect.episode import step_scores, versions
from asyncrl.types import Labels, Role, Task, ToolCall, Trajectory, Turn, common_prefix

TOKENS_A_TURN = 1200
TOKENS_AT_ONCE = 12_000
"""The maximum number of tokens of a turn, and of an episode, that are sent at first. The page requests the rest on
demand."""
MOST_CHARACTERS = 20_000
"""Longer texts of a task and of a call's arguments are cut, with a note of how much is missing."""
BETWEEN = "template"
"""The role of tokens between two turns: marks of the chat template."""


class EpisodePart(NamedTuple):
    """A turn, or the tokens between two turns. In the second case `turn` is None."""

    span: TokenSpan
    turn: Turn | None


def parts_of(trajectory: Trajectory) -> Iterator[EpisodePart]:
    """All tokens of an episode, part by part."""
    position = 0
    for turn in trajectory.turns:
        if position < turn.start:
            yield EpisodePart(TokenSpan(position, turn.start), None)
        yield EpisodePart(TokenSpan(turn.start, turn.end), turn)
        position = turn.end
    if position < len(trajectory):
        yield EpisodePart(TokenSpan(position, len(trajectory)), None)


def describe_episode(episode: KeptEpisode, vocabulary: Vocabulary) -> dict[str, Any]:
    """The values with which a page shows the episode, except for the later tokens of long turns."""
    trajectory = episode.trajectory
    return {
        **plain(structs.asdict(episode.row)),
        "labels": _labels(episode.labels),
        "rewards": plain(trajectory.rewards),
        "timings": plain(trajectory.timings),
        "task": None if episode.task is None else _task(episode.task),
        "scales": scales(episode),
        "scores": _score_spans(episode),
        "branch_list": branches(episode),
        "parts": list(_parts(episode, vocabulary)),
        "vocabulary_problem": vocabulary.problem,
    }


def more_tokens(episode: KeptEpisode, start: int, vocabulary: Vocabulary) -> dict[str, Any]:
    """The tokens from the token `start` to the end of its part of the episode, but at most TOKENS_A_TURN. Raises
    RefusedError: the episode has no such token."""
    for span, _ in parts_of(episode.trajectory):
        if span.start <= start < span.end:
            return tokens_of(episode, TokenSpan(start, min(start + TOKENS_A_TURN, span.end)), span, vocabulary)
    raise RefusedError(f"episode {episode.row.id} has {len(episode.trajectory)} tokens, and no token {start}")


def _parts(episode: KeptEpisode, vocabulary: Vocabulary) -> Iterator[dict[str, Any]]:
    trajectory = episode.trajectory
    starts, left, number = [start for start, _ in trajectory.branches], TOKENS_AT_ONCE, 0
    for span, turn in parts_of(trajectory):
        shown = TokenSpan(span.start, min(span.end, span.start + TOKENS_A_TURN, span.start + left))
        left -= shown.end - shown.start
        yield {
            "start": span.start,
            "end": span.end,
            "branch": bisect_right(starts, span.start) - 1,
            "tokens": tokens_of(episode, shown, span, vocabulary),
            **({"role": BETWEEN} if turn is None else {"number": number, **_turn(trajectory, turn)}),
        }
        number += turn is not None


def _turn(trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    mass = trajectory.grammar_mass[turn.start : turn.end]
    return {
        "role": turn.role.value,
        "finish_reason": turn.finish_reason,
        "calls": [_call(call) for call in turn.tool_calls],
        "grammar": turn.grammar,
        "mass": plain(mass.mean()) if turn.grammar and mass.size else None,
        "score": plain(turn.score),
        "versions": plain(versions(trajectory, turn.start, turn.end)),
    }


def _call(call: ToolCall) -> dict[str, Any]:
    return {"name": call.name, "arguments": shortened(json.dumps(plain(call.arguments), indent=2, ensure_ascii=False))}


def shortened(text: str) -> dict[str, Any]:
    """The first characters of a text, and how many more there are."""
    return {"text": text[:MOST_CHARACTERS], "more": max(0, len(text) - MOST_CHARACTERS)}


def _labels(labels: Labels) -> dict[str, Any]:
    return {
        "reward": plain(labels.reward),
        "outcome": plain(labels.outcome),
        "scorer": labels.scorer,
        "extra": plain(labels.extra),
        "vote": shortened(labels.vote),
        "reasons": [{"scorer": each.scorer, **shortened(each.text)} for each in labels.reasons],
    }


def _task(task: Task) -> dict[str, Any]:
    return {
        "id": task.id,
        "data_source": task.data_source,
        "ground_truth": shortened(task.truth_text),
        "messages": [_message(message) for message in task.messages],
        "tools": shortened(_indented(task.tools)) if task.tools else None,
        "extra_info": shortened(_indented(task.extra_info)) if task.extra_info else None,
    }


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name not in ("role", "content")}
    text = content if isinstance(content, str) else _indented(content)
    return {
        "role": str(message.get("role", "")),
        "content": shortened(text),
        "rest": shortened(_indented(rest)) if rest else None,
    }


def _indented(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=False)


def _score_spans(episode: KeptEpisode) -> list[dict[str, Any]]:
    """The spans and the scores of the steps that a process model scored."""
    begins = {step.end: step.start for step in episode.trajectory.steps}
    position, found = 0, []
    for end, score in step_scores(episode.labels).items():
        found.append({"start": begins.get(end, position), "end": end, "score": plain(score)})
        position = end
    return found


def branches(episode: KeptEpisode) -> list[dict[str, Any]]:
    """Each branch: its `parent`, the earlier branch with the longest beginning in common (`None` for the first branch);
    the number of tokens that both share; and the mean score of its steps.
    """
    trajectory = episode.trajectory
    spans = trajectory.branches
    scores = step_scores(episode.labels)
    return [
        {
            "start": start,
            "end": end,
            "sampled": int(trajectory.loss_mask[start:end].sum()),
            "turns": sum(turn.role is Role.ASSISTANT and start <= turn.start < end for turn in trajectory.turns),
            "score": plain(_mean([score for at, score in scores.items() if start < at <= end])),
            **_parent(trajectory, spans, number),
        }
        for number, (start, end) in enumerate(spans)
    ]


def _parent(trajectory: Trajectory, spans: Sequence[tuple[int, int]], number: int) -> dict[str, Any]:
    if number == 0:
        return {"parent": None, "shared": 0}
    own = trajectory.tokens[slice(*spans[number])]
    shared = [common_prefix(trajectory.tokens[slice(*span)], own) for span in spans[:number]]
    longest = int(np.argmax(shared))
    return {"parent": longest, "shared": shared[longest]}


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
