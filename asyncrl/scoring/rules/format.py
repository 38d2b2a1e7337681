"""The answer has a given form: used as a small reward in addition to the reward for a right answer."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.scoring.rules.confined import Confined
from asyncrl.types import Task, Trajectory


def format(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    confined: Confined,
    full_answer: str,
    pattern: str = r"####\s*\S",
    thoughts: bool = False,
    cpu_s: float = 2.0,
) -> Mapping[str, float]:
    """`score` is 1 if the regular expression `pattern` is found in the answer, else 0. With `thoughts` it may be found
    in the thoughts before the answer too. If the search takes over `cpu_s` seconds of processor time, `score` is 0 and
    `out_of_time` is 1."""
    return confined(re.compile, _found, pattern, full_answer if thoughts else answer, cpu_s)


def _found(pattern: re.Pattern[str], answer: str) -> float:
    return float(pattern.search(answer) is not None)
