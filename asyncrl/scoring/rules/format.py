"""The answer has a given form: a small reward beside that for being right."""

from __future__ import annotations

import re
from collections.abc import Mapping

from asyncrl.scoring.rules.confined import Confinement
from asyncrl.types import Task, Trajectory


def format(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    confinement: Confinement,
    deadline: float,
    full_answer: str,
    pattern: str = r"####\s*\S",
    thoughts: bool = False,
    cpu_s: float = 2.0,
) -> Mapping[str, float]:
    """`score` is 1 where the regular expression `pattern` is found in the answer, or with `thoughts` in the answer
    and the thoughts before it, else 0. An answer on which it takes over `cpu_s` seconds of the processor scores 0, with
    `out_of_time` 1."""
    return confinement.judge(re.compile, _found, pattern, full_answer if thoughts else answer, cpu_s, deadline)


def _found(pattern: re.Pattern[str], answer: str) -> float:
    return float(pattern.search(answer) is not None)
