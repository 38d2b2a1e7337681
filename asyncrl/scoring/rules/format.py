"""The answer has a given form: a small reward beside that for being right."""

from __future__ import annotations

import re

from asyncrl.types import Task, Trajectory


def format(task: Task, answer: str, trajectory: Trajectory, *, pattern: str = r"####\s*\S") -> float:
    """1 where the regular expression `pattern` is found in the answer, else 0."""
    return float(re.search(pattern, answer) is not None)
