"""What a rule is, and how its answer is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Protocol

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory


class Rule(Protocol):
    """Judges one episode. `answer` is the text of the last assistant turn, empty where that turn called a tool.

    Returns the outcome, or a mapping with the outcome as `score` and named further numbers. An exception is a failure
    of the rule, which is tried again and never counts as zero.
    """

    def __call__(self, *, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float]: ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a rule said: the outcome, and its further numbers by name."""

    outcome: float
    extra: Mapping[str, float] = field(default_factory=dict)


def read_verdict(result: object) -> Verdict:
    """The verdict in what a rule returned.

    Raises ScoringError: it is neither a finite number nor a mapping of names to such numbers with a `score`.
    """
    if not isinstance(result, Mapping):
        return Verdict(_number("result", result))
    if "score" not in result:
        raise ScoringError(f"a rule returned {sorted(map(str, result))} without `score`")
    extra = {str(name): _number(name, value) for name, value in result.items() if name != "score"}
    return Verdict(_number("score", result["score"]), extra)


def _number(name: object, value: object) -> float:
    if not isinstance(value, Real) or not math.isfinite(value):
        raise ScoringError(f"a rule's {name} is {value!r:.100}; it must be a finite number")
    return float(value)
