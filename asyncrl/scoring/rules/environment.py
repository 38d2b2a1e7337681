"""The reward that the environment gave in the episode."""

from __future__ import annotations

from asyncrl.types import Task, Trajectory


def environment(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The sum of the rewards from the agent, environment and tools, and of the scores of the turns."""
    return sum(trajectory.rewards.values()) + sum(turn.score or 0.0 for turn in trajectory.turns)
