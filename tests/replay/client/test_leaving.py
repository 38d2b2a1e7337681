"""A worker that ends in order: others get at once what it held, and it gets nothing more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from asyncrl.errors import StoppedError, UnavailableError
from asyncrl.replay.client import leaving
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.protocol import GetTickets, Leave
from tests.helpers import GENEROUS_S, make_trajectory, until
from tests.replay.support import Core, ReplayThread, make_settings


@pytest.fixture
def core(tmp_path: Path) -> Core:
    return Core(tmp_path, make_settings())


def test_the_tickets_of_an_actor_that_leaves_go_to_others_at_once(core: Core) -> None:
    tickets = core.tickets(3, "leaves")
    core.ask(Leave("leaves", "1"))
    core.ask(Leave("leaves", "1"))  # It was sent again, since the reply was lost.
    assert [each.id for each in core.tickets(3, "stays")] == [each.id for each in tickets]
    assert core.status()["tickets_redelivered"] == 3
    assert core.status()["actors"] == 1


def test_an_actor_that_has_left_gets_no_tickets_and_its_successor_does(core: Core) -> None:
    [ticket] = core.tickets(1, "a")
    core.ask(Leave("a", "1"))
    assert core.ask(GetTickets("a", "1", [], [], 1)) == [], "this request had waited somewhere, and must not go on"
    core.ask(Leave("a", "1"))
    assert [each.id for each in core.tickets(1, "a", life="2")] == [ticket.id]
    core.ask(Leave("a", "1"))
    assert core.tickets(1, "b")[0].id != ticket.id, "an old farewell takes nothing from the successor"


def test_an_episode_that_arrives_after_its_actor_has_left_counts_once(core: Core) -> None:
    [ticket] = core.tickets(1, "a")
    core.ask(Leave("a", "1"))
    [again] = core.tickets(1, "b")
    assert core.put(make_trajectory(ticket)) == "stored"
    assert core.put(make_trajectory(again)) == "duplicate"


def test_what_a_scorer_hands_back_was_no_attempt_to_score_it(core: Core) -> None:
    names = core.deliver(core.tickets(2))
    for life in "123":  # More often than max_attempts allows.
        assert [each.id for each in core.lease(worker="s", life=life)] == names, "together, as if never leased"
        core.ask(Leave("s", life))
        assert core.lease(worker="s", life=life) == []
    assert [each.id for each in core.lease(worker="other")] == names
    assert core.status()["leases_redelivered"] == 6


def test_a_worker_tells_all_shards_of_its_end_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that do not answer cost one wait together."""
    shards = 3
    together, told = threading.Barrier(shards, timeout=GENEROUS_S), list[str]()

    class Silent:
        def __init__(self, endpoint: str, *_: object, **__: object) -> None:
            self._endpoint = endpoint

        def leave(self) -> None:
            together.wait()
            told.append(self._endpoint)
            raise UnavailableError("no answer")

        def close(self) -> None:
            pass

    monkeypatch.setattr(leaving, "ReplayClient", Silent)
    endpoints = [f"tcp://127.0.0.1:{port}" for port in range(shards)]
    leaving.leave(endpoints, "a", "1", None, None)
    assert sorted(told) == endpoints


@pytest.mark.slow
def test_a_request_that_waits_in_the_replay_gets_nothing_of_what_its_worker_hands_back(tmp_path: Path) -> None:
    settings = make_settings(group_size=4, batch_size=4)
    with ReplayThread(tmp_path, settings) as replay:
        first, stop = replay.client("a"), threading.Event()
        # All that admission allows.
        held = [each.id for each in until(lambda: first.tickets([], 100))]
        while more := first.tickets(held, 100):
            held += [each.id for each in more]
        waiting = ReplayClient(replay.endpoint, "a", "1", stop, context=replay.context)
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                while True:
                    assert waiting.tickets(held, 1) == []
            except (StoppedError, AssertionError) as error:
                raised.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        first.leave()
        other = replay.client("b")
        assert sorted(each.id for each in other.tickets([], 100)) == sorted(held)
        stop.set()
        thread.join()
        waiting.close()
    assert [type(each) for each in raised] == [StoppedError]
