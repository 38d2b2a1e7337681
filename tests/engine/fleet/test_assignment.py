"""The assignment of sessions to endpoints, and the lease of one to evaluations."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.engine.fleet.assignment import Assignment, EvaluationLease
from asyncrl.engine.fleet.endpoint import EndpointState

ASKED = 2
LINGER_S = 5.0


@dataclass(eq=False)
class Fake:
    version: int = 1
    in_flight: int = 0
    state: EndpointState = EndpointState.READY
    update_is_put_off: bool = False

    @property
    def ready(self) -> bool:
        return self.state is EndpointState.READY

    def fails(self, version: int) -> bool:
        return self.state is EndpointState.LOST or (self.update_is_put_off and self.version < version)


def endpoint(version: int = 1, in_flight: int = 0, state: EndpointState = EndpointState.READY) -> Any:
    return Fake(version, in_flight, state)


def update(version: int) -> Any:
    return SimpleNamespace(version=version)


def test_a_session_stays_with_its_endpoint_and_new_ones_go_where_fewest_are() -> None:
    assignment, endpoints = Assignment(), [endpoint(), endpoint()]
    homes = [assignment.assign(f"s{i}", endpoints, 1) for i in range(4)]
    assert [homes.count(each) for each in endpoints] == [2, 2]
    assert [assignment.assign(f"s{i}", endpoints, 1) for i in range(4)] == homes
    assignment.release("s0")
    assert assignment.assign("new", endpoints, 1) is homes[0]


def test_sessions_leave_a_crowded_endpoint_for_one_that_joined_late() -> None:
    assignment, early, late = Assignment(), endpoint(), endpoint()
    sessions = [f"s{i}" for i in range(20)]
    assert {assignment.assign(session, [early], 1) for session in sessions} == {early}
    moved = [assignment.assign(session, [early, late], 1) for session in sessions].count(late)
    assert 5 <= moved <= 10


@pytest.mark.parametrize("change", [{"state": EndpointState.STALE}, {"state": EndpointState.SUSPECT}, {"version": 0}])
def test_a_session_waits_while_its_endpoint_is_updated_or_checked_but_not_where_it_is_lost(change: Any) -> None:
    assignment, other = Assignment(), endpoint()
    home = assignment.assign("s", [endpoint()], 1)
    assert home is not None
    for name, value in change.items():
        setattr(home, name, value)
    assert assignment.assign("s", [home, other], 1) is None
    home.state = EndpointState.LOST
    assert assignment.assign("s", [home, other], 1) is other
    assert assignment.assign("s", [endpoint()], 1) is not other, "it has left the fleet"


def test_a_session_leaves_a_server_whose_update_is_put_off_only_for_a_newer_version() -> None:
    assignment, other = Assignment(), endpoint(version=2)
    home: Any = assignment.assign("s", [endpoint()], 1)
    home.update_is_put_off = True
    assert assignment.assign("s", [home, other], 1) is home
    assert assignment.assign("s", [home, other], 2) is other


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lease(clock: Clock) -> EvaluationLease:
    """One session wants ASKED, which has just come."""
    lease = EvaluationLease(clock, LINGER_S)
    lease.pin("e", ASKED)
    lease.offer(update(ASKED))
    return lease


def leased(lease: EvaluationLease, *endpoints: Any) -> Any:
    lease.renew(endpoints)
    return lease.endpoint


def test_the_idlest_endpoint_that_need_not_go_back_is_leased_and_stays_so(lease: EvaluationLease) -> None:
    newer, busy, idle = endpoint(version=3), endpoint(in_flight=5), endpoint(version=ASKED, in_flight=1)
    assert leased(lease, newer, busy, idle) is idle
    idle.in_flight = 9
    assert leased(lease, newer, busy, idle) is idle
    assert lease.covers("e")
    assert lease.covers("e/0"), "a branch of the episode"
    assert not lease.covers("t")


def test_nothing_is_leased_while_one_endpoint_alone_is_ready_nor_where_all_are_newer(lease: EvaluationLease) -> None:
    alone, joining = endpoint(), endpoint()
    for joining.state in (EndpointState.LOST, EndpointState.STALE):
        assert leased(lease, alone, joining) is None, "one must be ready for training"
    joining.state = EndpointState.READY
    alone.version = joining.version = 3
    assert leased(lease, alone, joining) is None
    joining.version = 1
    assert leased(lease, alone, joining) is joining


@pytest.mark.parametrize("version", [1, 3])
def test_only_the_version_that_a_session_is_pinned_to_is_worth_a_lease(clock: Clock, version: int) -> None:
    lease = EvaluationLease(clock)
    lease.pin("e", ASKED)
    assert leased(lease, endpoint(), endpoint()) is None
    lease.offer(update(version))
    assert leased(lease, endpoint(), endpoint()) is None


def test_a_lease_ends_with_its_endpoint_or_with_the_last_of_the_others(lease: EvaluationLease) -> None:
    endpoints = [endpoint(), endpoint(), endpoint()]
    leased(lease, *endpoints).state = EndpointState.LOST
    assert leased(lease, *endpoints) is None
    assert not lease.covers("e"), "it is served like all others from now on"
    lease.offer(update(ASKED))
    kept = leased(lease, *endpoints)
    assert kept is not None
    for each in endpoints:
        each.state = each.state if each is kept else EndpointState.LOST
    assert leased(lease, *endpoints) is None


def test_a_lease_ends_a_while_after_its_last_session(lease: EvaluationLease, clock: Clock) -> None:
    endpoints = [endpoint(), endpoint()]
    first = leased(lease, *endpoints)
    lease.pin("next", 5)
    lease.offer(update(5))
    assert not lease.covers("next"), "one version at a time"
    clock.now = 100.0
    lease.release("e")
    clock.now += 0.9 * LINGER_S
    assert leased(lease, *endpoints) is first
    clock.now += 0.2 * LINGER_S
    assert leased(lease, *endpoints) is None
    assert lease.update is None, "the weights are let go of"


def test_a_finished_lease_gives_way_to_the_next_version_at_once(lease: EvaluationLease) -> None:
    assert leased(lease, endpoint(), endpoint()) is not None
    lease.release("e")
    lease.pin("next", 5)
    lease.offer(update(5))
    assert lease.covers("next")


def test_weights_that_no_endpoint_could_be_leased_for_are_let_go_of(lease: EvaluationLease, clock: Clock) -> None:
    assert leased(lease, endpoint()) is None
    clock.now = 100.0
    lease.release("e")
    clock.now += 2 * LINGER_S
    assert leased(lease, endpoint()) is None
    assert lease.update is None
