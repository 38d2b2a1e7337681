"""The reward that the environment of an episode gave."""

from __future__ import annotations

from asyncrl.types import Task, Trajectory


def environment(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The sum of the episode's rewards, of its agent, environment or tools, and of the scores of its turns."""
    return sum(trajectory.rewards.values()) + sum(turn.score or 0.0 for turn in trajectory.turns)
