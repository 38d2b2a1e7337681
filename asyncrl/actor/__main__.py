"""`python -m asyncrl.actor`: run episodes on one engine until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import TYPE_CHECKING

from asyncrl import process
from asyncrl.config.checks import check_bind
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.replay.client import ReplayClient

if TYPE_CHECKING:
    from asyncrl.actor.chat import Chat
    from asyncrl.actor.door.server import Door
    from asyncrl.actor.engine.base import Engine
    from asyncrl.actor.episode import Limits
    from asyncrl.actor.toolbox import Toolbox
    from asyncrl.types import Ticket, Trajectory

STOP_POLL_S = 0.1


def run(config: TrainConfig) -> None:
    """Run episodes until a signal. Raises ConfigError: the model or a tool cannot be loaded."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.actor_threads)
    asyncio.run(_run(config, stop))


async def _run(config: TrainConfig, stop: threading.Event) -> None:
    import zmq.asyncio

    from asyncrl.actor.engine.opening import open_engine
    from asyncrl.actor.report import Report
    from asyncrl.actor.toolbox import Toolbox, ToolLimits
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.actor.worker import Worker
    from asyncrl.observe.sinks import open_metrics
    from asyncrl.weights.channels.zmq import ZmqChannel
    from asyncrl.weights.receiver import Receiver

    actor, network = config.actor, config.network
    # Tools that block run in these threads; as many as there are episodes, so that none waits for another's tool.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(actor.concurrency))
    limits = ToolLimits(actor.tool_timeout_s, actor.tool_retries, actor.max_tool_chars)
    tools = Toolbox(tool_classes(actor.tools), limits)
    opened = open_engine(config)
    engine = opened.engine
    name, life, endpoint = process.worker_name("actor"), process.incarnation(), process.replay_endpoint(network)
    async with AsyncExitStack() as stack:
        metrics = stack.enter_context(closing(open_metrics(config.observe, process.run_dir(config.run), name)))
        source = stack.enter_context(closing(ReplayClient(endpoint, name, life, stop)))
        sink = stack.enter_context(closing(ReplayClient(endpoint, name, life, stop)))
        stack.push_async_callback(engine.close)
        chat = _chat(config, tools)
        door = await _door(config, engine, chat, stack)
        report = Report(engine, tools.counts, metrics, door=door.counts if door else None)
        worker = Worker(_episodes(config, engine, chat, tools, door), source, sink, actor.concurrency, report)
        channel = ZmqChannel(process.weights_endpoint(network), zmq.asyncio.Context.instance())
        await _first_to_end(
            worker.run(_as_asyncio(stop)),
            Receiver(channel, opened.expected).run(engine),
            *(keep() for keep in opened.keepers),
        )


def _chat(config: TrainConfig, tools: Toolbox) -> Chat:
    """The policy's chat template. Raises ConfigError: it does not do."""
    from transformers import AutoTokenizer

    from asyncrl.actor.chat import Chat

    model = config.model
    tokenizer = AutoTokenizer.from_pretrained(model.path, trust_remote_code=model.trust_remote_code)
    chat = Chat(tokenizer, config.actor.template_kwargs)
    if tools.names:
        # A template that cannot show tool results is found out now, not at the first call.
        chat.suffix([{"role": "tool", "name": name, "content": ""} for name in tools.names], [])
    return chat


async def _door(config: TrainConfig, engine: Engine, chat: Chat, stack: AsyncExitStack) -> Door | None:
    """The door where agents from outside play the episodes, opened until the stack ends."""
    if config.actor.agent is None:
        return None
    from asyncrl.actor.door.server import Door

    check_bind(config.actor.door_host, config.network.insecure)
    door = Door(engine, chat, _limits(config), config.actor.door_host, config.actor.door_port)
    await door.start()
    stack.push_async_callback(door.close)
    return door


def _episodes(
    config: TrainConfig, engine: Engine, chat: Chat, tools: Toolbox, door: Door | None
) -> Callable[[Ticket], Awaitable[Trajectory]]:
    """What runs the episode of a ticket."""
    actor = config.actor
    if door is None or actor.agent is None:
        from asyncrl.actor.rollout import run_episode

        limits = _limits(config)
        return partial(run_episode, engine=engine, chat=chat, toolbox=tools, limits=limits, step_split=actor.step_split)
    from asyncrl.actor.door.agent import load_agent
    from asyncrl.actor.door.episode import run_agent_episode

    return partial(
        run_agent_episode,
        engine=engine,
        chat=chat,
        door=door,
        agent=load_agent(actor.agent),
        timeout_s=actor.agent_timeout_s,
        step_split=actor.step_split,
    )


def _limits(config: TrainConfig) -> Limits:
    from asyncrl.actor.episode import Limits

    return Limits(config.actor.max_turns, config.actor.max_turn_tokens, config.actor.max_tokens)


async def _first_to_end(*works: Awaitable[None]) -> None:
    """Run all until one ends, with its error if it has one: an actor needs its tickets, its weights and its servers."""
    tasks = [asyncio.ensure_future(work) for work in works]
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
