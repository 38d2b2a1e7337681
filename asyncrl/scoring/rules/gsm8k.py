"""The number after the last `####`, the mark of GSM8K's solutions, is the ground truth's number.

Numbers are read as `exact_number` reads them.
"""

from __future__ import annotations

from fractions import Fraction

from asyncrl.scoring.rules.exact_number import MARK, final_number, true_number
from asyncrl.types import Task, Trajectory


def gsm8k(task: Task, answer: str, trajectory: Trajectory, *, strict: bool = True, tolerance: float = 0.0) -> float:
    """1 if the numbers differ by at most `tolerance`, else 0. With `strict`, an answer without the mark gets 0. Without
    `strict`, such an answer is read as `exact_number` reads it.

    Raises ScoringError: the ground truth has no number.
    """
    truth = true_number(task)
    if strict and not MARK.search(answer):
        return 0.0
    found = final_number(answer)
    return float(found is not None and abs(found - truth) <= Fraction(tolerance))
