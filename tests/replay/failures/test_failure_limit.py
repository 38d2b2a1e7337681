"""Failures end a run in which nothing ends well, or too large a share of everything fails; an outage does not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.errors import TooManyFailuresError
from asyncrl.replay.failures.failure_limit import (
    FEWEST,
    FEWEST_IN_WINDOW,
    SINGLE_GROUP_S,
    START_S,
    WINDOW,
    WINDOW_S,
    FailureLimit,
)
from asyncrl.replay.starts.admission import Admission
from tests.replay.support import Core, ReplayThread, make_settings


class Run:
    """A limit, its clock, and episodes that last `seconds` each."""

    def __init__(self, max_share: float | None = None) -> None:
        self.now = 0.0
        self.limit = FailureLimit("episodes", lambda: self.now, max_share)
        self._count = 0

    def fail(self, count: int, seconds: float = 1.0, groups: int = 4) -> None:
        for _ in range(count):
            self._end(seconds, lambda name: self.limit.failed(name, f"g{self._count % groups}", "KeyError: 'city'\x1b"))

    def succeed(self, count: int, seconds: float = 1.0) -> None:
        for _ in range(count):
            self._end(seconds, self.limit.succeeded)

    def _end(self, seconds: float, end: Callable[[str], None]) -> None:
        self._count += 1
        self.limit.began(f"t{self._count}")
        self.now += seconds
        end(f"t{self._count}")


def test_a_run_none_of_whose_first_episodes_ends_well_ends_with_the_newest_failure() -> None:
    run = Run()
    run.fail(FEWEST, seconds=0.1)
    assert run.limit.verdict() == ""
    run.fail(1, seconds=START_S)
    assert run.limit.verdict() == (
        f"none of the first {FEWEST + 1} episodes ended well; the newest failure is t{FEWEST + 1}: KeyError: 'city' "
    )
    run.succeed(1)
    assert run.limit.verdict() == ""


def test_few_failures_do_not_end_a_run_however_long_ago_they_were() -> None:
    run = Run()
    run.fail(FEWEST - 1)
    run.now += 10 * SINGLE_GROUP_S
    assert run.limit.verdict() == ""


def test_a_single_group_that_fails_may_be_a_bad_task_and_has_more_time() -> None:
    run = Run()
    run.fail(2 * FEWEST, seconds=0, groups=1)
    run.now += SINGLE_GROUP_S - 1
    assert run.limit.verdict() == ""
    run.now += 1
    assert run.limit.verdict()


def test_nothing_is_decided_while_an_episode_runs_for_longer_than_any_that_failed() -> None:
    run = Run()
    run.limit.began("slow")
    run.fail(4 * FEWEST)
    run.now += START_S
    assert run.limit.verdict() == ""
    run.limit.left("slow")
    assert run.limit.verdict()


def test_an_outage_in_the_middle_of_a_run_does_not_end_it_and_neither_does_one_behind_a_restart() -> None:
    run, resumed = Run(), Run()
    run.succeed(FEWEST_IN_WINDOW)
    resumed.limit.resume(WINDOW)
    for each in (run, resumed):
        each.fail(1000, seconds=10)
        assert each.limit.verdict() == ""


def test_a_tool_that_nearly_always_fails_ends_a_run_though_a_few_episodes_never_call_it() -> None:
    run = Run()
    for _ in range(4):
        run.fail(49, seconds=0.1)
        run.succeed(1, seconds=0.1)
    assert run.limit.verdict() == ""
    run.now += WINDOW_S
    assert run.limit.verdict().startswith(
        "98% of the last 200 episodes failed, and the share has never been below 50%; the newest failure is t199: "
    )


def test_fast_failures_do_not_end_a_run_whose_other_episodes_are_slow() -> None:
    run = Run()
    slow = [f"slow {number}" for number in range(80)]
    for name in slow:
        run.limit.began(name)
    run.fail(120, seconds=0.01)
    run.now += WINDOW_S
    assert run.limit.verdict() == ""
    for name in slow[:10]:
        run.limit.succeeded(name)
    assert run.limit.verdict() == ""
    for name in slow[10:]:
        run.limit.failed(name, "g", "KeyError")
    run.now += WINDOW_S
    assert "ended well" not in run.limit.verdict()
    assert "of the last 200 episodes failed" in run.limit.verdict()


def test_a_share_of_failures_ends_a_run_only_if_it_lasts() -> None:
    run = Run(max_share=0.7)
    run.succeed(WINDOW, seconds=0.1)
    for _ in range(10):
        run.fail(7, seconds=0.1)
        run.succeed(13, seconds=0.1)
    for _ in range(30):
        run.fail(8, seconds=0.1)
        run.succeed(2, seconds=0.1)
    assert run.limit.verdict() == ""
    run.now += WINDOW_S
    assert "80% of the last 200 episodes failed, and actor.max_failure_share=0.7 was reached" in run.limit.verdict()
    run.succeed(WINDOW // 4, seconds=0)
    assert run.limit.verdict() == ""


def fail_all(core: Core, seconds: float) -> None:
    for _ in range(int(seconds)):
        for ticket in core.tickets(8):
            core.fail(ticket.id)
        core.tick(1.0)


def test_the_learner_is_told_and_after_a_restart_the_run_has_its_chance_again(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    fail_all(core, START_S)
    with pytest.raises(
        TooManyFailuresError, match=r"none of the first .* episodes ended well(.|\n)*inspect dead-letters RUN`"
    ):
        core.plan(0)
    core.evaluate(0)
    with pytest.raises(TooManyFailuresError):
        core.evaluation(0)
    core.restart()
    assert core.plan(0) is None
    core.tick(100.0)
    core.run_episodes(FEWEST_IN_WINDOW)
    fail_all(core, 4 * START_S)
    assert core.plan(0)


def test_scorings_that_all_fail_end_a_run_though_its_episodes_end_well(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    for _ in range(int(SINGLE_GROUP_S)):
        core.deliver(core.tickets(8))
        while leased := core.lease(1):
            core.scoring_failed(leased[0].id)
        core.tick(1.0)
    with pytest.raises(TooManyFailuresError, match=r"scorings of episodes ended well; the newest failure .*: nonsense"):
        core.plan(0)


def test_a_member_that_is_given_up_with_its_group_holds_no_decision_up(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4), max_attempts=1))
    held = [ticket.id for ticket in core.tickets(16)]
    for ticket in held[::2]:
        core.fail(ticket)
    core.tick(START_S / 2)
    fail_all(core, START_S)
    with pytest.raises(TooManyFailuresError):
        core.plan(0)


def test_a_client_raises_the_replays_decision(tmp_path: Path) -> None:
    now = [0.0]
    settings = make_settings(admission=Admission(max_lag=100, per_version=4))
    with ReplayThread(tmp_path, settings, clock=lambda: now[0]) as replay:
        client = replay.client()
        for ticket in client.tickets([], 8):
            client.fail(ticket.id, "no such tool")
        now[0] += START_S
        with pytest.raises(TooManyFailuresError, match=r"no such tool\n.*then run the same command again"):
            client.plan(0)


def test_a_share_that_is_reached_exactly_ends_a_run() -> None:
    run = Run(max_share=0.5)
    run.succeed(WINDOW // 2, seconds=0)
    run.fail(WINDOW // 2, seconds=0)
    run.now += WINDOW_S
    assert "50% of the last 200 episodes failed" in run.limit.verdict()


def test_an_outage_of_scorers_behind_a_restart_does_not_end_a_run_whose_scorings_ended_well(tmp_path: Path) -> None:
    core = Core(tmp_path, make_settings(admission=Admission(max_lag=100, per_version=4)))
    core.run_episodes(4)
    core.restart()
    for _ in range(int(SINGLE_GROUP_S)):
        core.deliver(core.tickets(8))
        while leased := core.lease(1):
            core.scoring_failed(leased[0].id)
        core.tick(1.0)
    assert core.plan(0)
