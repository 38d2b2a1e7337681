"""Long work says how far it is and what is left, on a terminal, in a log and to who looks at the run."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from asyncrl.machine.activity import Activity
from asyncrl.machine.long_work import LINE_S, LongWork, long_work, tracked, unmeasured_work
from tests.helpers import until


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_left_follows_from_the_mean_speed() -> None:
    clock = Clock()
    work = LongWork("loading the model", 30, "GB", clock)
    assert work.text == "loading the model: 0 of 30 GB"
    clock.now += 8
    work.done = 12
    assert work.text == "loading the model: 12 of 30 GB, 12 s left"
    work.done, clock.now = 1.5, 100 + 60
    assert work.text == "loading the model: 1.5 of 30 GB, 19 min left"
    unknown = LongWork("converting", 0, "rows", clock)
    unknown.done = 12_345
    assert unknown.text == "converting: 12,345 rows"


def test_a_log_has_a_line_now_and_then_and_none_of_short_work() -> None:
    clock, lines = Clock(), list[str]()
    console, activity = Console(file=StringIO()), Activity()
    with long_work("importing", 40, "rows", activity, lines.append, console, clock) as advance:
        assert activity.work == "importing: 0 of 40 rows"
        for _ in range(40):
            clock.now += LINE_S / 8
            advance(1)
        assert activity.work == "importing: 40 of 40 rows, 0 s left"
    assert lines == [
        f"importing: {done} of 40 rows, {left} s left"
        for done, left in zip(range(8, 41, 8), (40, 30, 20, 10, 0), strict=True)
    ]
    assert activity.work == ""
    with long_work("importing", 4, "rows", None, lines.append, console, clock) as advance:
        clock.now += LINE_S - 1
        advance(4)
    assert len(lines) == 5


def test_a_terminal_has_a_bar_and_no_lines() -> None:
    shown, lines = StringIO(), list[str]()
    with long_work(
        "exporting", 4, "episodes", say=lines.append, console=Console(file=shown, force_terminal=True)
    ) as one:
        one(2)
    assert "exporting: 2 of 4 episodes" in shown.getvalue()
    assert lines == []


def test_work_that_says_nothing_itself_is_said_to_go_on_and_for_how_long() -> None:
    clock, activity, lines = Clock(), Activity(), list[str]()
    activity.work = "starting"
    with unmeasured_work("loading the model", activity, lines.append, every_s=0.01, clock=clock):
        assert activity.work.startswith("loading the model")
        clock.now += 70
        until(lambda: "loading the model: for 70 s so far" in lines)
        assert activity.work == "loading the model: for 70 s so far"
    assert activity.work == "starting"
    told = len(lines)
    with unmeasured_work("loading the model", say=lines.append):
        pass
    assert len(lines) == told


def test_unmeasured_work_that_fails_is_over() -> None:
    activity = Activity()
    with pytest.raises(OSError, match="no such file"), unmeasured_work("loading", activity):
        raise OSError("no such file")
    assert activity.work == ""


def test_the_items_of_tracked_work_come_through_and_work_that_fails_is_over() -> None:
    activity = Activity()
    assert list(tracked(range(3), "reading", 3, "files", activity)) == [0, 1, 2]
    for _ in tracked(range(3), "reading", 3, "files", activity):
        assert activity.work.startswith("reading: ")
        break
    assert activity.work == ""


@pytest.mark.parametrize("total", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("what", ["loading [/models/a]", "[bold]", "\x1b[2J\udc80"])
def test_neither_a_wrong_total_nor_a_strange_name_ends_the_work(what: str, total: float) -> None:
    console = Console(file=StringIO(), force_terminal=True, width=20)
    with long_work(what, total, "GB", console=console) as advance:
        advance(1)
    assert LongWork(what, total, "GB").left_s is None
