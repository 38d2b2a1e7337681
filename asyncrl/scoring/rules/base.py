"""What a rule is, what it judges, and how its answer is read."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory


class Rule(Protocol):
    """Judges one episode. `answer` is the text of the last assistant turn, empty where that turn called a tool.

    Returns the outcome, or a mapping with the outcome as `score` and named further numbers. An exception is a failure
    of the rule, which is tried again and never counts as zero. Options of a rule are further keyword parameters.
    """

    def __call__(self, *, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One episode to be judged. `response` is the text of all that follows the prompt, tool results included."""

    task: Task
    trajectory: Trajectory
    answer: str
    response: str


Judge = Callable[[Case], Any]
"""A rule of whatever signature, as the pool calls it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the rules of a task said.

    `outcome` is the score of the first rule, which says whether the answer is right; `total` is the weighted sum of
    all. `scores` are theirs by name, with each rule's further numbers as RULE/NAME.
    """

    outcome: float
    total: float
    scores: Mapping[str, float] = field(default_factory=dict)


def read_result(result: object) -> tuple[float, dict[str, float]]:
    """The score in what a rule returned, and its further numbers by name.

    Raises ScoringError: it is neither a finite number nor a mapping of names to such numbers with a `score`.
    """
    if not isinstance(result, Mapping):
        return _number("result", result), {}
    if "score" not in result:
        raise ScoringError(f"a rule returned {sorted(map(str, result))} without `score`")
    extra = {str(name): _number(name, value) for name, value in result.items() if name != "score"}
    return _number("score", result["score"]), extra


def _number(name: object, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ScoringError(f"a rule's {name} is {value!r:.100}; it must be a finite number")
    return float(value)
