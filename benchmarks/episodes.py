"""Whole episodes as the actor runs them, over a server that answers every turn immediately with the same tool call."""

from __future__ import annotations

import itertools
import string
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.engine.base import Engine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.tools.calculator import Calculator
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Purpose, Task, Ticket
from benchmarks.clients import Client

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "5*3"}}\n</tool_call><|im_end|>'
LETTERS = np.array(list(string.ascii_lowercase))


def turn_of(tokens: int) -> list[int]:
    """A turn of that many tokens: some words, and a call of the calculator."""
    tokenizer = build_tokenizer()
    call = tokenizer.encode(CALL, add_special_tokens=False)
    words = tokenizer.encode("some words " * tokens, add_special_tokens=False)
    return [*words[: tokens - len(call)], *call]


@dataclass(frozen=True, slots=True)
class Shape:
    """Episodes of `turns` assistant turns with `turn_tokens` each."""

    turns: int
    turn_tokens: int


def episode_client(engine: Engine, shape: Shape) -> Client:
    """Return a client that plays one episode a call. Its task is one random letter for each token of the prompt. Even
    its last turn calls a tool."""
    chat = Chat(build_tokenizer())
    tools = Toolbox({"calculator": Calculator}, ToolLimits())
    limits = EpisodeLimits(shape.turns, shape.turn_tokens, 1 << 14, 1 << 14)
    runner = EpisodeRunner(engine, chat, ToolPlayer(tools), limits)
    numbers = itertools.count()

    async def play(prompt: NDArray[np.int32], count: int) -> None:
        name = f"episode-{next(numbers)}"
        question = {"role": "user", "content": "".join(LETTERS[prompt % len(LETTERS)])}
        ticket = Ticket(name, Task(name, [question], "15", "benchmark"), name, 0, Purpose.TRAIN, 1.0, 0)
        trajectory = await runner.run(ticket, lambda: None)
        if int(trajectory.loss_mask.sum()) != count:
            raise ValueError(f"asked for {count} tokens in {shape.turns} turns, got {int(trajectory.loss_mask.sum())}")

    return play
