"""A small tokenizer with real chat templates, a scripted engine, and tools whose every step is recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from asyncrl.chat.chat import Chat
from asyncrl.engine.base import EngineStats, Generation, PlacedImage
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.episode.limits import EpisodeLimits
from asyncrl.episode.tool_player import ToolPlayer
from asyncrl.tools import Tool
from asyncrl.tools.interactions.users import InteractionLimits, Interactions
from asyncrl.tools.toolbox import Toolbox, ToolLimits
from asyncrl.types import Purpose, Role, Sampling, Ticket, Trajectory
from tests.helpers import GENEROUS_S, make_task

END = "<|im_end|>"
LIMITS = EpisodeLimits(max_turns=8, max_turn_tokens=4000, max_tokens=30_000, max_total_tokens=60_000)

_TEMPLATES = Path(__file__).parents[1] / "templates" / "jinja"
CHATML = (_TEMPLATES / "chatml.jinja").read_text()
QWEN3 = (_TEMPLATES / "qwen3.jinja").read_text()

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = ["system user assistant tool calculator 5*3 = 15\n\n", '{"name": "echo", "arguments": {"text": "hello"}}'] * 9


@cache
def _trained() -> str:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    backend.train_from_iterator(_CORPUS, trainer)
    return str(backend.to_str())


def byte_level() -> Tokenizer:
    """Byte-level BPE with Qwen's splitting and few merges, without special tokens."""
    return Tokenizer.from_str(_trained())


@cache
def _backend() -> Tokenizer:
    backend = byte_level()
    specials = ("<|endoftext|>", "<|im_start|>", END)
    backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in specials])
    marks = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
    backend.add_tokens([AddedToken(text, normalized=False) for text in marks])
    return backend


