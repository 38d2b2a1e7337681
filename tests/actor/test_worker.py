"""The worker: tickets in, trajectories out, whatever happens to one episode."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.actor.worker import RolloutWorker, RunEpisode
from asyncrl.errors import AsyncrlError, RefusedError, StoppedError, ToolError
from asyncrl.types import Purpose, Role, Ticket, ToolCall, Trajectory, Turn
from asyncrl.wire import encode, trajectory_message
from tests.actor.fakes import ScriptedEngine, make_ticket, make_tokenizer
from tests.helpers import GENEROUS_S, async_until, make_trajectory

Begin = Callable[[], None]


class Replay:
    """Source and sink. It sends tickets again that it thinks lost, as the replay does."""

    def __init__(self, tickets: Sequence[Ticket] | int) -> None:
        self.fresh = [make_ticket(f"t{index}") for index in range(tickets)] if isinstance(tickets, int) else [*tickets]
        self.leased: dict[str, Ticket] = {}
        self.requests: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = []
        self.stored: list[str] = []
        self.failed: dict[str, str] = {}
        self.may_store = threading.Event()
        self.may_store.set()
        self.refuses: set[str] = set()
        self._changed = threading.Condition()
        self._requests_before = 0

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
        with self._changed:
            self.requests.append((tuple(holding), want, tuple(waiting)))
            if want and not self.fresh:
                self._changed.wait(0.02)
            lost = [self.leased[name] for name in self.leased if name not in holding]
            given = lost + [self.fresh.pop(0) for _ in range(min(want, len(self.fresh)))]
            self.leased.update({ticket.id: ticket for ticket in given})
            return given

    def put(self, trajectory: Trajectory) -> str:
        assert self.may_store.wait(GENEROUS_S)
        if trajectory.id in self.refuses:
            raise RefusedError("not mine")
        encode(trajectory_message(trajectory))
        self.leased.pop(trajectory.id)
        self.stored.append(trajectory.id)
        self._requests_before = len(self.requests)
        return "stored"

    def fail(self, ticket_id: str, reason: str) -> None:
        self.leased.pop(ticket_id)
        self.failed[ticket_id] = reason
        self._requests_before = len(self.requests)

    async def finished(self, count: int) -> None:
        """Return once so many tickets have an outcome, which the worker has counted."""

        def counted() -> bool:
            outcomes = {*self.stored, *self.failed}
            later = self.requests[self._requests_before :]
            return len(outcomes) == count and any(outcomes.isdisjoint(holding) for holding, _, _ in later)

        await async_until(counted)


class Metrics:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None: ...


async def well(ticket: Ticket, begin: Begin) -> Trajectory:
    return make_trajectory(ticket)


@asynccontextmanager
async def at_work(
    replay: Replay,
    run: RunEpisode = well,
    concurrency: int = 4,
    limit_s: float = math.inf,
    renew_s: float = 1000.0,
) -> AsyncIterator[Metrics]:
    """A running worker, which is stopped afterwards. Raises what the worker raised."""
    before, sink, stop = asyncio.all_tasks(), Metrics(), asyncio.Event()
    metrics = RolloutMetrics(ScriptedEngine(make_tokenizer(), []), [lambda: {"tool_calls": 2}], sink, interval_s=60.0)
    worker = asyncio.create_task(RolloutWorker(run, replay, replay, concurrency, metrics, limit_s, renew_s).run(stop))
    logging = asyncio.create_task(metrics.run(lambda: 0))
    try:
        yield sink
    finally:
        stop.set()
        logging.cancel()
        await asyncio.gather(logging, return_exceptions=True)
        await worker
    assert asyncio.all_tasks() == before


async def test_every_ticket_becomes_one_trajectory_and_no_more_run_than_allowed():
    replay, running, most = Replay(30), 0, 0

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return make_trajectory(ticket)

    async with at_work(replay, run):
        await replay.finished(30)
    assert sorted(replay.stored) == sorted(f"t{index}" for index in range(30))
    assert most == 4
    assert all(len(holding) + want <= 4 + 4 + 1 for holding, want, _ in replay.requests)


async def test_a_ticket_is_held_until_its_trajectory_is_durable():
    replay = Replay(1)
    replay.may_store.clear()
    async with at_work(replay):
        await async_until(lambda: replay.leased)
        seen = len(replay.requests)
        await async_until(lambda: len(replay.requests) > seen + 3)
        assert all("t0" in holding for holding, _, _ in replay.requests[seen + 1 :])
        replay.may_store.set()
        await async_until(lambda: replay.requests[-1][0] == ())
    assert replay.stored == ["t0"]


async def test_a_full_worker_goes_on_renewing_its_leases():
    replay, may_end = Replay(2), asyncio.Event()

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        await may_end.wait()
        return make_trajectory(ticket)

    async with at_work(replay, run, concurrency=2, renew_s=0.01):
        await async_until(lambda: sum(want == 0 and len(holding) == 2 for holding, want, _ in replay.requests) > 3)
        may_end.set()
        await replay.finished(2)


async def test_the_next_episode_starts_as_soon_as_one_has_ended():
    replay = Replay(20)
    async with at_work(replay, concurrency=1, renew_s=1000.0):
        await replay.finished(20)


class Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no message")


async def test_a_failed_episode_is_reported_with_its_reason_and_the_worker_goes_on():
    replay, errors = Replay(5), {"t0": ToolError("broke"), "t1": ZeroDivisionError("a bug"), "t2": Silent()}

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        if ticket.id in errors:
            raise errors[ticket.id]
        return make_trajectory(ticket)

    async with at_work(replay, run, concurrency=1) as metrics:
        await replay.finished(5)
    assert replay.failed.pop("t2").startswith("Silent")
    assert replay.failed == {"t0": "ToolError: broke", "t1": "ZeroDivisionError: a bug"}
    assert sorted(replay.stored) == ["t3", "t4"]
    assert (metrics.rows[-1][1]["episodes"], metrics.rows[-1][1]["failed"]) == (2, 3)


async def test_an_episode_that_takes_too_long_fails_and_waiting_for_a_version_does_not_count():
    replay, arrived, never = Replay(2), asyncio.Event(), asyncio.Event()

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        if ticket.id == "t0":
            await arrived.wait()
        begin()
        if ticket.id == "t1":
            await never.wait()
        return make_trajectory(ticket)

    async with at_work(replay, run, limit_s=0.05):
        # The limit passes for the running episode while the other one waits.
        await replay.finished(1)
        assert "actor.episode_timeout_s" in replay.failed["t1"]
        await async_until(lambda: replay.requests[-1][2] == ("t0",))
        arrived.set()
        await replay.finished(2)
    assert replay.stored == ["t0"]


async def test_a_trajectory_that_is_refused_or_cannot_be_sent_is_counted_and_its_ticket_fails():
    replay = Replay(3)
    replay.refuses = {"t0"}

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        large = (ToolCall("add", {"x": 2**70 if ticket.id == "t1" else 1}),)
        turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", large))
        return make_trajectory(ticket, turns=turns)

    async with at_work(replay, run) as metrics:
        await replay.finished(3)
    assert replay.stored == ["t2"]
    assert "not mine" in replay.failed["t0"]
    assert "cannot be encoded" in replay.failed["t1"]
    assert metrics.rows[-1][1]["refused"] == 2


async def test_a_ticket_that_comes_twice_runs_once():
    replay, ran = Replay([make_ticket("t0"), make_ticket("t0"), make_ticket("t1")]), []

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        ran.append(ticket.id)
        await async_until(lambda: len(ran) == 2)
        return make_trajectory(ticket)

    async with at_work(replay, run):
        await replay.finished(2)
    assert sorted(ran) == ["t0", "t1"]


async def test_evaluation_runs_first_if_both_wait():
    class Generous(Replay):
        """Sends more tickets than requested, as after a lost reply."""

        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
            return super().tickets(holding, 10 if want else 0, waiting)

    replay = Generous([make_ticket(f"t{i}", Purpose.EVAL if i >= 3 else Purpose.TRAIN) for i in range(5)])
    ran = []

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        ran.append(ticket.id)
        return make_trajectory(ticket)

    async with at_work(replay, run, concurrency=1):
        await replay.finished(5)
    assert ran == ["t3", "t4", "t0", "t1", "t2"]


async def test_a_stop_cancels_running_episodes_and_reports_nothing_of_them():
    replay, released, running = Replay(3), [], []

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        running.append(ticket.id)
        try:
            await asyncio.Event().wait()
        finally:
            released.append(ticket.id)
        return make_trajectory(ticket)

    async with at_work(replay, run) as metrics:
        await async_until(lambda: len(running) == 3)
    assert sorted(released) == sorted(replay.leased) == ["t0", "t1", "t2"]
    assert not replay.stored
    assert not replay.failed
    assert len(metrics.rows) == 1


async def test_all_calls_of_the_client_have_returned_after_a_stop():
    class Slow(Replay):
        in_call = False

        def put(self, trajectory: Trajectory) -> str:
            self.in_call = True
            self.may_store.wait(0.2)
            self.in_call = False
            return "stored"

    replay = Slow(1)
    replay.may_store.clear()
    async with at_work(replay):
        await async_until(lambda: replay.in_call)
    assert not replay.in_call


class Raising(Replay):
    def __init__(self, error: AsyncrlError) -> None:
        super().__init__(0)
        self._error = error

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
        super().tickets(holding, 0, waiting)
        raise self._error


async def test_a_source_that_refuses_ends_the_worker_with_its_reason():
    replay = Raising(RefusedError("another protocol"))
    with pytest.raises(RefusedError, match="another protocol"):
        async with at_work(replay):
            await async_until(lambda: replay.requests)


async def test_a_client_that_is_stopped_stops_the_worker():
    replay = Raising(StoppedError("stopped"))
    async with at_work(replay):
        await async_until(lambda: replay.requests)


async def test_metrics_are_logged_at_the_served_version():
    replay = Replay(3)
    async with at_work(replay) as metrics:
        await replay.finished(3)
    ((step, values),) = metrics.rows
    assert step == values["version"] == 3
    assert (values["episodes"], values["tool_calls"], values["tokens"]) == (3, 2, 7)
    assert values["episode_tokens"] == [8.0] * 3
    assert values["turns"] == [1.0] * 3


def test_rates_are_those_since_the_last_log():
    class Engine(ScriptedEngine):
        now = iter([(0, 0.0, 0.0), (100, 2.0, 0.5), (100, 2.0, 0.5)])

        def stats(self) -> Any:
            tokens, seconds, idle = next(self.now)
            return type(super().stats())(tokens, seconds, idle, 0)

    sink = Metrics()
    metrics = RolloutMetrics(Engine(make_tokenizer(), []), [], sink)
    metrics.write(running=2)
    metrics.write(running=1)
    assert (sink.rows[0][1]["tokens_per_s"], sink.rows[0][1]["idle"]) == (50.0, 0.25)
    assert "idle" not in sink.rows[1][1]
