"""The episode makes the tool calls of the ground truth, which is JSON: `[{"name": ..., "arguments": {...}}]`."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

from asyncrl.errors import ScoringError
from asyncrl.types import Role, Task, ToolCall, Trajectory

ARGUMENTS = ("exact", "subset", "ignore")


def tool_calls(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    order: bool = True,
    extra_calls: bool = False,
    arguments: str = "exact",
    tolerance: float = 0.0,
    partial: bool = False,
    every_branch: bool = False,
) -> Mapping[str, float]:
    """`score` is 1 if the episode makes every expected call, else 0. `matched` is the share of the expected calls
    that the episode makes.

    `order` requires the expected order, and `extra_calls` allows further calls. Arguments must be exactly the expected
    ones (`exact`), include them (`subset`), or are not compared (`ignore`). Numbers may differ by `tolerance`,
    absolutely or relatively. With `partial` the score is the number of matching calls divided by the number of expected
    calls. If `extra_calls` is false and the episode made more calls than expected, the divisor is the number of calls
    made. Only calls of the last branch count, including those in the history that it repeats. With `every_branch`, the
    calls of all branches count once each, in the order in which the branches ended.

    Raises ScoringError: the ground truth is not a list of calls, or an option is unknown.
    """
    if arguments not in ARGUMENTS:
        raise ScoringError(f"tool_calls: arguments={arguments}; use one of {', '.join(ARGUMENTS)}")
    expected = _expected(task)
    # The prompt of a branch has the calls that it repeats from other branches.
    start = trajectory.branches[-1][0]
    counted = [
        turn for turn in trajectory.turns if (turn.role is Role.ASSISTANT if every_branch else turn.start >= start)
    ]
    made = [call for turn in counted for call in turn.tool_calls]

    def fits(wanted: ToolCall, call: ToolCall) -> bool:
        if wanted.name != call.name or arguments == "ignore":
            return wanted.name == call.name
        names = wanted.arguments.keys() | (call.arguments.keys() if arguments == "exact" else ())
        both = wanted.arguments.keys() & call.arguments.keys()
        return names <= both and all(_same(wanted.arguments[name], call.arguments[name], tolerance) for name in names)

    matched = (_in_order if order else _in_any_order)(expected, made, fits)
    complete = matched == len(expected) and (extra_calls or len(made) == len(expected))
    longer = len(expected) if extra_calls else max(len(expected), len(made))
    share = matched / longer if longer else 1.0
    return {"score": share if partial else float(complete), "matched": matched / len(expected) if expected else 1.0}


def _expected(task: Task) -> list[ToolCall]:
    try:
        return [ToolCall(str(call["name"]), dict(call.get("arguments", {}))) for call in json.loads(task.truth_text)]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ScoringError(
            f"the ground truth of task {task.id} must be a JSON list of calls with name and arguments "
            f"({type(error).__name__}: {error})"
        ) from error


def _same(wanted: Any, given: Any, tolerance: float) -> bool:
    if isinstance(wanted, Mapping) and isinstance(given, Mapping):
        return wanted.keys() == given.keys() and all(_same(wanted[name], given[name], tolerance) for name in wanted)
    if isinstance(wanted, list) and isinstance(given, list):
        return len(wanted) == len(given) and all(map(_same, wanted, given, [tolerance] * len(wanted)))
    if isinstance(wanted, bool) or isinstance(given, bool):
        return wanted is given
    if isinstance(wanted, Real) and isinstance(given, Real):
        try:
            return math.isclose(wanted, given, rel_tol=tolerance, abs_tol=tolerance)
        except OverflowError:  # An integer is too large for a float.
            return bool(wanted == given)
    if isinstance(wanted, str) and isinstance(given, str):
        return wanted.strip() == given.strip()
    return bool(wanted == given)


Fits = Callable[[ToolCall, ToolCall], bool]


def _in_order(expected: Sequence[ToolCall], made: Sequence[ToolCall], fits: Fits) -> int:
    """The length of the longest subsequence that the expected and the made calls have in common."""
    row = [0] * (len(made) + 1)
    for wanted in expected:
        before, row = row, [0]
        for index, call in enumerate(made):
            row.append(before[index] + 1 if fits(wanted, call) else max(before[index + 1], row[index]))
    return row[-1]


def _in_any_order(expected: Sequence[ToolCall], made: Sequence[ToolCall], fits: Fits) -> int:
    """The size of a maximum matching of expected and made calls, found by augmenting paths."""
    owner: dict[int, int] = {}

    def place(wanted: int, tried: set[int]) -> bool:
        for index, call in enumerate(made):
            if index not in tried and fits(expected[wanted], call):
                tried.add(index)
                if index not in owner or place(owner[index], tried):
                    owner[index] = wanted
                    return True
        return False

    return sum(place(wanted, set()) for wanted in range(len(expected)))
