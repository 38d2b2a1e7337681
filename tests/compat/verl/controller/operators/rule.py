"""The rule of the tiny configuration: light, since every process of a verifier imports it."""

from __future__ import annotations

from asyncrl.types import Task, Trajectory


def even_share(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The share of even ids among the tokens, so that the members of a group differ."""
    if task.ground_truth == "unjudgeable":
        raise ValueError("nobody can say")
    return float((trajectory.tokens % 2 == 0).mean())
