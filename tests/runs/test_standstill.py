"""A run that makes no progress says whom it waits for, even if a look at it hangs or fails."""

from __future__ import annotations

import threading

import pytest

from asyncrl.runs.standstill import LOOK_S, STILL_S, Standstill
from tests.helpers import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_it_looks_once_nothing_changes_and_is_silent_when_the_run_goes_on() -> None:
    clock, answers = Clock(), iter(["scoring-0 has been silent for 30 s", "scoring-0 has been silent for 35 s"])
    still = Standstill(lambda: next(answers), clock)
    assert still.text(1) == ""
    clock.now += STILL_S - 1
    assert still.text(1) == ""
    clock.now += 1
    until(lambda: still.text(1) == "scoring-0 has been silent for 30 s")
    clock.now += LOOK_S
    until(lambda: still.text(1) == "scoring-0 has been silent for 35 s")
    assert still.text(2) == ""
    still.close()


def test_a_look_that_hangs_holds_up_nobody_and_one_that_fails_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock, answered = Clock(), threading.Event()

    def look() -> str:
        answered.wait()
        raise RuntimeError("the store is gone")

    still = Standstill(look, clock)
    still.text(1)
    for _ in range(3):
        clock.now += STILL_S
        assert still.text(1) == ""
    answered.set()
    for _ in range(3):
        still.close()
        clock.now += LOOK_S
        assert still.text(1) == ""
    still.close()
    assert caplog.text.count("the store is gone") == 1


def test_what_a_look_of_an_earlier_standstill_finds_is_not_said_of_the_next() -> None:
    clock, answered = Clock(), threading.Event()

    def look() -> str:
        answered.wait()
        return "scoring-0 has been silent for 30 s"

    still = Standstill(look, clock)
    still.text(1)
    clock.now += STILL_S
    assert still.text(1) == ""
    assert still.text(2) == "", "the run goes on while the look is under way"
    answered.set()
    still.close()
    clock.now += STILL_S
    answered.clear()
    assert still.text(2) == ""
    answered.set()
    still.close()
