"""`python -m asyncrl.actor`: run episodes on one engine until SIGTERM or Ctrl-C, or until the run is done.

On SIGUSR2 it finishes and delivers the running episodes, for up to cluster.drain_s seconds, and returns all other
tickets to the replay. Then it ends.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, closing, suppress
from typing import TYPE_CHECKING

from asyncrl.config import locations
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import TooManyFailuresError
from asyncrl.machine import process
from asyncrl.machine.activity import BEAT_S, Activity, heartbeat
from asyncrl.machine.blocked_loop import watched_loop
from asyncrl.replay.client.client import RENEWALS_PER_LEASE, ReplayClient
from asyncrl.replay.client.leaving import leave

if TYPE_CHECKING:
    from asyncrl.actor.worker import RolloutWorker
    from asyncrl.engine.base import Engine
    from asyncrl.weights.receiver import Receiver

log = logging.getLogger(__name__)

STOP_POLL_S = 0.1


def run(config: TrainConfig) -> None:
    """Run episodes until a signal. Raises ConfigError: the model or a tool cannot be loaded; RunOverError: the replay
    says that the run is done."""
    stop, drain, activity = process.stop_on_signals(), process.event_on(process.DRAIN), Activity()
    process.limit_threads(config.cluster.actor_threads)
    with heartbeat(activity, config.cluster.hang_timeout_s):
        asyncio.run(_run(config, stop, drain, activity))


async def _run(config: TrainConfig, stop: threading.Event, drain: threading.Event, activity: Activity) -> None:
    """Open the engine, the runner of episodes, the receiver of weights and the workers. Let them work until one of them
    ends."""
    # Imported here, because a command that imports this file for its help must not load torch.
    from asyncrl.actor.from_config import open_runner
    from asyncrl.actor.rollout_metrics import RolloutMetrics
    from asyncrl.actor.worker import RolloutWorker, first_to_end
    from asyncrl.engine.from_config import open_engine
    from asyncrl.network.keys import client_keys
    from asyncrl.observe.from_config import open_reports
    from asyncrl.tools.call_threads import open_to_users
    from asyncrl.weights.from_config import open_routes
    from asyncrl.weights.receiver import Receiver

    actor, at_once = config.actor, config.actor.at_once(config.learner.batch_size)
    # Tools that block run in these threads. With a thread for each call, no episode waits for another one's tool.
    threads = open_to_users(asyncio.get_running_loop(), "a tool or of the actor")
    keys, life = client_keys(config.network.keys), process.incarnation()
    async with AsyncExitStack() as stack:
        reports = stack.enter_context(open_reports(config, process.worker_name("actor")))
        spans = reports.spans
        opened = open_engine(config, spans)
        engine = opened.engine
        stack.push_async_callback(engine.close)
        metrics = reports.metrics()
        runner = await open_runner(config, engine, stack, spans)
        routes = open_routes(config, keys)
        receiver = Receiver(routes, opened.expected, canary_tolerance=config.weights.canary_tolerance, spans=spans)
        others = [runner.player.counters, receiver.counters, lambda: {"threads_stuck": threads.stuck}]
        measured = RolloutMetrics(engine, others, metrics)
        run_id = locations.run_identity(config.run)

        def connect(endpoint: str) -> ReplayClient:
            client = ReplayClient(endpoint, reports.name, life, stop, keys=keys, run=run_id, spans=spans)
            return stack.enter_context(closing(client))

        endpoints = locations.replay_endpoints(config.network, config.replay.shards)
        # The actor has one worker for each shard of the replay, so an unreachable shard blocks only its share of the
        # episodes.
        share, renew_s = max(1, at_once // len(endpoints)), config.replay.lease_s / RENEWALS_PER_LEASE
        settings = (share, measured, actor.episode_timeout_s, renew_s, spans, runner.outgoing)
        workers = [RolloutWorker(runner.run, connect(each), connect(each), *settings) for each in endpoints]
        process.freeze_heap()
        process.collect_rarely()
        stack.enter_context(watched_loop(activity))
        await first_to_end(
            *(worker.run(_as_asyncio(stop)) for worker in workers),
            measured.run(lambda: sum(worker.active for worker in workers)),
            _follow(receiver, engine, config.learner.steps == 0),
            _show_life(activity, opened.respond),
            _drain(workers, _as_asyncio(drain), stop, config.cluster.drain_s),
            *(keep() for keep in opened.keepers),
        )
        if drain.is_set():
            leave(endpoints, reports.name, life, keys, run_id)


async def _drain(workers: Sequence[RolloutWorker], drain: asyncio.Event, stop: threading.Event, limit_s: float) -> None:
    """Once `drain` is set, wait up to `limit_s` seconds for the running episodes to end. Then set `stop`."""
    await drain.wait()
    log.info("waiting up to %g s for the running episodes", limit_s)
    for worker in workers:
        worker.drain()
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while any(worker.undelivered for worker in workers):
                await asyncio.sleep(STOP_POLL_S)
    if late := sum(worker.undelivered for worker in workers):
        log.warning("%d episodes did not end within cluster.drain_s: they will be played again", late)
    else:
        log.info("all running episodes were delivered")
    stop.set()
    await asyncio.Event().wait()


async def _follow(receiver: Receiver, engine: Engine, is_only_version: bool) -> None:
    """Load each new version of the weights into the engine. Raises TooManyFailuresError: the run has only one version,
    and the engine fails its canary, a check of log-probs (`weights/canary.py`)."""
    from asyncrl.weights.canary import CanaryError

    try:
        await receiver.run(engine)
    except CanaryError as error:
        if is_only_version:
            raise TooManyFailuresError(f"{error}, and no other version follows") from error
        raise


async def _show_life(activity: Activity, respond: Callable[[], Awaitable[None]]) -> None:
    """Advance `activity` as long as the event loop runs and the engine responds."""
    activity.enter("play")
    while True:
        await respond()
        activity.advance()
        await asyncio.sleep(BEAT_S)


def _as_asyncio(stop: threading.Event) -> asyncio.Event:
    """Make an asyncio event that is set soon after `stop`, which a signal handler sets."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def look() -> None:
        if stop.is_set():
            event.set()
        else:
            loop.call_later(STOP_POLL_S, look)

    look()
    return event


def main(argv: Sequence[str]) -> int:
    """Run this role with the arguments of a command line, and return the exit status."""
    return role_main(run, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
