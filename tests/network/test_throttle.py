"""Lines about strangers come at a bounded rate, and none is forgotten."""

from __future__ import annotations

import logging

import pytest

from asyncrl.network.throttle import MAX_REASON, Throttled


def test_the_first_are_said_at_once_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    warnings = Throttled(logging.getLogger("t"), "refused", burst=3, every_s=5.0, clock=lambda: now[0])
    for index in range(1000):
        warnings.say(f"reason {index}")
    assert [record.getMessage() for record in caplog.records] == [f"refused: reason {index}" for index in range(3)]
    now[0] = 5.0
    warnings.say("x" * 10_000)
    warnings.say("unsaid")
    assert caplog.records[-1].getMessage() == f"refused (and 997 times more since the last line): {'x' * MAX_REASON}"
    assert len(caplog.records) == 4


def test_a_stranger_cannot_write_lines_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    Throttled(logging.getLogger("t"), "refused").say("x\n2026-01-01 ERROR the store is lost\x1b[2J")
    assert caplog.records[-1].getMessage() == "refused: x\\n2026-01-01 ERROR the store is lost\\x1b[2J"
