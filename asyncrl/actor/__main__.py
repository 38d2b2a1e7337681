"""`python -m asyncrl.actor`: run episodes on one engine until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.replay.client import ReplayClient

if TYPE_CHECKING:
    from asyncrl.actor.engine.base import Engine
    from asyncrl.actor.toolbox import Toolbox
    from asyncrl.types import Ticket, Trajectory

STOP_POLL_S = 0.1


def run(config: TrainConfig) -> None:
    """Run episodes until a signal. Raises ConfigError: the model or a tool cannot be loaded."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.actor_threads)
    asyncio.run(_run(config, stop))


async def _run(config: TrainConfig, stop: threading.Event) -> None:
    from asyncrl.actor.engine.embedded import EmbeddedEngine
    from asyncrl.actor.report import Report
    from asyncrl.actor.toolbox import Toolbox, ToolLimits
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.actor.worker import Worker
    from asyncrl.network.keys import client_keys
    from asyncrl.observe.sinks import open_metrics
    from asyncrl.weights.channels.opening import open_channels
    from asyncrl.weights.receiver import Receiver

    actor, model, network = config.actor, config.model, config.network
    # Tools that block run in these threads; as many as there are episodes, so that none waits for another's tool.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(actor.concurrency))
    limits = ToolLimits(actor.tool_timeout_s, actor.tool_retries, actor.max_tool_chars)
    tools = Toolbox(tool_classes(actor.tools), limits)
    engine = EmbeddedEngine.load(
        model.path, config.engine, dtype=model.dtype, trust_remote_code=model.trust_remote_code, seed=config.run.seed
    )
    keys = client_keys(network)
    name, life = process.worker_name("actor"), process.incarnation()
    endpoints = process.replay_endpoints(network, config.replay.shards)
    with ExitStack() as stack:
        metrics = stack.enter_context(closing(open_metrics(config.observe, process.run_dir(config.run), name)))
        receiver = Receiver(open_channels(config, keys), engine.expected)
        report = Report(engine, tools.counts, metrics, receiver.counters)

        def connect(endpoint: str) -> ReplayClient:
            return stack.enter_context(closing(ReplayClient(endpoint, name, life, stop, keys=keys)))

        episodes = _episodes(config, engine, tools)
        # A shard that is away holds up its own share of the episodes only.
        share = max(1, actor.concurrency // len(endpoints))
        workers = [
            Worker(episodes, connect(each), connect(each), share, report, actor.episode_timeout_s) for each in endpoints
        ]
        try:
            await _first_to_end(
                *(worker.run(_as_asyncio(stop)) for worker in workers),
                report.run(lambda: sum(worker.active for worker in workers)),
                receiver.run(engine),
            )
        finally:
            await engine.close()


def _episodes(config: TrainConfig, engine: Engine, tools: Toolbox) -> Callable[[Ticket], Awaitable[Trajectory]]:
    """What runs the episode of a ticket. Raises ConfigError: the chat template does not do."""
    from transformers import AutoTokenizer

    from asyncrl.actor.chat import Chat
    from asyncrl.actor.episode import Limits
    from asyncrl.actor.rollout import run_episode

    actor, model = config.actor, config.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    chat = Chat(tokenizer, actor.template_kwargs)
    if tools.names:
        # A template that cannot show tool results is found out now, not at the first call.
        chat.suffix([{"role": "tool", "name": name, "content": ""} for name in tools.names], [])
    limits = Limits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens)
    return partial(run_episode, engine=engine, chat=chat, toolbox=tools, limits=limits, step_split=actor.step_split)


async def _first_to_end(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends, with its error if it has one: an actor needs both its tickets and its weights."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _as_asyncio(stop: threading.Event) -> asyncio.Event:
    """An asyncio event that follows `stop`, which a signal handler sets."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()

    def look() -> None:
        if stop.is_set():
            event.set()
        else:
            loop.call_later(STOP_POLL_S, look)

    look()
    return event


def main() -> None:
    """The entry of the command line."""
    role_main(run)


if __name__ == "__main__":
    main()
