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
from asyncrl.text import cut, short_repr
from asyncrl.types import LARGEST_FLOAT32, Reason, Task, Trajectory


class Rule(Protocol):
    """Scores one episode. `answer` is the text of the last assistant turn after its thoughts.

    `answer` is empty if a thought is still open, or if the episode was cut off while its last turn still called tools.
    Returns the outcome, or a mapping with the outcome as `score`, further numbers by name, and perhaps the texts `pred`
    and `reason`.

    `pred` is the answer that the rule found. Evaluations compare the `pred` of a task's attempts to find the majority
    answer.
    `reason` explains the score, and is kept with the episode. An exception is a failure of the rule: the episode is
    scored again, and never gets zero for the failure.

    A rule gets the keyword arguments below if it has parameters of these names. All its other parameters are options,
    set in the configuration.

    - `deadline`: the time (of `time.monotonic`) by which the rule must return
    - `full_answer`: the answer with its thoughts
    - `confined`: compares answers under limits on processor time and memory (see `Confined`)
    - `sandbox`: the sandbox of `actor.sandbox`
    """

    def __call__(self, *, task: Task, answer: str, trajectory: Trajectory) -> float | Mapping[str, float | str]: ...


@dataclass(frozen=True, slots=True)
class RunStep:
    """`step`: the learner step whose policy played an episode. `steps`: the last learner step of the run; 0 if it is
    unknown."""

    step: int = 0
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class RuleInput:
    """One episode for rules.

    - `answer`: the answer without its thoughts; `full_answer`: the answer with them
    - `response`: all text after the prompt, tool results included
    - `turn_texts`: the text of each turn after the prompt of the last branch
    - `deadline`: the time (of `time.monotonic`) by which the rules must return
    - `sandbox`: the sandbox in which rules run the policy's programs
    """

    task: Task
    trajectory: Trajectory
    answer: str
    response: str
    deadline: float = math.inf
    full_answer: str = ""
    sandbox: Sandbox = THIS_MACHINE
    turn_texts: Sequence[str] = ()
    progress: RunStep = RunStep()

    def copy(self) -> RuleInput:
        """An equal input for one rule, which may change it. Arrays are not copied, because arrays that came in a
        message are read-only.
        """
        return replace(self, task=self.task.copy(), trajectory=self.trajectory.copy())


RuleFunction = Callable[[RuleInput], Any]
"""A rule of any signature, wrapped so that it takes a RuleInput."""

VOTE = "pred"
"""The key under which a rule may return the answer that it found, as text. verl uses the same name."""
ACC = "acc"
"""The key under which a rule may say if the answer is right, apart from its score. verl uses the same name."""
REASON = "reason"
"""The key under which a rule may explain its score, as text."""
TEXTS = (VOTE, REASON)
SHORT_REASON_CHARS = 2000
SKIPPED = object()
"""The score that means that a rule does not apply to an episode. The weighted sum leaves such a rule out."""
NOT_FINITE = "not_finite"
"""The name of a further number of a rule: the count of its further numbers that were left out because they were not
finite as a float32."""


@dataclass(frozen=True, slots=True)
class RuleScores:
    """The scores that a task's rules gave to an episode.

    - `outcome`: says if the answer is right: `acc` of the first rule that applies, or its score if it gives no `acc`
    - `total`: the weighted sum of all rules' scores
    - `scores`: each rule's score by name, and its further numbers as RULE/NAME
    - `vote` and `reasons`: see `Labels`
    """

    outcome: float
    total: float
    scores: Mapping[str, float] = field(default_factory=dict)
    vote: str = ""
    reasons: Sequence[Reason] = ()


def completed(result: Any) -> Any:
    """`result`, or if it is a coroutine, the coroutine's result."""

    async def wait() -> Any:
        return await result

    return asyncio.run(wait()) if inspect.isawaitable(result) else result


def read_result(result: object, rule: str = "a rule") -> tuple[float | None, dict[str, float]]:
    """The score in the result of `rule`, and its further numbers by name. The score is None if the rule does not apply.

    A number is finite if it is finite as a float32. Further numbers that are not finite are left out, and counted under
    NOT_FINITE. Texts under TEXTS are left out too.

    Raises ScoringError: the result is neither a finite number nor a mapping of names to numbers with a finite `score`,
    or its `acc` is not finite.
    """
    given = result if isinstance(result, Mapping) else {"score": result}
    if "score" not in given:
        raise ScoringError(f"{rule} returned {sorted(map(str, given))} without `score`")
    numbers = {
        str(name): _number(f"{rule}'s {name}", value)
        for name, value in given.items()
        if not (name in TEXTS and isinstance(value, str)) and value is not SKIPPED
    }
    extra = {name: value for name, value in numbers.items() if abs(value) <= LARGEST_FLOAT32}
    if left_out := numbers.keys() - extra.keys():
        for name in left_out & {"score", ACC}:
            raise ScoringError(f"{rule}'s {name} is {numbers[name]}; it must be a finite number that fits into float32")
        extra[NOT_FINITE] = float(len(left_out))
    return extra.pop("score", None), extra


def read_reason(result: object) -> str:
    """The reason in a rule's result, or "". A reason longer than SHORT_REASON_CHARS loses its middle."""
    found = result.get(REASON) if isinstance(result, Mapping) else None
    return cut(found.strip(), SHORT_REASON_CHARS) if isinstance(found, str) else ""


def plain(value: Any) -> Any:
    """The element of an array or tensor with one element; any other value unchanged."""
    one = math.prod(value.shape) == 1 if hasattr(value, "item") and hasattr(value, "shape") else False
    return value.item() if one else value


def _number(name: str, value: object) -> float:
    number = plain(value)
    try:
        if isinstance(number, Real):
            return float(number)
    except OverflowError:
        pass  # A whole number above the largest float, which is refused below.
    raise ScoringError(f"{name} is {short_repr(value)}; it must be a finite number")
