"""The option that the answer names is the ground truth's.

An option is one capital letter, or a small one in brackets. The answer's is, in this order: the last boxed one, the
last behind `####` or "answer is", the last that "is correct", the last that is chosen ("I choose B."), the last in
brackets, the last behind "option", or the letter that stands alone at the start, as in `C` and `C) Paris`.
"""

from __future__ import annotations

import re

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory

_LETTER = r"\(?\**(?:([A-Z])\**\)?(?![A-Za-z'’])|(?<=\()([a-z])\))"
_END = r"(?=\s*(?:[.,;:!)]|\Z|\n))"
_PLACES = (
    re.compile(rf"\\boxed\{{\s*(?:\\(?:text|textbf|textrm|mathrm|mathbf|bf)\b\s*\{{?\s*)?{_LETTER}"),
    re.compile(rf"(?:####|(?i:(?:answer|option|choice)\s*(?:is:?|:|=)))\s*(?i:option\s+)?\**\s*{_LETTER}"),
    re.compile(r"(?<![A-Za-z'’])([A-Z])\)?\**\s+is\s+(?:the\s+)?(?:correct|right)\b"),
    re.compile(rf"(?i:\b(?:choose|chose|pick|select))\s+(?i:option\s+)?{_LETTER}{_END}"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"(?i:\boption)\s+\**([A-Z])\b(?!['’])"),
    re.compile(r"\A\s*(?:\**([A-Z])\**(?:\s*\Z|[.):,])|\(([a-z])\))"),
)


def multiple_choice(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer names the ground truth's letter, else 0. Raises ScoringError: the ground truth names none."""
    truth = _option(task.ground_truth)
    if truth is None:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} names no option")
    return float(_option(answer) == truth)


def _option(text: str) -> str | None:
    for place in _PLACES:
        if found := list(place.finditer(text)):
            return str(found[-1][found[-1].lastindex or 0]).upper()
    return None
