"""What the learner waits for is told by its cause."""

from __future__ import annotations

from pathlib import Path

from asyncrl.wire import Message
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_rules


def ask(core: Core, step: int = 0) -> bool:
    with core.store.transaction() as tx:
        return core.service.handle(tx, Message("plan", 0, {"step": step})) is not None


def waited(core: Core) -> tuple[float, float]:
    with core.store.transaction() as tx:
        report = core.service.report(tx)
    return report["learner_waited_for_episodes_s"], report["learner_waited_for_labels_s"]


def test_waiting_counts_for_episodes_until_they_are_there_and_for_labels_from_then_on(tmp_path: Path) -> None:
    core = Core(tmp_path, make_rules(), lease_s=100.0)
    tickets = core.tickets(4)
    core.tick(5)
    assert waited(core) == (0, 0)
    assert not ask(core)
    core.tick(2)
    for ticket in tickets:
        core.put(make_trajectory(ticket))
    core.tick(0)
    core.now += 3
    for trajectory in core.lease():
        core.label(trajectory.id)
    assert ask(core)
    core.tick(7)
    assert waited(core) == (2, 3)
