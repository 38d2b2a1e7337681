"""The number after the last `####` mark, as GSM8K's solutions write it, is the ground truth's number.

Read are signs, thousands separators (`1,000`, `1 000`, `1,00,000`), decimals, exponents (`1e3`), fractions (`3/4`,
`\\frac{3}{4}`, `1 1/2`, `1½`), with any currency before and any unit behind. `1,2345` and `1.234,50` are no numbers.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.exact_number import final_number
from asyncrl.types import Task, Trajectory

_MARK = "####"
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([0-9]{1,20})\}\{([0-9]{1,20})\}")
_SPACED = r"[0-9]{1,3}(?:[ \u00a0\u2009\u202f][0-9]{3}){1,20}"
_INDIAN = r"[0-9]{1,2}(?:,[0-9]{2}){1,20},[0-9]{3}"
_GROUPED = re.compile(rf"(?<![0-9.,/])(?:{_SPACED}|{_INDIAN})(?![0-9/,])")

_VULGAR = re.compile(r"([0-9]?)\s?([¼-¾⅐-⅞])")
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
    if mark:
        after = _GROUPED.sub(lambda match: re.sub("[^0-9]", "", match[0]), after, count=1)
    plain = _VULGAR.sub(_fraction, _LATEX_FRACTION.sub(r"\1/\2", after.replace("\\$", "$")))
    return final_number(before + mark + _MIXED.sub(_improper, plain))


def _fraction(match: re.Match[str]) -> str:
    whole, sign = match.groups()
    return f"{whole}{' ' if whole else ''}{unicodedata.normalize('NFKC', sign).replace(chr(0x2044), '/')}"


def _improper(match: re.Match[str]) -> str:
    whole, top, bottom = map(int, match.groups())
    return f"{whole * bottom + top}/{bottom}"
