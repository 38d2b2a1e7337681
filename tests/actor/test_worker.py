"""The worker turns tickets into trajectories, and an episode that fails disturbs no other."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from asyncrl.actor.rollout_metrics import RolloutMetrics
from asyncrl.actor.worker import RolloutWorker
from asyncrl.chat.chat import Chat
from asyncrl.errors import RefusedError, StoppedError, ToolError
from asyncrl.replay.client.client import Outcome
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.types import Purpose, Role, Ticket, ToolCall, Trajectory, Turn
from tests.episode.fakes import ScriptedEngine, make_tokenizer, play_with_tools
from tests.fake_replay import FakeReplay, feed_ticket
from tests.helpers import GENEROUS_S, TOO_LARGE, FakeMetrics, FakeSpans, async_until, make_task, make_trajectory
from tests.tools.interactions.support import Recorded, on_offer

Begin = Callable[[], None]
Act = Callable[[Ticket, Begin], Awaitable[None]]


class TimedOut(BaseException):
    """Like the timeouts of func_timeout, no Exception."""


class Replay(FakeReplay):
    """Has tickets for so many tasks; remembers what the worker asks for. Deliveries wait for `may_store`."""

    def __init__(self, tickets: int, **settings: Any) -> None:
        feed = Feed([make_task(index) for index in range(tickets)], seed=0, shuffle=False)
        super().__init__(feed=feed, group_size=1, admission=Admission(0, tickets), **settings)
        self.requests: list[tuple[tuple[str, ...], int, tuple[str, ...]]] = []
        self.stored: list[str] = []
        self.may_store = threading.Event()
        self.may_store.set()
        self._idle = threading.Event()

    def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
        self.requests.append((tuple(holding), want, tuple(waiting)))
        given = super().tickets(holding, want, waiting)
        if want and not given:
            self._idle.wait(0.02)
        return given

    def put(self, trajectory: Trajectory, images: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
        assert self.may_store.wait(GENEROUS_S)
        answer = super().put(trajectory, images)
        self.stored.append(trajectory.id)
        return answer


async def nothing(ticket: Ticket, begin: Begin) -> None: ...


@asynccontextmanager
async def at_work(
    replay: Replay,
    act: Act = nothing,
    concurrency: int = 4,
    limit_s: float = math.inf,
    renew_s: float = 1000.0,
    stopped: bool = True,
    trajectory: Callable[[Ticket], Trajectory] = make_trajectory,
    spans: FakeSpans | None = None,
) -> AsyncIterator[FakeMetrics]:
    """A running worker, whose episodes `act` and then have a `trajectory`. Afterwards it is `stopped`, or ends by
    itself. Raises what the worker raised."""

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        await act(ticket, begin)
        return trajectory(ticket)

    before, sink, stop = asyncio.all_tasks(), FakeMetrics(), asyncio.Event()
    metrics = RolloutMetrics(ScriptedEngine(make_tokenizer(), []), [lambda: {"tool_calls": 2}], sink, interval_s=0.005)
    rollouts = RolloutWorker(run, replay, replay, concurrency, metrics, limit_s, renew_s, spans)
    worker = asyncio.create_task(rollouts.run(stop))
    logging = asyncio.create_task(metrics.run(lambda: 0))
    try:
        yield sink
    finally:
        if stopped:
            stop.set()
        logging.cancel()
        await asyncio.gather(logging, return_exceptions=True)
        await worker
    assert asyncio.all_tasks() == before


async def finished(sink: FakeMetrics, count: int) -> None:
    """Return once so many attempts have an outcome that the worker has counted."""
    outcomes = ("episodes", "failed", "refused")
    await async_until(lambda: sink.rows and sum(sink.rows[-1][1][each] for each in outcomes) >= count)


async def work(replay: Replay, count: int, act: Act = nothing, **options: Any) -> dict[str, Any]:
    """Let a worker run so many episodes. Returns its last metrics."""
    async with at_work(replay, act, **options) as sink:
        await finished(sink, count)
    return sink.rows[-1][1]


async def test_every_ticket_becomes_one_trajectory_and_no_more_run_than_allowed():
    replay, running, most = Replay(30), 0, 0

    async def act(ticket: Ticket, begin: Begin) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1

    await work(replay, 30, act)
    assert sorted(replay.stored) == [feed_ticket(number) for number in range(30)]
    assert most == 4
    # Those that run, those that wait for their delivery, and those under way.
    assert all(len(holding) + want <= 4 + 4 + 4 for holding, want, _ in replay.requests)


async def test_each_episode_is_recorded_from_its_ticket_until_its_outcome_was_delivered():
    spans = FakeSpans()

    async def act(ticket: Ticket, begin: Begin) -> None:
        if ticket.id == feed_ticket(1):
            raise ToolError("it broke")

    await work(Replay(2), 2, act, spans=spans)
    for name in ("queued", "deliver", "episode"):
        assert {feed_ticket(number) for number in range(2)} <= {each["episode"] for each in spans.of(name)}
    whole = {each["episode"]: each for each in spans.of("episode")}
    assert whole[feed_ticket(0)]["finish"] == "completed"
    assert "it broke" in whole[feed_ticket(1)]["failed"]
    assert spans.of("wait for tickets")[0]["tickets"] == 2


async def test_a_ticket_is_held_until_its_trajectory_is_durable():
    replay = Replay(1)
    replay.may_store.clear()
    async with at_work(replay):
        await async_until(lambda: replay.core.holding())
        seen = len(replay.requests)
        await async_until(lambda: len(replay.requests) > seen + 3)
        assert all(feed_ticket(0) in holding for holding, _, _ in replay.requests[seen + 1 :])
        replay.may_store.set()
        await async_until(lambda: replay.requests[-1][0] == ())
    assert replay.stored == [feed_ticket(0)]


async def test_what_finishes_during_a_delivery_goes_together_with_the_next_one():
    class Counting(Replay):
        def put_all(self, trajectories: Sequence[Trajectory], *images: Any) -> list[Outcome]:
            batches.append([each.id for each in trajectories])
            return super().put_all(trajectories, *images)

    async def act(ticket: Ticket, begin: Begin) -> None:
        begun.append(ticket.id)
        if ticket.id != feed_ticket(0):
            await async_until(lambda: batches and len(begun) == 5)
        ended.append(ticket.id)
        if ticket.id == feed_ticket(3):
            raise ToolError("it broke")

    batches, begun, ended = list[list[str]](), list[str](), list[str]()
    replay = Counting(5)
    replay.may_store.clear()
    async with at_work(replay, act, concurrency=5) as metrics:
        await async_until(lambda: len(ended) == 5)
        # The worker hears of an end some turns of the event loop later.
        for _ in range(100):
            await asyncio.sleep(0)
        assert batches == [[feed_ticket(0)]]
        replay.may_store.set()
        await finished(metrics, 5)
    assert [sorted(each) for each in batches[:2]] == [[feed_ticket(0)], [feed_ticket(each) for each in (1, 2, 4)]]
    assert [*replay.failed] == [feed_ticket(3)]


async def test_a_full_worker_goes_on_renewing_its_leases():
    replay, may_end = Replay(2), asyncio.Event()

    async def act(ticket: Ticket, begin: Begin) -> None:
        await may_end.wait()

    async with at_work(replay, act, concurrency=2, renew_s=0.01) as metrics:
        await async_until(lambda: sum(want == 0 and len(holding) == 2 for holding, want, _ in replay.requests) > 3)
        may_end.set()
        await finished(metrics, 2)


class Silent(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no message")


async def test_a_failed_episode_is_reported_with_its_reason_and_the_worker_goes_on():
    raised = (ToolError("broke"), ZeroDivisionError("a bug"), Silent())
    replay, errors = Replay(5), {feed_ticket(number): error for number, error in enumerate(raised)}

    async def act(ticket: Ticket, begin: Begin) -> None:
        if ticket.id in errors:
            raise errors[ticket.id]

    counted = await work(replay, 3 + 5, act, concurrency=1)
    assert replay.failed.pop(feed_ticket(2)).startswith("Silent")
    reasons = ("ToolError: broke", "ZeroDivisionError: a bug")
    for number, reason in enumerate(reasons):
        assert re.fullmatch(rf"{reason} \(\S*test_worker\.py, line \d+\)", replay.failed[feed_ticket(number)])
    assert sorted(replay.stored) == [feed_ticket(number, attempt=int(number < 3)) for number in range(5)]
    assert (counted["episodes"], counted["failed"]) == (5, 3)


@pytest.mark.parametrize(
    "error", [asyncio.CancelledError(), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), TimedOut("late")]
)
def test_code_of_users_that_cancels_itself_or_ends_the_program_fails_its_episode_only(error: BaseException):
    asyncio.run(_fails_its_episode_only(error))


async def _fails_its_episode_only(error: BaseException) -> None:
    replay = Replay(3)

    async def act(ticket: Ticket, begin: Begin) -> None:
        if ticket.id == feed_ticket(0):
            raise error

    counted = await work(replay, 1 + 3, act, concurrency=1)
    assert type(error).__name__ in replay.failed[feed_ticket(0)]
    assert (counted["episodes"], counted["failed"]) == (3, 1)


async def test_an_episode_that_takes_too_long_fails_and_waiting_for_a_version_does_not_count():
    replay, arrived, never = Replay(2), asyncio.Event(), asyncio.Event()

    async def act(ticket: Ticket, begin: Begin) -> None:
        if ticket.id == feed_ticket(0):
            await arrived.wait()
        begin()
        if ticket.id == feed_ticket(1):
            await never.wait()

    async with at_work(replay, act, limit_s=0.05) as metrics:
        # The limit passes for the running episode while the other one waits.
        await finished(metrics, 2)
        assert "actor.episode_timeout_s" in replay.failed[feed_ticket(1)]
        await async_until(lambda: replay.requests[-1][2] == (feed_ticket(0),))
        arrived.set()
        await finished(metrics, 3)
    assert replay.stored == [feed_ticket(1, attempt=1), feed_ticket(0)]


async def test_a_trajectory_that_is_refused_or_cannot_be_sent_is_counted_and_its_ticket_fails():
    replay = Replay(3)

    def made(ticket: Ticket) -> Trajectory:
        large = (ToolCall("add", {"x": TOO_LARGE if ticket.id == feed_ticket(1) else 1}),)
        turns = (Turn(0, 4, Role.PROMPT), Turn(4, 8, Role.ASSISTANT, "stop", large))
        return make_trajectory(ticket, turns=turns, member=int(ticket.id == feed_ticket(0)))

    counted = await work(replay, 2 + 3, trajectory=made)
    assert sorted(replay.stored) == [feed_ticket(0, attempt=1), feed_ticket(1, attempt=1), feed_ticket(2)]
    assert "is marked as member 1" in replay.failed[feed_ticket(0)]
    assert "cannot be encoded" in replay.failed[feed_ticket(1)]
    assert counted["refused"] == 2


async def test_a_ticket_that_comes_twice_runs_once():
    class Repeating(Replay):
        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
            given = super().tickets(holding, want, waiting)
            return given[:1] + given

    replay, ran = Repeating(2), []

    async def act(ticket: Ticket, begin: Begin) -> None:
        ran.append(ticket.id)
        await async_until(lambda: len(ran) == 2)

    await work(replay, 2, act)
    assert sorted(ran) == [feed_ticket(0), feed_ticket(1)]


async def test_evaluation_runs_first_if_both_wait():
    class Generous(Replay):
        """Sends more tickets than requested, those for training first."""

        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
            return super().tickets(holding, 10 if want else 0, waiting)[::-1]

    replay, ran = Generous(3, held_out=[make_task(3), make_task(4)]), []
    replay.evaluate(0)

    async def act(ticket: Ticket, begin: Begin) -> None:
        ran.append(ticket.purpose)

    await work(replay, 5, act, concurrency=1)
    assert ran == [Purpose.EVAL] * 2 + [Purpose.TRAIN] * 3


@pytest.mark.parametrize("ticks", range(4))
async def test_a_stop_ends_the_worker_though_it_arrives_just_after_an_episode_has_ended(ticks: int):
    replay, stop, ended = Replay(8), asyncio.Event(), asyncio.Event()

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        if ticket.id != feed_ticket(0):
            await asyncio.Event().wait()
        # The worker waits for a free slot by now.
        await async_until(lambda: len(replay.requests) >= 1 and len(replay.core.holding()) == 4)
        await asyncio.sleep(0.01)
        ended.set()
        return make_trajectory(ticket)

    metrics = RolloutMetrics(ScriptedEngine(make_tokenizer(), []), [], FakeMetrics())
    worker = asyncio.create_task(RolloutWorker(run, replay, replay, 4, metrics, renew_s=1000.0).run(stop))
    await ended.wait()
    for _ in range(ticks):
        await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(GENEROUS_S):
        await worker


async def test_a_stop_cancels_running_episodes_and_reports_nothing_of_them():
    replay, released, running = Replay(3), [], []

    async def act(ticket: Ticket, begin: Begin) -> None:
        running.append(ticket.id)
        try:
            await asyncio.Event().wait()
        finally:
            released.append(ticket.id)

    async with at_work(replay, act):
        await async_until(lambda: len(running) == 3)
    assert sorted(released) == sorted(replay.core.holding()) == [feed_ticket(number) for number in range(3)]
    assert not replay.stored
    assert not replay.failed


async def test_all_calls_of_the_client_have_returned_after_a_stop():
    class Slow(Replay):
        in_call = False

        def put(self, trajectory: Trajectory, images: Mapping[bytes, bytes] = MappingProxyType({})) -> str:
            self.in_call = True
            self.may_store.wait(0.2)
            self.in_call = False
            return "stored"

    replay = Slow(1)
    replay.may_store.clear()
    async with at_work(replay):
        await async_until(lambda: replay.in_call)
    assert not replay.in_call


async def test_a_source_that_refuses_ends_the_worker_with_its_reason_and_one_that_stops_ends_it():
    class Raising(Replay):
        def tickets(self, holding: Sequence[str], want: int, waiting: Sequence[str] = ()) -> list[Ticket]:
            raise self.error

    replay = Raising(1)
    replay.error = StoppedError("stopped")
    async with at_work(replay, stopped=False):
        pass
    replay.error = RefusedError("another protocol")
    with pytest.raises(RefusedError, match="another protocol"):
        async with at_work(replay, stopped=False):
            pass


async def test_metrics_are_logged_at_the_served_version():
    async with at_work(Replay(3)) as metrics:
        await finished(metrics, 3)
    step, values = metrics.rows[-1]
    assert step == values["version"] == 3
    assert (values["episodes"], values["tool_calls"], values["tokens"]) == (3, 2, 7)
    names = ("episode_tokens_mean", "episode_tokens_max", "turns_mean", "turns_max")
    assert {tuple(row[name] for name in names) for _, row in metrics.rows if "turns_mean" in row} == {(8, 8, 1, 1)}


def test_rates_are_those_since_the_last_log():
    class Engine(ScriptedEngine):
        now = iter([(0, 0.0, 0.0), (100, 2.0, 0.5), (100, 2.0, 0.5)])

        def stats(self) -> Any:
            tokens, seconds, idle = next(self.now)
            return type(super().stats())(tokens, seconds, idle, 0)

    sink = FakeMetrics()
    metrics = RolloutMetrics(Engine(make_tokenizer(), []), [], sink, processor_s=iter((1.0, 2.0, 2.5)).__next__)
    metrics.write(running=2)
    metrics.write(running=1)
    assert [sink.rows[0][1][name] for name in ("tokens_per_s", "idle", "loop_busy")] == [50.0, 0.25, 0.5]
    assert "idle" not in sink.rows[1][1]


async def test_a_worker_that_drains_delivers_what_has_begun_and_takes_no_more():
    replay, may_end, begun = Replay(8), asyncio.Event(), list[str]()

    async def act(ticket: Ticket, begin: Begin) -> None:
        if len(begun) == 2:
            await asyncio.Event().wait()  # It waits for a version.
        begin()
        begun.append(ticket.id)
        await may_end.wait()

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        await act(ticket, begin)
        return make_trajectory(ticket)

    stop, metrics = asyncio.Event(), RolloutMetrics(ScriptedEngine(make_tokenizer(), []), [], FakeMetrics())
    worker = RolloutWorker(run, replay, replay, 3, metrics, renew_s=0.01)
    working = asyncio.create_task(worker.run(stop))
    await async_until(lambda: len(begun) == 2)
    assert worker.undelivered == 2
    replay.may_store.clear()
    worker.drain()
    may_end.set()
    requests = len(replay.requests)
    await async_until(lambda: len(replay.requests) > requests + 3)
    assert worker.undelivered, "none is stored yet"
    assert {want for _, want, _ in replay.requests[requests + 1 :]} == {0}
    replay.may_store.set()
    await async_until(lambda: not worker.undelivered)
    stop.set()
    await working
    assert sorted(replay.stored) == sorted(begun)


@pytest.mark.parametrize(("limit_s", "reason"), [(math.inf, None), (0.05, "episode_timeout_s=0.05")])
async def test_a_worker_that_stops_and_an_episode_that_takes_too_long_finalize_their_simulated_users(
    limit_s: float, reason: str | None
):
    async def wait(instance_id: str, messages: list[dict[str, Any]]) -> Any:
        await asyncio.Event().wait()

    async def run(ticket: Ticket, begin: Begin) -> Trajectory:
        begin()
        named = replace(ticket, task=replace(ticket.task, extra_info={"interaction_kwargs": {"name": "user"}}))
        engine = ScriptedEngine(tokenizer, ["4"])
        return await play_with_tools(engine, Chat(tokenizer), {}, named, interactions=users)

    def called(method: str) -> list[str]:
        return sorted(name for each, name in user.calls if each == method)

    user, tokenizer, replay, stop = Recorded(wait), make_tokenizer(), Replay(2), asyncio.Event()
    users = on_offer(user, timeout_s=GENEROUS_S)
    metrics = RolloutMetrics(ScriptedEngine(tokenizer, []), [], FakeMetrics())
    worker = asyncio.create_task(RolloutWorker(run, replay, replay, 2, metrics, limit_s).run(stop))
    await async_until(lambda: len(called("generate_response")) >= 2)
    if reason:
        await async_until(lambda: len(replay.failed) >= 2)
        assert all(reason in each for each in replay.failed.values())
    stop.set()
    await worker
    assert called("finalize_interaction") == called("start_interaction")
