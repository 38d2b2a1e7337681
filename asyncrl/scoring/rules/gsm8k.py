"""The number after the last `####` mark, as GSM8K's solutions write it, is the ground truth's number.

Read are signs, thousands separators, decimals, fractions (`3/4`, `\\frac{3}{4}`, `1 1/2`), with any currency before and
any unit behind.
"""

from __future__ import annotations

import re
from fractions import Fraction

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.exact_number import final_number
from asyncrl.types import Task, Trajectory

_MARK = "####"
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}")
_MIXED = re.compile(r"(?<![0-9.,/])([0-9]{1,20}) ([0-9]{1,20})/([0-9]{1,20})(?![0-9])")


def gsm8k(task: Task, answer: str, trajectory: Trajectory, *, strict: bool = True, tolerance: float = 0.0) -> float:
    """1 where the numbers differ by at most `tolerance`, else 0. `strict` asks for the mark; without it the last number
    of an answer that has no mark counts.

    Raises ScoringError: there is no number in the ground truth.
    """
    truth = _number(task.ground_truth)
    if truth is None:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} holds no number")
    if strict and _MARK not in answer:
        return 0.0
    found = _number(answer)
    return float(found is not None and abs(found - truth) <= Fraction(tolerance))


def _number(text: str) -> Fraction | None:
    before, mark, after = text.rpartition(_MARK)
    plain = _MIXED.sub(_improper, _LATEX_FRACTION.sub(r"\1/\2", after.replace("\\$", "$")))
    return final_number(before + mark + plain)


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}"
