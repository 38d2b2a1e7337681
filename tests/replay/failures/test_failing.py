"""Failures: dead letters that stay within their bounds, and a fleet that slows down while everything fails."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import pytest

from asyncrl.errors import RefusedError
from asyncrl.replay.failures.backoff import EPISODES, FIRST_S, LONGEST_S, SCORINGS, STREAK, FailureBackoff
from asyncrl.replay.starts.admission import Admission
from tests.helpers import make_trajectory
from tests.replay.support import Core, make_settings

MANY = 1000


def fail_episodes(core: Core, count: int) -> list[str]:
    """Take and fail `count` tickets, however slowly they come; their ids in the order of failing."""
    failed: list[str] = []
    while len(failed) < count:
        for ticket in core.tickets(1):
            core.fail(ticket.id)
            failed.append(ticket.id)
        core.tick(LONGEST_S)
    return failed


def fail_scorings(core: Core, count: int, length: int) -> list[str]:
    """Deliver `count` trajectories that no scorer can score; their ids in the order of being given up."""
    failed: list[str] = []
    while len(failed) < count:
        failed += core.deliver(core.tickets(1), length=length)
        while leased := core.lease():
            core.scoring_failed(leased[0].id)
        core.tick(LONGEST_S)
    return failed


def test_the_oldest_dead_letters_make_room_for_new_ones_and_are_counted(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_dead_letters=10))
    failed = fail_episodes(core, 25)
    assert set(core.dead_letters()) == set(failed[-10:])
    assert (core.status()["depth_dead"], core.status()["dead_letters_dropped"]) == (10, 15)
    assert core.status()["failures"] == 25


@pytest.mark.slow
def test_dead_letters_with_their_episodes_take_no_more_bytes_than_they_may(tmp_path: Path) -> None:
    """Without the bound they would fill the store to its high-water mark, and no ticket would be issued any more."""
    core = Core(tmp_path, make_settings(max_dead_letter_bytes=100_000, high_water_bytes=1_000_000))
    failed = fail_scorings(core, 100, length=5000)
    status = core.status()
    assert 0 < status["dead_letter_bytes"] <= 100_000
    assert status["store_bytes"] < 1_000_000
    assert status["depth_dead"] == status["depth_data"] == 100 - status["dead_letters_dropped"] > 0
    assert set(core.dead_letters()) == set(failed[-status["depth_dead"] :])
    assert core.audit()["lost"] == 0


def test_a_dead_letter_that_is_dropped_cannot_be_put_back_and_the_others_can(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_dead_letters=2))
    first, *kept = fail_episodes(core, 3)
    with pytest.raises(RefusedError, match="there is no dead letter"):
        core.requeue(first)
    assert core.requeue(kept[0]) == "task"
    core.discard(kept[1])
    status = core.status()
    assert (status["depth_dead"], status["dead_letter_bytes"], status["dead_letters_dropped"]) == (0, 0, 1)


def test_an_episode_that_is_scored_again_and_given_up_again_counts_once_until_it_is_discarded(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=2))
    (name,) = fail_scorings(core, 1, length=100)
    before = core.status()["dead_letter_bytes"]
    assert core.requeue(name) == "scoring"
    assert core.status()["dead_letter_bytes"] == 0
    while leased := core.lease():
        core.scoring_failed(leased[0].id)
    assert (core.status()["depth_dead"], core.status()["dead_letter_bytes"]) == (1, before)
    core.discard(name)
    assert (core.status()["depth_data"], core.status()["dead_letter_bytes"], core.audit()["lost"]) == (0, 0, 0)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("kind", [EPISODES, SCORINGS])
def test_once_everything_fails_tickets_come_one_at_a_time_at_doubling_intervals_until_one_ends_well(kind: str) -> None:
    clock = Clock()
    failing = FailureBackoff(clock)
    for _ in range(STREAK - 1):
        failing.failed(kind, "t1.0.0", "no such tool")
    assert (failing.allowed(MANY), failing.text()) == (MANY, "")
    failing.failed(kind, "t1.0.1", "no such tool \x1b[2J\n")
    assert failing.allowed(MANY) == 0
    times = []
    while clock.now < 10 * LONGEST_S:
        if failing.allowed(MANY):
            assert failing.allowed(MANY) == 1
            assert failing.allowed(0) == 0
            failing.issued()
            times.append(clock.now)
        clock.now += 0.5
    waits = [after - before for before, after in pairwise(times)]
    assert times[0] == FIRST_S
    assert waits == sorted(waits)
    assert waits[:3] == [FIRST_S, 2 * FIRST_S, 4 * FIRST_S]
    assert waits[-1] == LONGEST_S
    assert (
        failing.text()
        == f"the last 32 {kind} failed; one ticket every 60 s; newest failure: t1.0.1: no such tool  [2J "
    )
    failing.succeeded(kind)
    assert (failing.allowed(MANY), failing.text()) == (MANY, "")


def test_failures_between_successes_slow_nothing_down() -> None:
    failing = FailureBackoff(Clock())
    for _ in range(100):
        for _ in range(STREAK - 1):
            failing.failed(EPISODES, "t1.0.0", "now and then")
        failing.succeeded(EPISODES)
    assert failing.allowed(MANY) == MANY


def test_episodes_that_end_well_do_not_hide_that_none_can_be_scored(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    fail_scorings(core, STREAK, length=8)
    assert len(core.tickets(20)) <= 1
    assert "scorings of episodes failed" in core.status()["failing"]


def test_a_fleet_whose_episodes_all_fail_is_slowed_down_and_goes_on_at_full_speed_after_the_first_that_ends_well(
    tmp_path: Path,
) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    in_a_minute = 0
    for _ in range(600):
        for ticket in core.tickets(8):
            core.fail(ticket.id)
            in_a_minute += 1
        core.tick(0.1)
    assert STREAK <= in_a_minute < STREAK + 16
    status = core.status()
    assert status["failing"].endswith(": broken")
    core.tick(LONGEST_S)
    (probe,) = core.tickets(8)
    core.put(make_trajectory(probe))
    assert len(core.tickets(8)) == 8
    assert core.status()["failing"] == ""


def test_a_ticket_whose_reply_was_lost_is_given_again_though_everything_fails(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    held = core.tickets(2, worker="other")
    for ticket in core.tickets(STREAK):
        core.fail(ticket.id)
    assert core.tickets(1) == []
    again = core.tickets(2, worker="other")
    assert {ticket.id for ticket in again} == {ticket.id for ticket in held}


def test_an_episode_that_ends_well_hides_none_of_the_scorings_that_all_fail() -> None:
    clock = Clock()
    failing = FailureBackoff(clock)
    for _ in range(STREAK):
        failing.failed(SCORINGS, "t1.0.0", "no such judge")
    failing.succeeded(EPISODES)
    assert failing.allowed(MANY) == 0
    assert f"the last {STREAK} {SCORINGS} failed" in failing.text()
    failing.succeeded(SCORINGS)
    assert (failing.allowed(MANY), failing.text()) == (MANY, "")


def test_a_dead_letter_that_is_scored_again_counts_as_dead_no_more(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(max_attempts=2))
    (name,) = fail_scorings(core, 1, length=100)
    status = core.status()
    assert status["dead"] == 1
    assert status["tokens_dead"] > 0
    assert core.requeue(name) == "scoring"
    status = core.status()
    assert (status["dead"], status["tokens_dead"]) == (0, 0)


def test_a_run_that_keeps_less_from_now_on_keeps_the_episodes_of_its_dead_letters(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(keep_steps=math.inf, max_attempts=2))
    (name,) = fail_scorings(core, 1, length=100)
    # Something was kept that a run with less does not keep.
    core.run_episodes(4)
    core.publish(9)
    assert core.status()["evicted"] > 0
    core.restart(make_settings(max_attempts=2))
    assert core.status()["depth_data"] == 1
    assert [each.id for each in core.fetch([name])] == [name]


def test_each_kind_of_failure_is_logged_once_and_as_an_error_if_the_users_own_code_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    failing = FailureBackoff(Clock())
    for number in range(5):
        failing.failed(EPISODES, f"t{number}.0.0", f"KeyError: '{number}' (my_tools.py, line 12)")
        failing.failed(SCORINGS, f"t{number}.0.0", f"the rule took longer than {number} s")
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("ERROR", "episodes fail, such as t0.0.0: KeyError: '0' (my_tools.py, line 12)"),
        ("WARNING", "scorings of episodes fail, such as t0.0.0: the rule took longer than 0 s"),
    ]
