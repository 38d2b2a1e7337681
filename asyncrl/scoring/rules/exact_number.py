"""The number that the answer ends with is the number of the ground truth, compared exactly.

The answer's number is the first after the last `####` mark where there is one, else the last in the text. Read are
signs, thousands separators, decimals, exponents and fractions: `-1,234.50`, `.5`, `1e3`, `3/4`. A minus behind a digit
or a closing bracket is an operator. Behind the mark, what goes on as no number does (`1,2345`, `1½`) is none.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory

_MARK = "####"
_UNSIGNED = r"(?:[0-9]{1,3}(?:,[0-9]{3}){1,20}(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+"
_NUMBER = re.compile(rf"(?:(?<![0-9)\]])[-+])?(?:{_UNSIGNED})(?:[eE][-+]?[0-9]{{1,3}}(?![0-9]))?(?:/[0-9]+)?")
_GOES_ON = re.compile(r"[.,/]?[0-9]|[eE][-+]?[0-9]|[¼-¾⅐-⅞]")
_MAX_DIGITS = 1000
"""No true answer is longer, and reading a number takes time quadratic in its length."""


def exact_number(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer's number equals the ground truth's, else 0.

    Raises ScoringError: there is no number in the ground truth.
    """
    truth = final_number(task.ground_truth)
    if truth is None:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} holds no number")
    return float(final_number(answer) == truth)


def final_number(text: str) -> Fraction | None:
    """The number that `text` ends with, or None."""
    _, mark, after = text.replace("−", "-").rpartition(_MARK)
    if mark:
        first = _NUMBER.search(after)
        return None if first is None or _GOES_ON.match(after, first.end()) else _parse(first[0])
    numbers = _NUMBER.findall(after)
    return _parse(numbers[-1]) if numbers else None


def _parse(number: str) -> Fraction | None:
    top, _, bottom = number.replace(",", "").partition("/")
    if len(number) > _MAX_DIGITS or (bottom and not int(bottom)):
        return None
    return Fraction(Decimal(top)) / int(bottom or 1)
