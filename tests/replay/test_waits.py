"""What the learner waits for is told by its cause."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings


def waited(core: Core) -> tuple[float, float]:
    status = core.status()
    return status["learner_waited_for_episodes_s"], status["learner_waited_for_labels_s"]


def test_waiting_counts_for_episodes_until_they_are_there_and_for_labels_from_then_on(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(), lease_s=100.0)
    tickets = core.tickets(4)
    core.tick(5)
    assert waited(core) == (0, 0)
    assert core.plan(0) is None
    core.tick(2)
    for ticket in tickets:
        core.put(make_trajectory(ticket))
    core.tick(0)
    core.now += 3
    for trajectory in core.lease():
        core.label(trajectory.id)
    assert core.plan(0) is not None
    core.tick(7)
    assert waited(core) == (2, 3)
