"""`python -m tests.security.endpoint_process`: the endpoint of agents with two episodes, over an engine that says yes.

It prints one line of JSON: the address and the key of each episode, the attacked one first. A line on its standard
input ends the episodes. Then it prints what each came to, and the counts of the endpoint.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from numpy.typing import NDArray

from asyncrl.agents.chat_api.agent import AgentPlayer
from asyncrl.chat.chat import Chat
from asyncrl.engine.base import Generation
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.types import Sampling, Task
from tests.episode.fakes import CHATML, END, ScriptedEngine, ids, make_ticket, make_tokenizer

LIMITS = EpisodeLimits(max_turns=300, max_turn_tokens=20, max_tokens=2000, max_total_tokens=10**6)


class YesEngine(ScriptedEngine):
    """Says yes, and keeps nothing."""

    async def generate(
        self, tokens: NDArray[np.int32], sampling: Sampling, stop: Sequence[int], session: str
    ) -> Generation:
        await asyncio.sleep(0)
        return self._sample("yes", sampling.max_new_tokens)

    def release(self, session: str) -> None:
        pass


async def main() -> None:
    tokenizer = make_tokenizer(CHATML)
    over, addresses = asyncio.Event(), {}
    both = asyncio.Barrier(3)

    async def agent(task: Task, base_url: str, api_key: str) -> None:
        addresses[base_url] = api_key
        await both.wait()
        await over.wait()

    player = AgentPlayer(agent)
    await player.start()
    runner = EpisodeRunner(YesEngine(tokenizer, [], end=END), Chat(tokenizer), player, LIMITS)
    assert len(ids(tokenizer, "yes" + END)) <= LIMITS.max_turn_tokens
    episodes = [asyncio.create_task(runner.run(make_ticket(name), lambda: None)) for name in ("attacked", "honest")]
    await both.wait()
    sys.stdout.write(json.dumps(sorted(addresses.items())) + "\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.readline)
    over.set()
    came = await asyncio.gather(*episodes, return_exceptions=True)
    outcomes = [repr(each) if isinstance(each, BaseException) else len(each.branches) for each in came]
    sys.stdout.write(json.dumps({"outcomes": outcomes, "counts": asdict(player.counts)}) + "\n")
    await player.close()


if __name__ == "__main__":
    asyncio.run(main())
