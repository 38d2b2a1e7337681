"""The wall clock may jump: nothing is decided by it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import asyncrl
from tests.helpers import make_trajectory
from tests.replay.support import ReplayThread

pytestmark = pytest.mark.slow

FOR_PEOPLE = {"observe/sinks.py", "actor/chat_api/server.py"}
"""Who writes down when something was, and decides nothing by it."""


def test_no_part_decides_by_the_wall_clock() -> None:
    package = Path(asyncrl.__file__).parent
    wall = re.compile(r"\btime\.time(_ns)?\b|\bdatetime\.(now|utcnow|today)\b|\bfrom time import\b")
    users = {str(path.relative_to(package)) for path in package.rglob("*.py") if wall.search(path.read_text())}
    assert users <= FOR_PEOPLE


def test_a_wall_clock_that_jumps_takes_no_lease_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ReplayThread(tmp_path) as replay:
        actor, scorer = replay.client("a"), replay.client("s")
        first, second = actor.tickets([], 2)
        actor.put(make_trajectory(first))
        assert len(scorer.lease(["rules"], 1, 1000)) == 1
        for jump in (1e9, -1e9):
            monkeypatch.setattr("time.time", lambda jump=jump: jump)
            for _ in range(3):
                assert actor.tickets([second.id], 0) == []
                scorer.renew()
        status = actor.status()
        assert (status["tickets_redelivered"], status["leases_redelivered"]) == (0, 0)
        assert actor.put(make_trajectory(second)) == "stored"
