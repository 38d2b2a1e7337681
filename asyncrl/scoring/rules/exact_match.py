"""The answer is the ground truth, word for word."""

from __future__ import annotations

from asyncrl.types import Task, Trajectory


def exact_match(task: Task, answer: str, trajectory: Trajectory) -> float:
    """1 where the answer equals the ground truth, apart from white space around them, else 0."""
    return float(answer.strip() == task.ground_truth.strip())
