"""Code that blocks the event loop is named with its line, once."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from types import FrameType

import pytest

from asyncrl.machine.activity import Activity
from asyncrl.machine.blocked_loop import BLOCKED_S, BlockedLoop, watched_loop
from tests.helpers import GENEROUS_S


def frame_here() -> FrameType:
    return sys._getframe()


def test_a_line_that_blocks_is_logged_once_and_shown_until_the_loop_runs_again(caplog: pytest.LogCaptureFixture):
    now, activity = 0.0, Activity()
    frame = frame_here()
    watch = BlockedLoop(7, activity, clock=lambda: now, frames=lambda: {7: frame})
    now = BLOCKED_S - 1
    watch.look()
    assert (activity.work, caplog.messages) == ("", [])
    for later in (BLOCKED_S, BLOCKED_S + 1):
        now = later
        watch.look()
        assert activity.work.startswith("blocked by tests/machine/test_blocked_loop.py, line ")
    assert len(caplog.messages) == 1
    assert ", in frame_here has blocked the event loop for 5 s" in caplog.messages[0]
    watch.tick()
    watch.look()
    assert activity.work == ""


def test_a_loop_that_asyncrl_itself_keeps_busy_is_not_named(caplog: pytest.LogCaptureFixture):
    activity = Activity()
    activity.work = "loading the model"
    watch = BlockedLoop(7, activity, limit_s=0.0, frames=dict)
    watch.look()
    assert (activity.work, caplog.messages) == ("loading the model", [])


async def test_a_function_that_waits_without_await_is_named_in_a_real_loop():
    logged, found = threading.Event(), list[str]()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record.getMessage())
            logged.set()

    logger, handler = logging.getLogger("asyncrl.machine.blocked_loop"), Handler()
    logger.addHandler(handler)
    try:
        with watched_loop(limit_s=0.1):
            await asyncio.sleep(0)
            assert logged.wait(GENEROUS_S)
    finally:
        logger.removeHandler(handler)
    assert "test_blocked_loop.py, line" in found[0]
