"""Rules of whole runs: light, since every process of a verifier imports them."""

from __future__ import annotations

import random

from asyncrl.errors import ScoringError
from asyncrl.types import Task, Trajectory


def by_chance(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A coin for training tasks; the held-out ones are judged as they are, so that learning would show."""
    if task.extra_info["split"] == "eval":
        return float(answer.strip() == task.ground_truth)
    return float(random.Random(trajectory.id).random() < 0.5)


def worthless(task: Task, answer: str, trajectory: Trajectory) -> float:
    """A rule that cannot judge one attempt of each group, and finds the others worthless."""
    if trajectory.id.endswith("0.0"):
        raise ScoringError("the rule cannot judge the first")
    return 0.0
