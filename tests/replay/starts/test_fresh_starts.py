"""An episode starts with the newest version if its group would otherwise be trained too late. Thus no group loses a
version of its time to a transfer of weights, over a slow link neither."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.simulation import Forecast, simulate
from asyncrl.replay.starts.admission import Admission
from tests.replay.support import Core, make_settings

MAX_LAG = 4
BATCH, MANY = 4, 64


def started(folder: Path, version: int, before: int = MANY) -> Core:
    """A replay whose learner has published `version`. Another actor holds `before` tickets, by default so many that the
    next groups will be trained long after. There is always a ticket to give out."""
    core = Core(folder, make_settings(admission=Admission(MAX_LAG, 400), batch_size=BATCH))
    core.tickets(before, "other")
    core.publish(version)
    return core


def asked(core: Core, worker: str = "a") -> int:
    """The oldest version that may start the next episode of an actor."""
    (ticket,) = core.tickets(1, worker)
    core.deliver([ticket], version=core.status()["version"])
    return ticket.min_version


def test_an_episode_starts_only_with_the_newest_version(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    assert asked(core) == 6
    core.publish(7)
    assert asked(core) == 7


def test_a_ticket_names_the_oldest_version_that_will_do_unless_steps_wait_for_old_groups(tmp_path: Path) -> None:
    (ticket,) = started(tmp_path / "a", version=6).tickets(1)
    assert (ticket.min_version, ticket.fallback_version) == (6, 6 - MAX_LAG)
    core = Core(tmp_path / "b", make_settings(admission=Admission(MAX_LAG, 400), batch_size=BATCH, wait_s=60.0))
    core.publish(6)
    (ticket,) = core.tickets(1)
    assert (ticket.min_version, ticket.fallback_version) == (6, None)


@pytest.mark.parametrize(
    ("before", "least"), [(2, 0), (BATCH, 0), (BATCH * MAX_LAG, 0), (BATCH * (MAX_LAG + 1), 1), (MANY, 2)]
)
def test_an_episode_waits_only_for_a_version_that_is_young_enough_when_its_group_is_trained(
    tmp_path: Path, before: int, least: int
) -> None:
    """No step is planned yet, so step k, at version k, trains the groups from k batches on."""
    assert asked(started(tmp_path, version=2, before=before)) == least


def test_planned_groups_are_not_before_a_new_one(tmp_path: Path) -> None:
    core = started(tmp_path, version=0, before=0)
    for step in range(MAX_LAG + 1):
        core.run_episodes(BATCH, version=step)
        assert core.plan(step) is not None
        core.publish(step + 1)
    assert asked(core) == 1, "of the next batch, which step 5 trains"


def test_a_held_ticket_is_recorded_with_the_version_that_it_asks_for(tmp_path: Path) -> None:
    core = started(tmp_path, version=2, before=2)
    (ticket,) = core.tickets(1)
    core.restart()
    core.publish(3)
    (again,) = core.tickets(1)
    assert (again.id, again.min_version) == (ticket.id, 0)


def test_a_ticket_asks_for_the_version_at_which_it_was_given_out_if_its_reply_was_lost(tmp_path: Path) -> None:
    core = started(tmp_path, version=1)
    (lost,) = core.tickets(1)
    core.publish(2)
    (again,) = core.tickets(1)
    assert (again.id, again.min_version) == (lost.id, 1)
    core.publish(9)
    (again,) = core.tickets(1)
    assert (again.id, again.min_version) == (lost.id, 9 - MAX_LAG), "older tokens could not be trained"


def test_evaluations_have_no_part_in_the_forecast(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    core.evaluate(6)
    core.publish(7)
    held = core.tickets(6)
    core.deliver([each for each in held if each.purpose == "eval"], version=6)
    assert all(each.min_version == 7 for each in held if each.purpose == "train")
    assert asked(core) == 7


def forecast(transfer_s: float, token_s: float, **sizes: Any) -> Forecast:
    """32 episodes, which take about 3 s each, are a version."""
    rates = Rates(
        tasks=[[TypicalEpisode(sampled=100, tokens=400, turns=2, tools_s=1.0)]],
        pass_s=0.01,
        request_s=0.0003,
        token_s=token_s,
        transfer_s=transfer_s,
    )
    description = RunDescription(rates, Sizes(**{"engines": 1, "batch_size": 32, "group_size": 8, **sizes}))
    return simulate(description, steps=20)


@pytest.mark.slow
def test_a_transfer_takes_no_version_of_the_time_of_a_group() -> None:
    """A version lasts 5.1 s. Episodes end within the version at which they start."""
    found = forecast(transfer_s=0.5, token_s=4e-4, max_lag=1)
    assert found.discarded == 0
    assert found.learner_idle < 0.05


@pytest.mark.slow
def test_over_a_link_that_is_slower_than_steps_episodes_do_not_wait_for_each_transfer() -> None:
    """The actor has room for half a batch of episodes, so a version lasts about 5 s. A transfer takes 10 s."""
    slow, fast = (forecast(transfer_s, token_s=1e-4, max_lag=8, concurrency=16) for transfer_s in (10.0, 0.0))
    assert slow.trajectories_per_s > 0.9 * fast.trajectories_per_s


@pytest.mark.slow
@pytest.mark.parametrize("transfer_s", [1.0, 16.0])
def test_a_slow_link_makes_no_group_too_old(transfer_s: float) -> None:
    """Engines have room for two batches, so that a group that starts a version too early becomes too old. Engines with
    more requests take longer for each, and a version lasts about 1.3 s over a fast link."""
    found = forecast(transfer_s, token_s=1e-5, max_lag=2, concurrency=64, spare_batches=None)
    assert found.discarded < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("max_lag", [1, 2])
def test_an_actor_whose_episodes_are_all_trained_in_the_next_batch_loses_no_time_to_transfers(max_lag: int) -> None:
    """The actor has room for an eighth of a batch, and a transfer takes a quarter of the time of a version."""
    sizes = {"max_lag": max_lag, "batch_size": 64, "concurrency": 8}
    slow, fast = (forecast(transfer_s, token_s=1e-5, **sizes) for transfer_s in (5.0, 0.0))
    assert slow.trajectories_per_s > 0.95 * fast.trajectories_per_s
    assert slow.discarded == 0
