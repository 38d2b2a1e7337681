"""The score that reasoning-gym's own `score_answer` gives (needs the extra asyncrl[reasoning-gym])."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

from asyncrl.data.converters.reasoning_gym import ENTRY, KIND, unpacked
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.confined import Confined
from asyncrl.scoring.rules.text import tagged
from asyncrl.text import reason_of
from asyncrl.types import Task, Trajectory

try:
    from reasoning_gym import create_dataset
except ImportError as error:
    raise ConfigError(
        f"the rule reasoning_gym needs the extra: pip install 'asyncrl[reasoning-gym]' ({error})"
    ) from error


def reasoning_gym(
    task: Task, answer: str, trajectory: Trajectory, *, confined: Confined, cpu_s: float = 5.0
) -> Mapping[str, float]:
    """Return as `score` the number from 0 to 1 that the task's data set gives to the answer: to the content of the last
    `<answer>` tag, or to the whole answer if it has no such tag. The score is 0 if the data set cannot read the answer.
    It is also 0 if the scoring takes over `cpu_s` seconds of processor time or too much memory; then `out_of_time` or
    `out_of_memory` is 1.

    Raises ScoringError: the task is not from reasoning-gym, or its data set cannot even score the right answer.
    """
    entry = task.extra_info.get(ENTRY)
    if not isinstance(entry, str):
        raise ScoringError(f"task {task.id} has no extra_info.{ENTRY}; a source {KIND}NAME makes such tasks")
    return confined(_task, _score, entry, tagged(answer).strip(), cpu_s)


class _Made(NamedTuple):
    dataset: Any
    entry: Mapping[str, Any]


def _task(text: str) -> _Made:
    try:
        made = unpacked(text)
        return _Made(_dataset(made["name"], json.dumps(made["options"], sort_keys=True)), made["entry"])
    except Exception as error:
        raise ScoringError(f"extra_info.{ENTRY} cannot be used: {reason_of(error)}") from error


@lru_cache(256)
def _dataset(name: str, options: str) -> Any:
    """Make the data set. The cache keeps it for further tasks with the same `name` and `options`."""
    return create_dataset(name, **json.loads(options))


def _score(made: _Made, answer: str) -> float:
    if not answer:
        return 0.0
    try:
        return float(made.dataset.score_answer(answer=answer, entry=made.entry))
    except MemoryError:
        raise
    except Exception:  # noqa: BLE001 - the answer is to blame, unless the right one fails as well
        _check_right_answer(made)
        return 0.0


def _check_right_answer(made: _Made) -> None:
    right = made.entry.get("answer")
    if right is None:
        return
    try:
        made.dataset.score_answer(answer=right, entry=made.entry)
    except Exception as error:
        raise ScoringError(f"reasoning-gym cannot score its own answer: {reason_of(error)}") from error
