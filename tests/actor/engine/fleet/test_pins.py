"""Which server is lent to evaluations, and until when."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.actor.engine.fleet.member import State
from asyncrl.actor.engine.fleet.pins import LINGER_S, Pins

ASKED = 2


@dataclass(eq=False)
class Fake:
    version: int
    under_way: int
    state: State

    @property
    def ready(self) -> bool:
        return self.state is State.READY


def update(version: int) -> Any:
    return SimpleNamespace(version=version)


def member(version: int = 1, under_way: int = 0, state: State = State.READY) -> Any:
    return Fake(version, under_way, state)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def pins(clock: Clock) -> Pins:
    """One session wants ASKED, which has just come."""
    pins = Pins(clock)
    pins.pin("e", ASKED, update(1))
    pins.offer(update(ASKED))
    return pins


def test_the_idlest_server_that_need_not_go_back_is_lent_and_stays_so(pins: Pins) -> None:
    newer, busy, idle = member(version=3), member(under_way=5), member(version=ASKED, under_way=1)
    members = [newer, busy, idle]
    assert pins.lent(members) is idle
    idle.under_way = 9
    assert pins.lent(members) is idle
    assert pins.wants("e")
    assert pins.wants("e/0"), "a branch of the episode"
    assert not pins.wants("t")


def test_nothing_is_lent_while_one_server_alone_is_alive_nor_where_all_are_newer(pins: Pins) -> None:
    alone, joining = member(), member(state=State.AWAY)
    for joining.state in (State.AWAY, State.BEHIND):
        assert pins.lent([alone, joining]) is None, "one must be ready for training"
    joining.state = State.READY
    assert pins.lent([alone, joining]) in (alone, joining)
    late = Pins(Clock())
    late.pin("e", ASKED, update(ASKED))
    assert late.lent([member(version=3), member(version=3)]) is None


@pytest.mark.parametrize("versions", [[1], [3], []])
def test_only_the_version_that_a_session_wants_is_worth_a_loan(clock: Clock, versions: list[int]) -> None:
    pins = Pins(clock)
    pins.pin("e", ASKED, None)
    for version in versions:
        pins.offer(update(version))
    assert pins.lent([member(), member()]) is None


def test_a_loan_ends_with_its_server_or_with_the_last_of_the_others(pins: Pins) -> None:
    members = [member(), member(), member()]
    lent = pins.lent(members)
    assert lent is not None
    lent.state = State.AWAY
    assert pins.lent(members) is None
    assert not pins.wants("e"), "it is served like all others from now on"
    pins.offer(update(ASKED))
    kept = pins.lent(members)
    assert kept is not None
    for each in members:
        each.state = each.state if each is kept else State.AWAY
    assert pins.lent(members) is None


def test_a_loan_ends_a_while_after_its_last_session_and_another_version_follows(pins: Pins, clock: Clock) -> None:
    members = [member(), member()]
    lent = pins.lent(members)
    pins.pin("next", 5, update(ASKED))
    pins.offer(update(5))
    assert not pins.wants("next"), "one version at a time"
    clock.now = 100.0
    pins.release("e")
    clock.now += 0.9 * LINGER_S
    assert pins.lent(members) is lent
    clock.now += 0.2 * LINGER_S
    assert pins.lent(members) is None
    assert pins.update is None, "the weights are let go of"


def test_a_finished_loan_gives_way_to_the_next_version_at_once(pins: Pins) -> None:
    lent = pins.lent([member(), member()])
    assert lent is not None
    pins.release("e")
    pins.pin("next", 5, update(ASKED))
    pins.offer(update(5))
    assert pins.wants("next")


def test_weights_that_nobody_could_lend_a_server_for_are_let_go_of(pins: Pins, clock: Clock) -> None:
    assert pins.lent([member()]) is None
    clock.now = 100.0
    pins.release("e")
    clock.now += 2 * LINGER_S
    assert pins.lent([member()]) is None
    assert pins.update is None
