"""The worker: tickets in, trajectories out, whatever happens to one episode."""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.actor.worker import RolloutWorker, RunEpisode
from asyncrl.errors import RefusedError, StoppedError, ToolError
from asyncrl.types import Purpose, Role, Ticket, ToolCall, Trajectory, Turn
from asyncrl.wire import encode, trajectory_message
from tests.actor.fakes import ScriptedEngine, make_ticket, make_tokenizer
from tests.helpers import GENEROUS_S, async_until, make_trajectory

Begin = Callable[[], None]


class Replay:
    """Tickets and results, as the two clients show them; it gives again what it thinks lost, as the replay does."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self.fresh = list(tickets)
        self.leased: dict[str, Ticket] = {}
        self.asked: list[tuple[tuple[str, ...], int]] = []
        self.waited: list[tuple[str, ...]] = []
        self.stored: list[str] = []
        self.failed: dict[str, str] = {}
        self.may_store = threading.Event()
        self.may_store.set()
        self.refuses: set[str] = set()
        self._changed = threading.Condition()

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
        with self._changed:
            self.asked.append((tuple(holding), want))
            self.waited.append(tuple(waiting))
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
        return "stored"

    def fail(self, ticket_id: str, reason: str) -> None:
        self.leased.pop(ticket_id)
        self.failed[ticket_id] = reason

    @property
    def done(self) -> int:
        return len(self.stored) + len(self.failed)


class Metrics:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(values)))

    def close(self) -> None: ...


def tickets(count: int) -> list[Ticket]:
    return [make_ticket(f"t{index}") for index in range(count)]


async def at_work(
    replay: Replay,
    run: RunEpisode,
    act: Callable[[], Awaitable[None]],
    concurrency: int = 4,
    interval_s: float = 60.0,
    limit_s: float = math.inf,
    renew_s: float = 60.0,
) -> Metrics:
    """Do `act` while a worker is running, then stop it. What the worker raised is raised."""
    metrics, stop = Metrics(), asyncio.Event()
    measured = RolloutMetrics(ScriptedEngine(make_tokenizer(), []), [lambda: {"tool_calls": 2}], metrics, interval_s)
    worker = asyncio.create_task(RolloutWorker(run, replay, replay, concurrency, measured, limit_s, renew_s).run(stop))
    reporting = asyncio.create_task(measured.run(lambda: 0))
    try:
        acting = asyncio.create_task(act())
        await asyncio.wait([worker, acting], return_when=asyncio.FIRST_COMPLETED)
        if acting.done():
            acting.result()
        else:
            acting.cancel()
    finally:
        stop.set()
        await worker
        reporting.cancel()
        await asyncio.gather(reporting, return_exceptions=True)
    assert asyncio.all_tasks() - {acting} == {asyncio.current_task()}
    return metrics


async def well(ticket: Ticket, begin: Begin) -> Trajectory:
    return make_trajectory(ticket)


def test_every_ticket_becomes_one_trajectory_and_no_more_run_than_allowed():
    async def main() -> None:
        replay, running, most = Replay(tickets(30)), 0, 0

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            nonlocal running, most
            running += 1
            most = max(most, running)
            await asyncio.sleep(0.001)
            running -= 1
            return make_trajectory(ticket)

        await at_work(replay, run, lambda: async_until(lambda: replay.done == 30))
        assert sorted(replay.stored) == sorted(ticket.id for ticket in tickets(30))
        assert most == 4
        assert all(len(holding) + want <= 4 + 4 + 1 for holding, want in replay.asked)

    asyncio.run(main())


def test_a_ticket_is_held_until_its_trajectory_is_durable():
    async def main() -> None:
        replay = Replay(tickets(1))
        replay.may_store.clear()

        async def act() -> None:
            await async_until(lambda: replay.leased)
            seen = len(replay.asked)
            await async_until(lambda: len(replay.asked) > seen + 3)
            assert all("t0" in holding for holding, _ in replay.asked[seen + 1 :])
            replay.may_store.set()
            await async_until(lambda: replay.asked[-1][0] == ())

        await at_work(replay, well, act)
        assert replay.stored == ["t0"]

    asyncio.run(main())


def test_a_full_worker_goes_on_renewing_its_leases():
    async def main() -> None:
        replay, may_end = Replay(tickets(2)), asyncio.Event()

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            await may_end.wait()
            return make_trajectory(ticket)

        async def act() -> None:
            await async_until(lambda: len([1 for holding, want in replay.asked if want == 0 and len(holding) == 2]) > 3)
            may_end.set()
            await async_until(lambda: replay.done == 2)

        await at_work(replay, run, act, concurrency=2, renew_s=0.01)

    asyncio.run(main())


def test_a_freed_place_is_filled_at_once():
    async def main() -> None:
        replay = Replay(tickets(20))
        await at_work(replay, well, lambda: async_until(lambda: replay.done == 20), concurrency=1, renew_s=1000.0)

    asyncio.run(main())


def test_a_failed_episode_is_reported_with_its_reason_and_the_worker_goes_on():
    async def main() -> None:
        replay = Replay(tickets(4))

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            if ticket.id == "t0":
                raise ToolError("a tool broke")
            if ticket.id == "t1":
                raise ZeroDivisionError("a bug")
            return make_trajectory(ticket)

        metrics = await at_work(replay, run, lambda: async_until(lambda: replay.done == 4), concurrency=1)
        assert replay.failed == {"t0": "ToolError: a tool broke", "t1": "ZeroDivisionError: a bug"}
        assert sorted(replay.stored) == ["t2", "t3"]
        assert (metrics.rows[-1][1]["episodes"], metrics.rows[-1][1]["failed"]) == (2, 2)

    asyncio.run(main())


def test_an_episode_that_takes_too_long_is_given_up_with_the_key_that_says_so():
    async def main() -> None:
        replay = Replay(tickets(2))

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            if ticket.id == "t0":
                begin()
                await asyncio.Event().wait()
            return make_trajectory(ticket)

        await at_work(replay, run, lambda: async_until(lambda: replay.done == 2), limit_s=0.05)
        assert list(replay.failed) == ["t0"]
        assert "actor.episode_timeout_s" in replay.failed["t0"]
        assert list(replay.stored) == ["t1"]

    asyncio.run(main())


def test_waiting_for_a_version_is_no_part_of_an_episodes_time():
    async def main() -> None:
        replay, arrived, ended = Replay(tickets(2)), asyncio.Event(), asyncio.Event()

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            if ticket.id == "t0":
                await arrived.wait()
            begin()
            if ticket.id == "t1":
                await ended.wait()
            return make_trajectory(ticket)

        async def act() -> None:
            # The limit passes for the episode that runs, while the other one waits.
            await async_until(lambda: replay.failed)
            assert list(replay.failed) == ["t1"]
            await async_until(lambda: replay.waited[-1] == ("t0",))
            arrived.set()
            await async_until(lambda: replay.done == 2)

        await at_work(replay, run, act, limit_s=0.05)
        assert (list(replay.stored), list(replay.failed)) == (["t0"], ["t1"])

    asyncio.run(main())


def test_a_refused_trajectory_is_counted_and_its_ticket_given_back_as_failed():
    async def main() -> None:
        replay = Replay(tickets(2))
        replay.refuses = {"t0"}
        metrics = await at_work(replay, well, lambda: async_until(lambda: replay.done == 2))
        assert replay.stored == ["t1"]
        assert "not mine" in dict(replay.failed)["t0"]
        assert metrics.rows[-1][1]["refused"] == 1

    asyncio.run(main())


def test_a_failure_that_cannot_even_tell_its_reason_ends_no_worker():
    class Silent(Exception):  # noqa: N818
        def __str__(self) -> str:
            raise ValueError("no message")

    async def main() -> None:
        replay = Replay(tickets(2))

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            if ticket.id == "t0":
                raise Silent
            return make_trajectory(ticket)

        await at_work(replay, run, lambda: async_until(lambda: replay.done == 2))
        assert "Silent" in replay.failed["t0"]
        assert replay.stored == ["t1"]

    asyncio.run(main())


def test_a_trajectory_that_cannot_be_sent_is_counted_and_its_ticket_given_back_as_failed():
    async def main() -> None:
        replay = Replay(tickets(2))

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            large = (ToolCall("add", {"x": 2**70 if ticket.id == "t0" else 1}),)
            turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", large))
            return make_trajectory(ticket, turns=turns)

        metrics = await at_work(replay, run, lambda: async_until(lambda: replay.done == 2))
        assert replay.stored == ["t1"]
        assert "cannot be encoded" in replay.failed["t0"]
        assert metrics.rows[-1][1]["refused"] == 1

    asyncio.run(main())


def test_a_ticket_that_comes_twice_runs_once():
    async def main() -> None:
        replay, ran = Replay([make_ticket("t0"), make_ticket("t0"), make_ticket("t1")]), []

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            ran.append(ticket.id)
            await async_until(lambda: len(ran) == 2)
            return make_trajectory(ticket)

        await at_work(replay, run, lambda: async_until(lambda: replay.done == 2))
        assert sorted(ran) == ["t0", "t1"]

    asyncio.run(main())


def test_evaluation_runs_first_where_both_wait():
    async def main() -> None:
        class Generous(Replay):
            """Gives more than was asked for, as after a lost reply."""

            def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
                return super().tickets(holding, 10 if want else 0, waiting)

        mixed = [make_ticket(f"t{i}", Purpose.EVAL if i >= 3 else Purpose.TRAIN) for i in range(5)]
        replay, ran = Generous(mixed), []

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            ran.append(ticket.id)
            return make_trajectory(ticket)

        await at_work(replay, run, lambda: async_until(lambda: replay.done == 5), concurrency=1)
        assert ran == ["t3", "t4", "t0", "t1", "t2"]

    asyncio.run(main())


def test_a_stop_cancels_what_runs_and_reports_nothing_of_it():
    async def main() -> None:
        replay, released, running = Replay(tickets(3)), [], []

        async def run(ticket: Ticket, begin: Begin) -> Trajectory:
            running.append(ticket.id)
            try:
                await asyncio.Event().wait()
            finally:
                released.append(ticket.id)
            return make_trajectory(ticket)

        metrics = await at_work(replay, run, lambda: async_until(lambda: len(running) == 3))
        assert sorted(released) == ["t0", "t1", "t2"]
        assert replay.done == 0
        assert sorted(replay.leased) == ["t0", "t1", "t2"]
        assert len(metrics.rows) == 1

    asyncio.run(main())


def test_no_client_call_is_at_work_after_a_stop():
    async def main() -> None:
        class Slow(Replay):
            at_work = False

            def put(self, trajectory: Trajectory) -> str:
                self.at_work = True
                self.may_store.wait(0.2)
                self.at_work = False
                return "stored"

        replay = Slow(tickets(1))
        replay.may_store.clear()
        await at_work(replay, well, lambda: async_until(lambda: replay.at_work))
        assert not replay.at_work

    asyncio.run(main())


def test_a_client_that_was_told_to_stop_stops_the_worker():
    class Stopped(Replay):
        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
            raise StoppedError("stopped")

    asyncio.run(at_work(Stopped([]), well, asyncio.Event().wait))  # type: ignore[arg-type]


def test_a_source_that_refuses_ends_the_worker_with_its_reason():
    class Refusing(Replay):
        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str]) -> list[Ticket]:
            raise RefusedError("another protocol")

    with pytest.raises(RefusedError, match="another protocol"):
        asyncio.run(at_work(Refusing([]), well, asyncio.Event().wait))  # type: ignore[arg-type]


def test_what_is_measured_is_logged_at_the_served_version():
    async def main() -> None:
        replay = Replay(tickets(3))
        metrics = await at_work(replay, well, lambda: async_until(lambda: replay.done == 3))
        ((step, values),) = metrics.rows
        assert step == values["version"] == 3
        assert (values["episodes"], values["tool_calls"], values["tokens"]) == (3, 2, 7)
        assert values["episode_tokens"] == [8.0] * 3
        assert values["turns"] == [1.0] * 3

    asyncio.run(main())


def test_rates_are_those_since_the_last_report():
    class Engine(ScriptedEngine):
        now = iter([(0, 0.0, 0.0), (100, 2.0, 0.5), (100, 2.0, 0.5)])

        def stats(self) -> Any:
            tokens, seconds, idle = next(self.now)
            return type(super().stats())(tokens, seconds, idle, 0)

    metrics = Metrics()
    measured = RolloutMetrics(Engine(make_tokenizer(), []), [], metrics)
    measured.write(running=2)
    measured.write(running=1)
    assert (metrics.rows[0][1]["tokens_per_s"], metrics.rows[0][1]["idle"]) == (50.0, 0.25)
    assert "idle" not in metrics.rows[1][1]
