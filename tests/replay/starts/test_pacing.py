"""The number of episodes that actors may be ahead falls while complete groups wait, and rises when the learner waits.
It never passes the age bound."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.keys import OPTIONS
from asyncrl.config.schema import ReplayConfig, SamplerConfig
from asyncrl.replay.batches.sampling import Oldest
from asyncrl.replay.from_config import sampler as sampler_of
from asyncrl.replay.from_config import spare_batches
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.pacing import AGAIN_S, Pace
from asyncrl.replay.store.store import Store
from asyncrl.types import Ticket
from tests.replay.support import Core, make_settings

BATCH, GROUP, STEPS = 4, 2, 40


def paced(folder: Path, max_lag: int = 4, **changes: Any) -> Core:
    settings = {"admission": Admission(max_lag, BATCH), "spare_batches": 0.5, "sampler": Oldest(), **changes}
    return Core(folder, make_settings(**settings))


def finish(core: Core, tickets: Sequence[Ticket]) -> None:
    """Play and label episodes with the newest version."""
    core.deliver(tickets, version=core.status()["version"])
    core.label_all()


def play_all(core: Core) -> None:
    """Play and label all that may be started."""
    finish(core, core.tickets(100))


def train(core: Core, step: int) -> None:
    core.planned(step)
    core.publish(step + 1)


def settled(folder: Path) -> Core:
    """A replay whose learner never waited in STEPS steps."""
    core = paced(folder)
    for step in range(STEPS):
        play_all(core)
        train(core, step)
    return core


def ahead(core: Core) -> int:
    status = core.status()
    return int(status["capacity"]) - BATCH * int(status["depth_plans"])


@pytest.mark.slow
def test_while_complete_groups_wait_fewer_are_started_until_half_a_batch_waits(tmp_path: Path) -> None:
    core = paced(tmp_path)
    limits = []
    for step in range(STEPS):
        play_all(core)
        train(core, step)
        limits.append(ahead(core))
    assert limits == sorted(limits, reverse=True)
    assert limits[0] == 17
    assert 0 <= limits[-1] - BATCH - BATCH // 2 < GROUP, "groups are started whole"
    with core.store.transaction(write=False) as tx:
        assert core.status()["evicted"] == 0
        assert tx.counter("committed") - BATCH * STEPS <= limits[-2]
    assert core.audit()["largest_lag"] <= 4


def test_without_spare_batches_all_that_the_age_bound_admits_is_started(tmp_path: Path) -> None:
    core = paced(tmp_path, spare_batches=None)
    for step in range(10):
        play_all(core)
        assert core.status()["committed"] == core.status()["capacity"] == (4 + step + 1) * BATCH
        train(core, step)


@pytest.mark.slow
def test_a_learner_that_waits_has_half_a_batch_more_started_at_once(tmp_path: Path) -> None:
    core = settled(tmp_path)
    before = ahead(core)
    tickets = core.tickets(100)
    assert core.plan(STEPS) is None
    assert core.plan(STEPS) is None
    assert ahead(core) == before + BATCH // 2
    assert len(core.tickets(100, worker="b")) == BATCH // 2, "more is started before the learner has its batch"
    finish(core, tickets)
    train(core, STEPS)
    assert ahead(core) == before + BATCH // 2, "a step that was waited for does not lower it"


@pytest.mark.slow
def test_a_learner_that_always_waits_gets_all_that_the_age_bound_admits_and_no_more(tmp_path: Path) -> None:
    core = settled(tmp_path)
    held: list[Ticket] = core.tickets(100)
    for step in range(STEPS, STEPS + 20):
        held += core.tickets(100, holding=[each.id for each in held])
        assert core.plan(step) is None
        # No more than the learner takes.
        finish(core, [held.pop(0) for _ in range(BATCH)])
        train(core, step)
        assert core.status()["capacity"] <= (4 + step + 2) * BATCH
    assert ahead(core) == 5 * BATCH


def test_the_pace_outlives_the_replay_and_keeps_to_a_tighter_age_bound(tmp_path: Path) -> None:
    core = paced(tmp_path)
    for step in range(10):
        play_all(core)
        train(core, step)
    before = ahead(core)
    core.restart()
    assert ahead(core) == before < 5 * BATCH
    core.restart(make_settings(admission=Admission(0, BATCH), spare_batches=0.5))
    assert ahead(core) == BATCH
    core.restart(make_settings(admission=Admission(4, BATCH)))
    assert ahead(core) == 5 * BATCH


@pytest.mark.slow
def test_a_version_of_several_steps_always_has_room_for_its_batches(tmp_path: Path) -> None:
    core = paced(tmp_path, admission=Admission(1, 3 * BATCH), publish_every=3)
    for version in range(10):
        for step in range(3 * version, 3 * version + 3):
            play_all(core)
            core.planned(step)
            assert ahead(core) >= BATCH
        core.publish(version + 1)
    assert core.status()["evicted"] == 0


@pytest.mark.parametrize(
    ("sampler", "spare"),
    [
        (SamplerConfig(), 0.5),
        (SamplerConfig(kind="fifo"), 0.5),
        (SamplerConfig(kind="freshest"), None),
        (SamplerConfig(kind="prioritised"), None),
        (SamplerConfig(max_times_sampled=2), None),
    ],
)
def test_groups_wait_where_they_are_used_again_or_are_the_choice_of_the_sampler(
    sampler: SamplerConfig, spare: float | None
) -> None:
    assert spare_batches(ReplayConfig(sampler=sampler)) == spare


@pytest.mark.parametrize("kind", OPTIONS["replay.sampler.kind"].choices)
def test_every_sampler_that_plans_ahead_may_be_paced_and_no_other(kind: str) -> None:
    config = SamplerConfig(kind=kind)
    assert ReplayConfig(sampler=config).can_pace == sampler_of(config).plans_ahead


@pytest.mark.slow
def test_a_learner_that_still_waits_gets_more_until_all_that_the_age_bound_admits_is_started(tmp_path: Path) -> None:
    """All that was started may hang, and what is started then, too."""
    core = settled(tmp_path)
    hung: list[str] = []
    while ahead(core) < 5 * BATCH:
        hung += [each.id for each in core.tickets(100, worker="b", holding=hung)]
        before = ahead(core)
        core.now += AGAIN_S
        assert core.plan(STEPS) is None
        now = ahead(core)
        assert before < now <= before + BATCH // 2 + 1
        assert core.plan(STEPS) is None
        assert ahead(core) == now, "it grows with the time of the wait, not with the questions"
    last = core.tickets(100, worker="b", holding=hung)
    assert core.status()["committed"] == core.status()["age_bound"]
    finish(core, last)


def test_a_wider_age_bound_is_used_at_once(tmp_path: Path) -> None:
    core = paced(tmp_path)
    for step in range(10):
        play_all(core)
        train(core, step)
    before = ahead(core)
    core.restart(make_settings(admission=Admission(6, BATCH), spare_batches=0.5))
    assert ahead(core) == before + 2 * BATCH


def test_a_step_whose_batch_was_waited_for_does_not_slow_the_start_of_episodes_down(tmp_path: Path) -> None:
    pace = Pace(make_settings(admission=Admission(4, BATCH), spare_batches=0.5))
    store = Store(tmp_path, 1 << 24, durable=False)
    with store.transaction() as tx:
        pace.waits(tx, 3, 0.0)
        before = pace.ahead(tx)
        pace.planned(tx, 3, left=10 * BATCH)
        assert pace.ahead(tx) == before
        pace.planned(tx, 4, left=10 * BATCH)
        assert pace.ahead(tx) < before
    store.close()


@pytest.mark.slow
def test_a_wider_age_bound_is_used_once_and_the_pace_falls_from_there(tmp_path: Path) -> None:
    core = settled(tmp_path)
    wider = make_settings(admission=Admission(8, BATCH), spare_batches=0.5, sampler=Oldest())
    core.restart(wider)
    for step in range(STEPS, STEPS + 10):
        play_all(core)
        train(core, step)
    assert ahead(core) < Admission(8, BATCH).capacity(0)
