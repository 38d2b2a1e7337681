"""What a rule is, what it judges, and how its answer is read."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Protocol

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory


class Rule(Protocol):
    """Judges one episode. `answer` is the text of the last assistant turn behind its thoughts, empty where a thought is
    open or the episode was cut at a tool call.

    Returns the outcome, or a mapping with the outcome as `score` and named further numbers. An exception is a failure
    of the rule, which is tried again and never counts as zero. Options of a rule are further keyword parameters. One
    called `deadline` gets the time, of `time.monotonic`, by which the verdict must be there, `full_answer` the answer
    with its thoughts, and `confinement` a `Confinement`.
    """

    def __call__(self, *, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """One episode to be judged. `answer` is what rules read, `full_answer` the same with the thoughts before it.
    `response` is the text of all that follows the prompt, tool results included. The verdict must be there by
    `deadline`, of `time.monotonic`."""

    task: Task
    trajectory: Trajectory
    answer: str
    response: str
    deadline: float = math.inf
    full_answer: str = ""


NOT_FINITE = "not_finite"
"""The further number that counts the further numbers that were nan or infinite."""

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


def completed(result: object) -> Any:
    """What a rule returned; where it is a coroutine, what that returns."""
    if not inspect.isawaitable(result):
        return result

    async def wait() -> Any:
        return await result

    return asyncio.run(wait())


def read_result(result: object) -> tuple[float, dict[str, float]]:
    """The score in what a rule returned, and its further numbers by name. Those that are not finite are left out, and
    counted under NOT_FINITE.

    Raises ScoringError: it is neither a finite number nor a mapping of names to numbers with a finite `score`.
    """
    if not isinstance(result, Mapping):
        return _finite("result", result), {}
    if "score" not in result:
        raise ScoringError(f"a rule returned {sorted(map(str, result))} without `score`")
    numbers = {str(name): _number(name, value) for name, value in result.items() if name != "score"}
    extra = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if len(extra) < len(numbers):
        extra[NOT_FINITE] = float(len(numbers) - len(extra))
    return _finite("score", result["score"]), extra


def plain(value: Any) -> Any:
    """The one element of an array or tensor that has just one; any other value as it is."""
    one = math.prod(value.shape) == 1 if hasattr(value, "item") and hasattr(value, "shape") else False
    return value.item() if one else value


def _finite(name: object, value: object) -> float:
    number = _number(name, value)
    if not math.isfinite(number):
        raise ScoringError(f"a rule's {name} is {number}; it must be a finite number")
    return number


def _number(name: object, value: object) -> float:
    number = plain(value)
    if not isinstance(number, Real):
        raise ScoringError(f"a rule's {name} is {value!r:.100}; it must be a finite number")
    return float(number)
