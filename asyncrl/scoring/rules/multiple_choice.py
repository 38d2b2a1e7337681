"""The option that the answer names is the ground truth's.

An option is one capital letter. The answer's is, in this order: the last boxed one, the last behind `####` or "answer
is", the last in brackets, or the letter that stands alone at the start, as in `C` and `C) Paris`.
"""

from __future__ import annotations

import re

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory

_LETTER = r"\(?\**([A-Z])\**\)?(?![A-Za-z'’])"
_PLACES = (
    re.compile(rf"\\boxed\{{\s*(?:\\text\{{)?\s*{_LETTER}"),
    re.compile(rf"(?:####|(?i:answer\s*(?:is:?|:|=)))\s*(?i:option\s+)?\**\s*{_LETTER}"),
    re.compile(r"\(([A-Z])\)"),
    re.compile(r"\A\s*\**([A-Z])\**(?:\s*\Z|[.):,])"),
)


def multiple_choice(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer names the ground truth's letter, else 0. Raises ScoringError: the ground truth names none."""
    truth = _option(task.ground_truth)
    if truth is None:
        raise ScoringError(f"the ground truth {task.ground_truth!r:.100} of task {task.id} names no option")
    return float(_option(answer) == truth)


def _option(text: str) -> str | None:
    for place in _PLACES:
        if found := place.findall(text):
            return str(found[-1])
    return None
