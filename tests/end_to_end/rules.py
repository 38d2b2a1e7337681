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


def uneven(task: Task, answer: str, trajectory: Trajectory) -> dict[str, float]:
    """A rule that has a further number for most attempts, but for the first of every second group."""
    group, member, attempt = trajectory.id.split(".")
    numbers = {"score": float(random.Random(trajectory.id).random() < 0.5)}
    is_without = int(group[1:]) % 2 == 0 and (member, attempt) == ("0", "0")
    return numbers if is_without else {**numbers, "style": float(len(answer) % 3)}
