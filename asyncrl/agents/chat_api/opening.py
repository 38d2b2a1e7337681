"""Opens the player of an actor whose configuration names an agent: a function, a program, or agents that connect."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from contextlib import AsyncExitStack
from pathlib import Path

from asyncrl.agents.chat_api.agent import AgentPlayer, load_agent
from asyncrl.agents.chat_api.program import AgentPrograms
from asyncrl.agents.chat_api.server import WITH_IMAGES, Bounds
from asyncrl.agents.chat_api.sessions import Sessions
from asyncrl.config.schema import ActorConfig
from asyncrl.machine import process
from asyncrl.machine.files import write_whole
from asyncrl.machine.ports import LOOK_S, TakenPort
from asyncrl.network.proxies import reach_directly


async def open_agent(actor: ActorConfig, folder: Path, stack: AsyncExitStack, images: bool) -> AgentPlayer:
    """Open the player. Its endpoints answer until `stack` closes. With `images`, requests may have images.

    The player's address is written into `folder`, for agents that connect. Raises ConfigError: the agent cannot be
    used.
    """
    environment = dict(actor.agent_environment)
    for each in (os.environ, environment):
        # An agent's HTTP client would use the proxy that an environment variable names, but a proxy cannot reach this
        # host's loopback interface.
        reach_directly([actor.chat_api_host], each)
    where = (actor.chat_api_host, actor.chat_api_port, WITH_IMAGES if images else Bounds())
    if actor.agent is not None:
        agent = load_agent(actor.agent, actor.agent_options)
        player = AgentPlayer(agent, *where, getattr(agent, "counters", dict))
    elif actor.agent_command:
        programs = AgentPrograms(actor.agent_command, environment, actor.agent_processes)
        stack.push_async_callback(programs.close)
        player = AgentPlayer(programs, *where, programs.counters)
    else:
        key = actor.session_key or secrets.token_urlsafe(24)
        sessions = Sessions(key, actor.session_timeout_s, actor.episode_timeout_s)
        player = AgentPlayer(sessions, *where, sessions.counters, sessions)
    await _start(player, f"actor.chat_api_port={actor.chat_api_port}")
    stack.push_async_callback(player.close)
    if actor.agent_sessions:
        _tell(folder / f"{process.worker_name('actor')}.json", player.url, key)
    return player


async def _start(player: AgentPlayer, setting: str) -> None:
    """Start the endpoints. If the port that `setting` gives is taken, try again for a while. Raises ConfigError: the
    port stays taken."""
    taken = TakenPort(setting)
    while True:
        try:
            return await player.start()
        except OSError as error:
            taken.failed(error)
        await asyncio.sleep(LOOK_S)


def _tell(path: Path, url: str, key: str) -> None:
    """Write a file with the address and the key that agents need to request episodes. Only the user of this process may
    read the file's folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    write_whole(path, json.dumps({"url": url, "key": key}) + "\n", private=True)
