"""The episodes of the replay's core that are counted as decided, and the time at which they are."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest

from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.sampling import Filters
from asyncrl.replay.batches.selection import Selection
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import Ticket
from tests.helpers import make_task
from tests.replay.support import Core, make_settings


@contextmanager
def opened(path: Path, **changes: Any) -> Iterator[Core]:
    core = Core(path, make_settings(**changes))
    with closing(core.store):
        yield core


def counted(core: Core) -> Selection:
    with core.store.transaction(write=False) as tx:
        return cohorts.selection(tx)


def numbers(core: Core) -> dict[str, int]:
    return {end: sums.episodes for end, sums in counted(core).shown.items()}


def train(core: Core, tickets: list[Ticket], step: int, version: int = 0) -> None:
    core.deliver(tickets, version=version)
    core.label_all()
    core.planned(step)
    core.publish(step + 1)


def test_a_version_is_counted_once_all_groups_begun_in_it_are_decided(tmp_path: Path) -> None:
    with opened(tmp_path) as core:
        first = core.tickets(8)
        train(core, first[:4], 0)
        assert numbers(core) == {}
        train(core, first[4:], 1)
        # Version 0 is decided when the last of its groups is planned.
        assert numbers(core) == {"sampled": 8, "trained": 8}


def test_later_versions_wait_for_earlier_ones(tmp_path: Path) -> None:
    with opened(tmp_path, admission=Admission(max_lag=9, per_version=4)) as core:
        slow = core.tickets(2)
        train(core, core.tickets(4, holding=[each.id for each in slow]), 0)
        held = [each.id for each in slow]
        later = core.tickets(8, holding=held)
        train(core, later[:4], 1, version=1)
        train(core, later[4:], 2, version=1)
        assert numbers(core) == {}
        core.deliver(slow)
        core.label_all()
        more = core.tickets(2)
        train(core, more, 3, version=3)
        assert numbers(core) == {"sampled": 14, "trained": 14}


def test_an_eviction_is_counted_with_its_lengths_turns_and_rewards(tmp_path: Path) -> None:
    with opened(tmp_path, admission=Admission(max_lag=1, per_version=4)) as core:
        tickets = core.tickets(8)
        train(core, tickets[:4], 0)
        core.publish(2)
        core.deliver(tickets[4:])
        core.label_all(reward=3.0)
        core.publish(3)
        found = counted(core)
        assert {end: sums.episodes for end, sums in found.shown.items()} == {"sampled": 8, "trained": 4, "evicted": 4}
        evicted = found.of("evicted")
        assert (evicted.scored, evicted.reward) == (4, 12.0)
        assert evicted.tokens == core.status()["tokens_evicted"]
        # The groups have equal lengths, and different rewards.
        assert found.contrast("length").variance == 0
        assert found.contrast("reward").variance == pytest.approx(2 * 2 / 4)
        # Two trained groups with 1, two evicted ones with 3: the mean is 2, the standard deviation sqrt(4 / 3).
        assert found.contrast("reward").deviation == pytest.approx(-2 / math.sqrt(4 / 3))


def test_filters_and_failures_are_ends_of_their_own_and_no_work_of_the_age_bound(tmp_path: Path) -> None:
    with opened(tmp_path, filters=Filters(zero_variance=True), max_attempts=1) as core:
        tickets = core.tickets(8)
        core.deliver(tickets[:2])
        core.label_all()
        core.deliver(tickets[2:3])
        core.fail(tickets[3].id)
        core.deliver(tickets[4:])
        for trajectory in core.lease():
            core.label(trajectory.id, float(trajectory.member))
        core.planned(0)
        core.publish(1)
        train_more(core)
        found = counted(core)
        numbers = {end: found.of(end).episodes for end in ("trained", "evicted", "filtered", "dropped")}
        assert numbers == {"trained": 4, "evicted": 0, "filtered": 2, "dropped": 1}
        assert found.of("dropped").scored == 0
        assert all(found.contrast(name).variance == 0 for name in ("length", "turns", "reward"))


def train_more(core: Core) -> None:
    """Close a later group, at which the decided versions are counted."""
    core.fail(core.tickets(1)[0].id)


def test_a_restart_changes_no_count(tmp_path: Path) -> None:
    found = []
    for restarts in (False, True):
        with opened(tmp_path / str(restarts)) as core:
            tickets = core.tickets(8)
            core.deliver(tickets)
            core.label_all()
            for step in range(2):
                core.planned(step)
                if restarts:
                    core.restart()
                    core.deliver(tickets)
                core.publish(step + 1)
            train_more(core)
            found.append(counted(core))
            status = core.status()
            core.store.close()
        assert status["decided/trained/episodes"] == 8
    assert found[0] == found[1]


def test_demonstrations_are_not_sampled_and_not_counted(tmp_path: Path) -> None:
    shown = [{"role": "assistant", "content": "1"}]
    feed = Feed([make_task(index, demonstration=shown) for index in range(5)], seed=0, shuffle=True)
    with opened(tmp_path, feed=feed) as core:
        core.deliver(core.tickets(12))
        core.label_all()
        core.planned(0)
        core.publish(1)
        core.planned(1)
        assert numbers(core) == {"sampled": 8, "trained": 8}
