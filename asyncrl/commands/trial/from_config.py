"""Plays the episode of `asyncrl try` with the engine, the tools and the agent of a configuration."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from asyncrl.actor.from_config import open_runner
from asyncrl.chat.chat import Chat
from asyncrl.commands.trial.transcript import Transcript
from asyncrl.config.schema import TrainConfig
from asyncrl.engine.base import Engine
from asyncrl.engine.scripted import ScriptedEngine
from asyncrl.observe.shown_text import shown_text
from asyncrl.text import reason_of
from asyncrl.types import Purpose, Task, Ticket, Trajectory


async def play(
    config: TrainConfig, task: Task, chat: Chat, script: ScriptedEngine | None, transcript: Transcript
) -> Trajectory | None:
    """Play an episode with the configured engine, or with `script` if it is not None. Return the trajectory, or None if
    the episode failed.

    Raises ConfigError: the engine or the environment cannot be used.
    """
    actor = config.actor
    async with AsyncExitStack() as stack:
        engine: Engine | None = script
        if engine is None:
            # Imported here, because a trial with a script should not wait for the imports of an engine.
            from asyncrl.commands.trial.engines import open_engine
            from asyncrl.engine.from_config import open_server

            sized = replace(config.engine, max_length=config.engine.max_length or actor.max_tokens)
            engine = open_engine(sized, config.model, config.run.seed, partial(open_server, config))
        stack.push_async_callback(engine.close)
        runner = await open_runner(config, engine, stack, chat=chat, watch=transcript.messages)
        ticket = Ticket("try", task, "try", 0, Purpose.TRAIN, actor.temperature, engine.version)
        try:
            async with asyncio.timeout(actor.episode_timeout_s):
                trajectory = await runner.run(ticket, lambda: None)
        except Exception as error:  # noqa: BLE001 - as in a run, a failed episode does not end the process
            transcript.failure(f"the episode failed: {reason_of(error)}")
            return None
    if actor.played_by:
        texts = (
            (turn.role.value, shown_text(trajectory, turn.start, turn.end, chat.text)) for turn in trajectory.turns
        )
        transcript.messages([{"role": role, "content": text} for role, text in texts])
    transcript.outcome(trajectory)
    return trajectory
