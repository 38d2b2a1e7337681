"""`python -m asyncrl.actor`: run episodes on one engine until SIGTERM or Ctrl-C."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from asyncrl import process
from asyncrl.config.load import role_main
from asyncrl.config.schema import TrainConfig
from asyncrl.replay.client import ReplayClient

STOP_POLL_S = 0.1


def run(config: TrainConfig) -> None:
    """Run episodes until a signal. Raises ConfigError: the model or a tool cannot be loaded."""
    stop = process.stop_on_signals()
    process.limit_threads(config.cluster.actor_threads)
    asyncio.run(_run(config, stop))


async def _run(config: TrainConfig, stop: threading.Event) -> None:
    import zmq.asyncio
    from transformers import AutoTokenizer

    from asyncrl.actor.chat import Chat
    from asyncrl.actor.engine.embedded import EmbeddedEngine
    from asyncrl.actor.episode import Limits
    from asyncrl.actor.report import Report
    from asyncrl.actor.rollout import run_episode
    from asyncrl.actor.toolbox import Toolbox, ToolLimits
    from asyncrl.actor.tools.registry import tool_classes
    from asyncrl.actor.worker import Worker
    from asyncrl.observe.metrics import open_metrics
    from asyncrl.weights.channels.zmq import ZmqChannel
    from asyncrl.weights.receiver import Receiver

    # Tools that block run in these threads; as many as there are episodes, so that none waits for another's tool.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(config.actor.concurrency))
    actor, name, life = config.actor, process.worker_name("actor"), process.incarnation()
    classes = tool_classes(actor.tools)
    tools = Toolbox(classes, ToolLimits(actor.tool_timeout_s, actor.tool_retries, actor.max_tool_chars))
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    chat = Chat(tokenizer, actor.template_kwargs)
    if classes:
        # A template that cannot show tool results is found out now, not at the first call.
        chat.suffix([{"role": "tool", "name": name, "content": ""} for name in classes], [])
    engine = EmbeddedEngine.load(
        config.model.path,
        config.engine,
        dtype=config.model.dtype,
        trust_remote_code=config.model.trust_remote_code,
        seed=config.run.seed,
    )
    metrics = open_metrics(config.observe, process.run_dir(config.run), name)
    clients = [ReplayClient(process.replay_endpoint(config.network), name, life, stop) for _ in range(2)]
    worker = Worker(
        partial(
            run_episode,
            engine=engine,
            chat=chat,
            toolbox=tools,
            limits=Limits(actor.max_turns, actor.max_turn_tokens, actor.max_tokens),
            step_split=actor.step_split,
        ),
        source=clients[0],
        sink=clients[1],
        concurrency=actor.concurrency,
        report=Report(engine, tools.counts, metrics),
    )
    channel = ZmqChannel(process.weights_endpoint(config.network), zmq.asyncio.Context.instance())
    weights = asyncio.create_task(Receiver(channel, engine.expected).run(engine))
    work = asyncio.create_task(worker.run(_as_asyncio(stop)))
    try:
        # Without weights there is no work either: whichever ends first ends the actor, with its error.
        done, _ = await asyncio.wait([work, weights], return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in (work, weights):
            task.cancel()
        await asyncio.gather(work, weights, return_exceptions=True)
        await engine.close()
        for client in clients:
            client.close()
        metrics.close()


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
