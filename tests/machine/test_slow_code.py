"""Calls of the user's own code that have run for long are told once, with their line."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Mapping
from types import FrameType

import pytest

from asyncrl.machine.slow_code import SlowCode, watched_code
from tests.helpers import GENEROUS_S

LIMIT_S = 5.0


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def own(watch: Callable[[], object], *moments: float, clock: Clock) -> None:
    """A call of the user's code that runs during the looks at these moments."""
    for clock.now in moments:
        watch()


def here() -> Mapping[int, FrameType]:
    return {1: sys._getframe(2)}


def test_a_call_that_runs_for_long_is_told_once_with_its_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = SlowCode(sys._getframe(), LIMIT_S, clock, here)
    own(watch.look, 0.0, 4.0, clock=clock)
    own(watch.look, 6.0, 10.0, clock=clock)
    assert caplog.messages == [], "two calls, each within the limit"
    own(watch.look, 20.0, 25.0, 30.0, clock=clock)
    [said] = caplog.messages
    assert "test_slow_code.py, line " in said
    assert said.endswith(", in own, has run for 5 s")


def test_the_frames_of_the_program_itself_are_no_code_of_the_users(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    watch = SlowCode(sys._getframe(), LIMIT_S, clock, lambda: {1: sys._getframe(2)})
    for clock.now in (0.0, 6.0):
        watch.look()
    assert caplog.messages == []


def test_a_call_that_blocks_the_event_loop_is_told_with_what_it_stops(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()

    async def tool() -> None:
        own(watch.look, 0.0, 5.0, clock=clock)

    watch = SlowCode(sys._getframe(), LIMIT_S, clock, here)
    asyncio.run(tool())
    [said] = caplog.messages
    assert "has run for 5 s and blocks the event loop. In a run, no other episode" in said
    assert "await asyncio.to_thread(...)" in said


def test_a_coroutine_that_lets_others_run_between_two_looks_has_not_run_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()

    async def episode() -> None:
        for moment in (0.0, 5.0, 10.0):
            own(watch.look, moment, clock=clock)
            await asyncio.sleep(0)

    watch = SlowCode(sys._getframe(), LIMIT_S, clock, here)
    asyncio.run(episode())
    assert caplog.messages == []


def test_a_block_is_watched_by_a_thread(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    told = threading.Event()
    monkeypatch.setattr("asyncrl.machine.slow_code.log.warning", lambda *_: told.set())

    def blocks() -> None:
        assert told.wait(GENEROUS_S)

    with watched_code(limit_s=0.02):
        blocks()