def make_tokenizer(template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level BPE with Qwen's splitting and marks; few merges, so that many tokens hold a part of a character."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_backend(), eos_token=END, pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    return tokenizer


def ids(tokenizer: PreTrainedTokenizerFast, text: str) -> NDArray[np.int32]:
    return np.asarray(tokenizer.encode(text, add_special_tokens=False), np.int32)


class Cut(str):
    """A turn that the engine ends for want of tokens."""


Said = str | Generation
Script = Sequence[Said | Callable[[str], Awaitable[Said]]]


class ScriptedEngine:
    """Says the script's turns in order, or what its functions return for the name of the session. Every token has a
    log-prob and version of its own. `requests` are all requests, `answered` the prompts of those that were answered
    before their session was released, with what was sampled."""

    takes_grammars = True

    def __init__(self, tokenizer: PreTrainedTokenizerFast, script: Script, version: int = 3, end: str = END) -> None:
        self.version = version
        self.released: list[str] = []
        self.requests: list[tuple[NDArray[np.int32], Sampling, Sequence[int], str]] = []
        self.answered: list[tuple[NDArray[np.int32], Generation]] = []
        self.images: list[list[PlacedImage]] = []
        self._tokenizer = tokenizer
        self._script = script
        self._end = end
        self._newer = asyncio.Condition()

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        self.images.append(list(images))
        turn, prompt = self._script[len(self.requests)], tokens.copy()
        self.requests.append((prompt, sampling, stop, session))
        await asyncio.sleep(0)
        said = await turn(session) if callable(turn) else turn
        generation = said if isinstance(said, Generation) else self._sample(said, sampling.max_new_tokens)
        if session not in self.released:
            self.answered.append((prompt, generation))
        return generation

    def _sample(self, text: str, room: int) -> Generation:
        tokens = ids(self._tokenizer, text if isinstance(text, Cut) else text + self._end)
        finish = "length" if isinstance(text, Cut) or len(tokens) > room else "stop"
        count = np.arange(min(len(tokens), room), dtype=np.int32)
        logprobs = -0.5 - count.astype(np.float32) / 100
        return Generation(tokens[:room], logprobs, self.version + count // 2, finish)

    def release(self, session: str) -> None:
        self.released.append(session)

    async def serve(self, version: int) -> None:
        async with self._newer:
            self.version = version
            self._newer.notify_all()

    async def wait_for_version(self, version: int, pin: str | None = None) -> None:
        async with self._newer:
            await self._newer.wait_for(lambda: self.version >= version)

    def stats(self) -> EngineStats:
        return EngineStats(tokens=7, seconds=2.0, idle_seconds=0.5, running=0)


@dataclass
class Log:
    """A record of the calls of one class of tools."""

    created: list[dict[str, Any]] = field(default_factory=list)
    executed: list[str] = field(default_factory=list)
    released: int = 0


def make_tool(
    answer: Callable[[str], Awaitable[str]] | None = None,
    name: str = "echo",
    reward: float = 0.0,
    fail_create: bool = False,
    fail_release: bool = False,
) -> tuple[type[Tool], Log]:
    """A tool class with one argument `text`, which `answer` answers, and the log of its instances."""
    log = Log()

    class Echo(Tool):
        schema = {  # noqa: RUF012
            "name": name,
            "description": "Says it again.",
            "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        }

        async def create(self, **kwargs: Any) -> None:
            log.created.append(kwargs)
            if fail_create:
                raise OSError("no room")

        async def execute(self, arguments: Mapping[str, Any]) -> str:
            log.executed.append(arguments["text"])
            return await answer(arguments["text"]) if answer else arguments["text"]

        async def reward(self) -> float:
            return reward

        async def release(self) -> None:
            log.released += 1
            if fail_release:
                raise OSError("stuck")

    return Echo, log


async def play_with_tools(
    engine: ScriptedEngine,
    chat: Chat,
    tools: Mapping[str, type[Tool]] | Toolbox,
    ticket: Ticket | None = None,
    limits: EpisodeLimits = LIMITS,
    interactions: Interactions | None = None,
    **options: Any,
) -> Trajectory:
    """The trajectory of an episode with our own tools; `options` as for EpisodeRunner."""
    toolbox = (
        tools
        if isinstance(tools, Toolbox)
        else Toolbox(tools, ToolLimits(timeout_s=GENEROUS_S, retries=1, max_chars=100_000))
    )
    player = ToolPlayer(toolbox, interactions=interactions or Interactions({}, InteractionLimits()))
    runner = EpisodeRunner(engine, chat, player, limits, **options)
    return await runner.run(ticket or make_ticket(), lambda: None)


def make_ticket(name: str = "t1", purpose: Purpose = Purpose.TRAIN, min_version: int = 0, **task: Any) -> Ticket:
    return Ticket(name, make_task(**task), "g1", 0, purpose, 1.0, min_version)


def call(text: str, name: str = "echo") -> str:
    """A canonical tool call; `text` must need no JSON escapes."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "{text}"}}}}\n</tool_call>'


def assert_trains_what_was_sampled(trajectory: Trajectory, engine: ScriptedEngine) -> None:
    """Check that each answer of the engine is trained once, after its own prompt, with its own log-probs and versions.

    Nothing else is trained, and every session was released.
    """
    trained = np.zeros(len(trajectory), bool)
    found = []
    for turn in trajectory.turns:
        if turn.role is Role.ASSISTANT:
            [begin] = [start for start, end in trajectory.branches if start <= turn.start < end]
            span = slice(turn.start, turn.end)
            columns = (trajectory.tokens, trajectory.logprobs, trajectory.versions)
            found.append([trajectory.tokens[begin : turn.start].tolist(), *(each[span].tolist() for each in columns)])
            trained[span] = True
    assert sorted(found) == sorted(
        [prompt.tolist(), sampled.tokens.tolist(), sampled.logprobs.tolist(), sampled.versions.tolist()]
        for prompt, sampled in engine.answered
    )
    np.testing.assert_array_equal(trajectory.loss_mask, trained)
    assert (trajectory.versions[~trained] == -1).all()
    assert not trajectory.logprobs[~trained].any()
    assert {request[3] for request in engine.requests} <= set(engine.released)
