"""The workload of benchmarks.gpu_loop: episodes with random lengths and waits, over a model with random weights.

Such a model never ends a turn by itself, so the agent draws the length of each turn and requests that many tokens. The
draws depend on the workload's seed, the group and the member only: every age bound gets the same episodes.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from asyncrl.types import Task, Trajectory

PARAMETERS = Path(__file__).with_suffix(".yaml")
AGENT = f"{__name__}.play"
RULE = f"{__name__}.unjudged"


class DrawnTurn(NamedTuple):
    """A turn that samples `tokens` tokens. Before the next turn the agent waits for `wait_s` seconds."""

    tokens: int
    wait_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """The distributions of `loop_workload.yaml`. Lengths of prompts and observations are in letters, which are one
    token each."""

    seed: int
    prompt_tokens: int
    turns: Sequence[int]
    turn_tokens: dict[str, float]
    observation_tokens: int
    wait_s: dict[str, float]

    @classmethod
    def named(cls, name: str) -> Workload:
        return cls(**yaml.safe_load(PARAMETERS.read_text())[name])

    def episode(self, name: str) -> list[DrawnTurn]:
        """The turns of the episode `name`, the same at each call."""
        drawn = random.Random(f"{self.seed} {name}")
        tokens, wait = self.turn_tokens, self.wait_s

        def turn() -> DrawnTurn:
            length = round(tokens["median"] * drawn.lognormvariate(0.0, tokens["sigma"]))
            seconds = wait["scale"] * drawn.paretovariate(wait["alpha"])
            return DrawnTurn(
                int(min(tokens["longest"], max(tokens["shortest"], length))), min(wait["longest"], seconds)
            )

        return [turn() for _ in range(drawn.randint(*self.turns))]

    @property
    def longest_episode(self) -> int:
        """An upper bound on an episode's tokens, with 16 tokens of the chat template for each message."""
        turns = self.turns[1]
        sampled = turns * int(self.turn_tokens["longest"])
        return self.prompt_tokens + sampled + turns * (self.observation_tokens + 32)

    def tasks(self, count: int) -> list[Task]:
        """Tasks with distinct prompts. Each task carries the workload to the agent."""
        drawn, carried = random.Random(self.seed), json.dumps(asdict(self))
        return [
            Task(
                f"loop/train/{index}",
                [{"role": "user", "content": letters(drawn, self.prompt_tokens)}],
                "",
                "loop",
                extra_info={"workload": carried},
            )
            for index in range(count)
        ]


def letters(drawn: random.Random, count: int) -> str:
    return "".join(drawn.choices(string.ascii_lowercase, k=count))


async def play(task: Task, base_url: str, api_key: str) -> Any:
    """The agent. Its reward is random, because the learner has nothing to train on if the rewards of a group are
    equal."""
    import aiohttp

    from asyncrl.agents import AgentResult

    workload = Workload(**json.loads(task.extra_info["workload"]))
    # The ticket's id without the number of the attempt: a repeated episode must have the same draws.
    name = unquote(urlsplit(base_url).path.split("/")[1]).rpartition(".")[0]
    drawn, messages = random.Random(f"{workload.seed} {name} texts"), [dict(message) for message in task.messages]
    turns, missing = workload.episode(name), 0
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number, turn in enumerate(turns):
            if number:
                await asyncio.sleep(turns[number - 1].wait_s)
                messages.append({"role": "user", "content": letters(drawn, workload.observation_tokens)})
            body = {"messages": messages, "max_tokens": turn.tokens}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            messages.append(answer["choices"][0]["message"])
            missing += turn.tokens - answer["usage"]["completion_tokens"]
    return AgentResult({"drawn": drawn.random()}, {"missing_tokens": missing, "turns": len(turns)})


def unjudged(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The rule, which cannot judge random text."""
    return 0.0
