"""The end of a run without a supervisor: workers hear it, the replay ends, and a learner that goes on revokes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.errors import RunOverError
from asyncrl.replay.protocol import Finished, RenewLease
from asyncrl.replay.starts.ending import LATEST_S, SOONEST_S
from tests.helpers import make_trajectory, until
from tests.replay.support import Core, ReplayThread, make_settings


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings())


def hears_it(core: Core, worker: str) -> bool:
    try:
        core.tickets(1, worker)
    except RunOverError:
        return True
    return False


def test_every_worker_that_asks_hears_that_the_run_is_done_and_then_the_replay_is_over(core: Core) -> None:
    ticket = core.tickets(1, "a")[0]
    core.tickets(1, "b")
    core.lease(worker="s")
    core.ask(Finished())
    assert core.put(make_trajectory(ticket)) == "stored", "what is under way is still taken"
    for ask in (lambda: core.tickets(1, "a"), lambda: core.lease(worker="s"), lambda: core.ask(RenewLease("s"))):
        with pytest.raises(RunOverError):
            ask()
    core.now += SOONEST_S
    assert not core.service.is_over(), "the other actor has not asked yet"
    assert hears_it(core, "b")
    assert core.service.is_over()


def test_the_replay_does_not_wait_long_for_a_worker_that_is_busy(core: Core) -> None:
    core.tickets(1, "busy")
    core.ask(Finished())
    core.now += LATEST_S / 2
    core.ask(Finished())
    assert not core.service.is_over()
    core.now += LATEST_S / 2
    assert core.service.is_over()


def test_a_learner_that_goes_on_or_a_restart_of_the_replay_revokes_the_end(core: Core) -> None:
    core.ask(Finished())
    assert hears_it(core, "a")
    core.publish(1)
    core.now += LATEST_S
    assert not hears_it(core, "a")
    assert not core.service.is_over()
    core.ask(Finished())
    core.restart()
    assert not hears_it(core, "a")


@pytest.mark.slow
def test_a_worker_that_waits_for_work_hears_it_over_the_socket_and_the_server_returns(tmp_path: Path) -> None:
    with ReplayThread(tmp_path) as replay:
        replay.client("learner").finished()
        with pytest.raises(RunOverError):
            replay.client().tickets([], 1)
        until(lambda: not replay.is_serving)


def test_a_worker_that_heard_of_an_end_that_was_revoked_must_hear_of_the_next_one(core: Core) -> None:
    core.tickets(1, "a")
    core.ask(Finished())
    assert hears_it(core, "a")
    core.publish(1)
    core.tickets(1, "a")
    core.ask(Finished())
    core.now += SOONEST_S
    assert not core.service.is_over()
    assert hears_it(core, "a")
    assert core.service.is_over()
