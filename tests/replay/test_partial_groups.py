"""Groups of which one member fails: which of them get another attempt, and which are dropped."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import Ticket
from tests.helpers import make_task
from tests.replay.support import Core, make_settings

SIZE, ATTEMPTS = 4, 2
SHOWN = [{"role": "assistant", "content": "1"}]


def whole_groups(path: Path, **changes: Any) -> Core:
    """A replay whose batch is one group of SIZE members."""
    sizes = {"group_size": SIZE, "batch_size": SIZE, "admission": Admission(0, SIZE), "max_attempts": ATTEMPTS}
    return Core(path, make_settings(**{**sizes, **changes}))


def begun(core: Core, failing: int = SIZE - 1) -> Ticket:
    """Begin a group, and deliver all its members but one. Returns the ticket of this one."""
    tickets = core.tickets(2 * SIZE)
    core.deliver([each for each in tickets if each.member != failing])
    core.label_all()
    (ticket,) = (each for each in tickets if each.member == failing)
    return ticket


def fail_often(core: Core, ticket: Ticket, times: int) -> list[Ticket]:
    """Fail each attempt of a member, at most `times` of them. Returns the tickets that are issued then."""
    tickets = [ticket]
    for _ in range(times):
        core.fail(tickets[0].id)
        tickets = core.tickets(1)
    return tickets


def test_a_member_gets_more_attempts_while_fewer_failed_than_its_group_would_lose(tmp_path: Path) -> None:
    core = whole_groups(tmp_path)
    (ticket,) = fail_often(core, begun(core), ATTEMPTS)
    assert ticket.id == f"{ticket.group_id}.{SIZE - 1}.{ATTEMPTS}"
    core.restart()
    core.deliver([ticket])
    core.label_all()
    assert core.planned(0).group_ids == [ticket.group_id] * SIZE
    status = core.status()
    assert (status["failures"], status["dropped"], status["tokens_thrown_away"]) == (ATTEMPTS, 0, 0)


def test_a_member_that_always_fails_gets_no_more_further_attempts_than_its_group_has_episodes(tmp_path: Path) -> None:
    core = whole_groups(tmp_path)
    ticket, delivered = begun(core), SIZE - 1
    most = ATTEMPTS + delivered - 1
    (last,) = fail_often(core, ticket, most - 1)
    assert last.id == f"{ticket.group_id}.{SIZE - 1}.{most - 1}"
    (other,) = fail_often(core, last, 1)
    assert other.group_id != ticket.group_id
    status = core.status()
    assert (status["failures"], status["dropped"]) == (most, delivered)
    assert status["tokens_dropped"] == status["tokens_thrown_away"] > 0


def test_a_group_without_episodes_is_dropped_when_a_member_has_used_up_its_attempts(tmp_path: Path) -> None:
    core = whole_groups(tmp_path)
    ticket = core.tickets(SIZE)[0]
    for each in (ticket.id, f"{ticket.group_id}.0.1"):
        core.fail(each)
        (other,) = core.tickets(1, holding=core.holding())
    assert other.group_id != ticket.group_id
    assert core.status()["failures"] == ATTEMPTS


def test_an_episode_that_cannot_be_scored_is_played_again_like_one_that_failed(tmp_path: Path) -> None:
    core = whole_groups(tmp_path)
    ticket = begun(core)
    for _ in range(ATTEMPTS):
        core.deliver([ticket])
        for _ in range(ATTEMPTS):
            core.lease()
            core.scoring_failed(ticket.id)
        (ticket,) = core.tickets(1)
    assert ticket.id == f"{ticket.group_id}.{SIZE - 1}.{ATTEMPTS}"
    core.deliver([ticket])
    core.label_all()
    assert core.planned(0).group_ids == [ticket.group_id] * SIZE
    assert (core.status()["dead"], core.status()["dropped"]) == (ATTEMPTS, 0)


def test_members_that_were_never_scored_are_not_worth_more_attempts_at_a_scoring(tmp_path: Path) -> None:
    """The task may have no right answer, so that none of its episodes can be scored."""
    core = whole_groups(tmp_path)
    tickets = core.tickets(SIZE)
    group = tickets[0].group_id
    while tickets and tickets[0].group_id == group:
        core.deliver(tickets)
        while leased := core.lease(1):
            core.scoring_failed(leased[0].id)
        tickets = core.tickets(SIZE)
    status = core.status()
    assert (status["dead"], status["dropped"]) == (SIZE * (ATTEMPTS - 1) + 1, SIZE - 1)


@pytest.mark.parametrize(
    ("changes", "failing"),
    [
        ({"greedy_sibling": True}, 0),
        ({"feed": Feed([make_task(0, demonstration=SHOWN)], seed=0, shuffle=True)}, SIZE),
    ],
)
def test_a_member_that_would_be_played_in_the_same_way_again_gets_no_further_attempt(
    tmp_path: Path, changes: Any, failing: int
) -> None:
    core = whole_groups(tmp_path, **changes)
    fail_often(core, begun(core, failing), ATTEMPTS)
    assert core.status()["failures"] == ATTEMPTS
    assert core.status()["dropped"] == SIZE + (failing == SIZE) - 1


def play_one(core: Core, tickets: Sequence[Ticket], dice: random.Random, rate: float) -> None:
    ticket = dice.choice(tickets)
    if dice.random() < rate:
        core.fail(ticket.id)
    else:
        core.deliver([ticket])
        core.label_all()


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), st.integers(1, 9), st.integers(1, 3), st.floats(0, 1))
def test_every_group_ends_whole_or_dropped_after_a_bounded_number_of_failures(
    seed: int, size: int, attempts: int, rate: float
) -> None:
    dice, most = random.Random(seed), size * (attempts - 1) + max(1, size - 1)
    with tempfile.TemporaryDirectory() as folder:
        sizes = {"group_size": size, "batch_size": size, "admission": Admission(0, size), "max_attempts": attempts}
        core = Core(Path(folder), make_settings(**sizes))
        held = core.tickets(size)
        group = held[0].group_id
        for _ in range(size + most):
            held += core.tickets(size, holding=[each.id for each in held])
            members = [each for each in held if each.group_id == group]
            if not members:
                break
            play_one(core, members, dice, rate)
            held = [each for each in held if each.id in core.holding()]
            if dice.random() < 0.1:
                core.restart()
        status = core.status()
        assert status["failures"] <= most
        assert status["depth_ready"] == 1 or status["failures"] >= attempts
        assert core.audit()["lost"] == 0
        if status["depth_ready"]:
            assert core.planned(0).group_ids == [group] * size
        core.store.close()
