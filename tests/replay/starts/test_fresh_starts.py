"""An episode starts with the newest version if its group would otherwise be trained too late. Thus no group loses a
version of its time to a transfer of weights. An actor over a slow link does not wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.simulation import Forecast, simulate
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.fresh_starts import FEWEST, FreshStarts
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


def play(core: Core, episodes: int, waited_s: float, worker: str = "a") -> None:
    """Play episodes that take 10 s each, of which they wait `waited_s` for a version."""
    version, timings = core.status()["version"], {"wait": waited_s, "generate": 10.0 - waited_s}
    core.deliver(core.tickets(episodes, worker), version=version, timings=timings)


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


def test_an_actor_whose_episodes_wait_for_long_starts_with_any_version_that_can_be_trained(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    play(core, episodes=1, waited_s=0.0)
    core.publish(7)
    play(core, episodes=FEWEST, waited_s=2.4)
    assert asked(core) == 7, "the limit is a quarter"
    play(core, episodes=FEWEST, waited_s=3.0)
    assert asked(core) == 7 - MAX_LAG
    assert asked(core, "b") == 7, "the engines of other actors may have a faster link"


def test_an_actor_that_has_not_waited_for_long_waits_again(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    play(core, episodes=1, waited_s=0.0)
    core.publish(7)
    play(core, episodes=FEWEST - 40, waited_s=0.0)
    play(core, episodes=40, waited_s=10.0)
    play(core, episodes=200, waited_s=0.0)
    assert asked(core) == 7 - MAX_LAG
    core.publish(12)
    for _ in range(8):
        play(core, episodes=200, waited_s=0.0)
    assert asked(core) == 12


def test_the_first_episodes_that_end_do_not_judge_an_actor(tmp_path: Path) -> None:
    """The first episodes that end are short, so they spend most of their time waiting."""
    core = started(tmp_path, version=6)
    play(core, episodes=1, waited_s=0.0)
    core.publish(7)
    play(core, episodes=FEWEST // 2, waited_s=8.0)
    assert asked(core) == 7
    play(core, episodes=FEWEST // 2, waited_s=8.0)
    assert asked(core) == 7 - MAX_LAG


def test_the_first_episodes_of_an_actor_wait_for_its_engines_and_not_for_a_transfer(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    first = core.tickets(2 * FEWEST)
    core.publish(7)
    core.deliver(first, version=6, timings={"wait": 60.0})
    assert asked(core) == 7


def test_a_new_process_of_an_actor_may_have_faster_engines(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    play(core, episodes=1, waited_s=0.0)
    core.publish(7)
    play(core, episodes=FEWEST, waited_s=10.0)
    (ticket,) = core.tickets(1)
    assert ticket.min_version == 7 - MAX_LAG
    (ticket,) = core.tickets(1, life="2")
    assert ticket.min_version == 7


def test_evaluations_say_nothing_about_the_engines(tmp_path: Path) -> None:
    core = started(tmp_path, version=6)
    core.evaluate(6)
    core.publish(7)
    held = core.tickets(6)
    core.deliver([each for each in held if each.purpose == "eval"], version=6)
    assert all(each.min_version == 7 for each in held if each.purpose == "train")
    assert asked(core) == 7


@given(
    st.integers(1, 8),
    st.lists(st.tuples(st.floats(0.0, 100.0), st.floats(0.1, 100.0)), min_size=FEWEST, max_size=FEWEST + 30),
)
def test_episodes_wait_no_longer_once_waits_take_more_than_their_share(
    max_lag: int, episodes: list[tuple[float, float]]
) -> None:
    starts = FreshStarts(make_settings(admission=Admission(max_lag, 4)))
    starts.delivered("a", 0, 0, 0.0, 1.0)
    for waited_s, played_s in episodes:
        starts.delivered("a", 1, 1, waited_s, waited_s + played_s)
    if starts.waits("a"):
        # The times of earlier episodes count slightly less than the newest ones.
        waited_s = sum(waited for waited, _ in episodes)
        assert waited_s * max_lag <= 1.2 * sum(map(sum, episodes))


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
@pytest.mark.parametrize("max_lag", [1, 2])
def test_an_actor_whose_episodes_are_all_trained_in_the_next_batch_loses_no_time_to_transfers(max_lag: int) -> None:
    """The actor has room for an eighth of a batch, and a transfer takes a quarter of the time of a version."""
    sizes = {"max_lag": max_lag, "batch_size": 64, "concurrency": 8}
    slow, fast = (forecast(transfer_s, token_s=1e-5, **sizes) for transfer_s in (5.0, 0.0))
    assert slow.trajectories_per_s > 0.95 * fast.trajectories_per_s
    assert slow.discarded == 0
