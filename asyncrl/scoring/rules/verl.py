"""Reward functions written for verl, used as they are.

verl calls `compute_score(data_source, solution_str, ground_truth, extra_info)` with the text of the whole response;
here `solution_str` is the text of the last assistant turn, which is where an answer stands.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from asyncrl.scoring.rules.base import Rule
from asyncrl.types import Task, Trajectory


def adapt(compute_score: Callable[..., Any]) -> Rule:
    """A rule that asks `compute_score`. What it returns besides numbers, such as the parsed text, is left out."""

    def rule(*, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float]:
        result: float | Mapping[str, Any] = compute_score(
            data_source=task.data_source,
            solution_str=answer,
            ground_truth=task.ground_truth,
            extra_info=dict(task.extra_info),
        )
        if isinstance(result, Mapping):
            return {name: value for name, value in result.items() if name == "score" or isinstance(value, Real)}
        return result

    return rule
