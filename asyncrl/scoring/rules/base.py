"""The interface of a rule: its signature, its input and its result."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, Protocol

from asyncrl.errors import ScoringError
from asyncrl.sandbox.sandboxes import THIS_MACHINE, Sandbox
from asyncrl.text import cut
from asyncrl.types import Reason, Task, Trajectory


class Rule(Protocol):
    """Scores one episode. `answer` is the text of the last assistant turn after its thoughts.

    It is empty if a thought is open or the episode was cut at a tool call.

    Returns the outcome, or a mapping with the outcome as `score`, named further numbers, and maybe two texts. `pred` is
    the answer that the rule read, on which attempts at a task vote in evaluations. `reason` says why in words, and is
    kept with the episode. An exception is a failure of the rule: the episode is tried again, and never scored zero.

    Further keyword parameters are options of the rule, except these, which the pool passes: `deadline`, the time (of
    `time.monotonic`) by which the rule must return; `full_answer`, the answer with its thoughts; `confined`, a
    `Confined`; `sandbox`, that of `actor.sandbox`.
    """

    def __call__(self, *, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float | str]: ...


@dataclass(frozen=True, slots=True, eq=False)
class RuleInput:
    """One episode for rules: `answer` without its thoughts and `full_answer` with them.

    `response` is all text after the prompt, tool results included. The rules must return by `deadline` (of
    `time.monotonic`), and run the policy's programs in `sandbox`.
    """

    task: Task
    trajectory: Trajectory
    answer: str
    response: str
    deadline: float = math.inf
    full_answer: str = ""
    sandbox: Sandbox = THIS_MACHINE

    def copy(self) -> RuleInput:
        """An equal input for one rule, which may change what is in it. Arrays are shared: those from the wire are
        read-only."""
        return replace(self, task=self.task.copy(), trajectory=self.trajectory.copy())


RuleFunction = Callable[[RuleInput], Any]
"""A rule of any signature, as the pool calls it."""

VOTE = "pred"
"""The name under which a rule, as in verl, may return the answer that it read, as text."""
REASON = "reason"
"""The name under which a rule may say why, as text."""
TEXTS = (VOTE, REASON)
SHORT_REASON_CHARS = 2000
"""Longer reasons lose their middle."""
NOT_FINITE = "not_finite"
"""The name of a number that counts a rule's further numbers that were nan or infinite."""


@dataclass(frozen=True, slots=True)
class RuleScores:
    """The scores of a task's rules.

    `outcome` is the score of the first rule, which says whether the answer is right; `total` is the weighted sum of
    all. `scores` has each rule's score by name, and its further numbers as RULE/NAME. For `vote` and `reasons` see
    `Labels`.
    """

    outcome: float
    total: float
    scores: Mapping[str, float] = field(default_factory=dict)
    vote: str = ""
    reasons: Sequence[Reason] = ()


def completed(result: Any) -> Any:
    """The result of a rule; if that is a coroutine, the coroutine's result."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def read_result(result: object) -> tuple[float, dict[str, float]]:
    """The score in a rule's result, and its further numbers by name. Numbers that are not finite are left out, and
    counted under NOT_FINITE; a text under one of TEXTS is no number, and is left out too.

    Raises ScoringError: it is neither a finite number nor a mapping of names to numbers with a finite `score`.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ScoringError(f"a rule returned {sorted(map(str, given))} without `score`")
    numbers = {
        str(name): _number(name, value)
        for name, value in given.items()
        if not (name in TEXTS and isinstance(value, str))
    }
    score = numbers.pop("score")
    if not math.isfinite(score):
        raise ScoringError(f"a rule's score is {score}; it must be a finite number")
    extra = {name: value for name, value in numbers.items() if math.isfinite(value)}
    if len(extra) < len(numbers):
        extra[NOT_FINITE] = float(len(numbers) - len(extra))
    return score, extra


def read_reason(result: object) -> str:
    """The reason in a rule's result, at most SHORT_REASON_CHARS and a note; empty without one."""
    found = result.get(REASON) if isinstance(result, Mapping) else None
    return cut(found.strip(), SHORT_REASON_CHARS) if isinstance(found, str) else ""


def plain(value: Any) -> Any:
    """The element of an array or tensor that has just one; any other value unchanged."""
    one = math.prod(value.shape) == 1 if hasattr(value, "item") and hasattr(value, "shape") else False
    return value.item() if one else value


def _number(name: object, value: object) -> float:
    number = plain(value)
    if not isinstance(number, Real):
        raise ScoringError(f"a rule's {name} is {value!r:.100}; it must be a finite number")
    return float(number)
