"""The workloads of benchmarks.gpu_loop: episodes with random lengths and waits, over a model with random weights.

An agent plays the heavy-tailed workload. Its model never ends a turn by itself, so the agent draws the length of each
turn and requests that many tokens.

The actor itself plays the workload of short turns, in which a simulated user answers. Its model ends its turns by
itself (`shapes.end_turns`).

The draws depend on the workload's seed, the group and the member only: every run gets the same episodes.
"""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import yaml

from asyncrl.tools.interactions.base import Interaction, Response
from asyncrl.tools.interactions.users import KWARGS
from asyncrl.types import Task, Trajectory

PARAMETERS = Path(__file__).with_suffix(".yaml")
AGENT = f"{__name__}.play"
USER, USER_NAME = f"{__name__}.DrawnUser", "drawn"
RULE = f"{__name__}.by_lot"
WORKLOAD = "workload"
"""The field of a task's `extra_info` that has the workload, and the key of the user's configuration that names it."""
TEMPLATE_TOKENS = 16
"""Tokens of a chat template around a message."""


class DrawnTurn(NamedTuple):
    """A turn that samples `tokens` tokens, or at most so many if the policy ends its turns. Before the next turn there
    is a wait of `wait_s` seconds, and a message of `message` tokens."""

    tokens: int
    wait_s: float
    message: int


@dataclass(frozen=True, slots=True)
class Workload:
    """The distributions of `loop_workload.yaml`. Lengths of prompts and messages are in letters, which are one token
    each."""

    seed: int
    prompt_tokens: int
    turns: Sequence[int]
    turn_tokens: Mapping[str, float]
    message_tokens: Sequence[int]
    wait_s: Mapping[str, float] | None

    @classmethod
    def named(cls, name: str) -> Workload:
        return cls(**yaml.safe_load(PARAMETERS.read_text())[name])

    @property
    def mean_turn(self) -> float | None:
        """The mean number of tokens of a turn that the policy ends; None: it ends no turn."""
        return self.turn_tokens.get("mean")

    @property
    def longest_turn(self) -> int:
        return int(self.turn_tokens["longest"])

    @property
    def longest_episode(self) -> int:
        """An upper bound on an episode's tokens."""
        turns, template = self.turns[1], 2 * TEMPLATE_TOKENS
        return self.prompt_tokens + turns * (self.longest_turn + self.message_tokens[1] + template)

    def episode(self, name: str) -> list[DrawnTurn]:
        """The turns of the episode `name`, the same at each call."""
        drawn, messages = random.Random(f"{self.seed} {name}"), random.Random(f"{self.seed} {name} messages")
        return [
            DrawnTurn(self._tokens(drawn), self._wait(drawn), messages.randint(*self.message_tokens))
            for _ in range(drawn.randint(*self.turns))
        ]

    def tasks(self, count: int) -> list[Task]:
        """Tasks with distinct prompts. Each task carries the workload to the agent, and names the simulated user."""
        drawn, extra = random.Random(self.seed), {WORKLOAD: json.dumps(asdict(self)), KWARGS: {"name": USER_NAME}}
        return [
            Task(
                f"loop/train/{index}",
                [{"role": "user", "content": letters(drawn, self.prompt_tokens)}],
                "",
                "loop",
                extra_info=extra,
            )
            for index in range(count)
        ]

    def _tokens(self, drawn: random.Random) -> int:
        tokens = self.turn_tokens
        if self.mean_turn is not None:
            return self.longest_turn
        length = round(tokens["median"] * drawn.lognormvariate(0.0, tokens["sigma"]))
        return min(self.longest_turn, max(int(tokens["shortest"]), length))

    def _wait(self, drawn: random.Random) -> float:
        wait = self.wait_s
        return min(wait["longest"], wait["scale"] * drawn.paretovariate(wait["alpha"])) if wait else 0.0


def letters(drawn: random.Random, count: int) -> str:
    return "".join(drawn.choices(string.ascii_lowercase, k=count))


def _without_attempt(ticket: str) -> str:
    """The id of a ticket without the number of the attempt: a repeated episode must have the same draws."""
    return ticket.rpartition(".")[0]


async def play(task: Task, base_url: str, api_key: str) -> Any:
    """The agent of the heavy-tailed workload."""
    import aiohttp

    from asyncrl.agents import AgentResult

    workload = Workload(**json.loads(task.extra_info[WORKLOAD]))
    name = _without_attempt(unquote(urlsplit(base_url).path.split("/")[1]))
    drawn, messages = random.Random(f"{workload.seed} {name} texts"), [dict(message) for message in task.messages]
    turns, missing = workload.episode(name), 0
    headers = {"Authorization": f"Bearer {api_key}"}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=None)) as session:
        for number, turn in enumerate(turns):
            if number:
                await asyncio.sleep(turns[number - 1].wait_s)
                messages.append({"role": "user", "content": letters(drawn, turns[number - 1].message)})
            body = {"messages": messages, "max_tokens": turn.tokens}
            async with session.post(f"{base_url}/chat/completions", json=body) as response:
                response.raise_for_status()
                answer = await response.json()
            messages.append(answer["choices"][0]["message"])
            missing += turn.tokens - answer["usage"]["completion_tokens"]
    return AgentResult({}, {"missing_tokens": missing, "turns": len(turns)})


class DrawnUser(Interaction):
    """The simulated user of the workload `config["workload"]`. It answers until the episode has its drawn number of
    turns."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._workload = Workload.named(config[WORKLOAD])

    async def generate_response(self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any) -> Response:
        name = _without_attempt(instance_id)
        turns = self._workload.episode(name)
        played = sum(message["role"] == "assistant" for message in messages)
        if played >= len(turns):
            return True, "", None, {}
        drawn = random.Random(f"{self._workload.seed} {name} text {played}")
        return False, letters(drawn, turns[played - 1].message), None, {}


def by_lot(task: Task, answer: str, trajectory: Trajectory) -> float:
    """The rule. Rewards are random, because the learner has nothing to train on if the rewards of a group are equal."""
    return random.Random(trajectory.id).random()
