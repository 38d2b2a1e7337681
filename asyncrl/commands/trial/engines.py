"""Two engines for `asyncrl try`: a script, and a running server. The command can also use the embedded engine.

No engine of the command gets new weights, so all tokens have version 0.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.template import QUESTION, calling
from asyncrl.engine.base import EngineStats, Generation, IdleClock, PlacedImage
from asyncrl.engine.fleet.server import InferenceServer, Segment
from asyncrl.errors import DataError, EngineError, RefusedError
from asyncrl.types import Sampling
from asyncrl.weights.canary import CanaryCheck
from asyncrl.weights.folders import Weights

VERSION = 0

Answer = str | Mapping[str, Any]
"""One turn of a script: text that the policy would write, or {content, tool_calls: [{name, arguments}]}, which the chat
template turns into text."""

FORM = '"TEXT" or {"content": "TEXT", "tool_calls": [{"name": "NAME", "arguments": {...}}]}'


class _WithoutUpdates:
    """The methods of an engine that never gets new weights."""

    version = VERSION
    takes_grammars = True

    def __init__(self) -> None:
        self._idle = IdleClock(time.monotonic)

    def release(self, session: str) -> None: ...

    async def update_weights(self, version: int, weights: Weights, check: CanaryCheck | None = None) -> None:
        raise EngineError("this engine does not take weights")

    async def wait_for_version(self, version: int, pin: str | None = None) -> None: ...

    def stats(self) -> EngineStats:
        return EngineStats(0, *self._idle.read(), running=0)

    async def close(self) -> None: ...


class ScriptedEngine(_WithoutUpdates):
    """Returns the answers of a script in order, with log-prob 0. Raises EngineError: there are no answers left."""

    def __init__(self, chat: Chat, tokenizer: Any, answers: Sequence[Answer]) -> None:
        super().__init__()
        self._answers = list(answers)
        self._chat = chat
        self._tokenizer = tokenizer
        self._given = 0

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        if self._given == len(self._answers):
            raise EngineError(f"the script has {self._given} answers, but the episode needs another turn")
        ids = self._written(self._answers[self._given], stop[0])
        self._given += 1
        room = sampling.max_new_tokens
        finish = "stop" if len(ids) <= room else "length"
        ids = ids[:room]
        return Generation(ids, np.zeros(len(ids), np.float32), np.full(len(ids), VERSION, np.int32), finish)

    def _written(self, answer: Answer, end: int) -> NDArray[np.int32]:
        if isinstance(answer, str):
            return np.array([*self._tokenizer.encode(answer, add_special_tokens=False), end], np.int32)
        calls = answer["tool_calls"]
        turn = calling([each["arguments"] for each in calls], [each["name"] for each in calls], answer["content"])
        try:
            return self._chat.written([QUESTION, turn], [])
        except RefusedError as error:
            raise EngineError(f"the model's chat template refuses the answer {answer!r:.200}: {error}") from error


class ServerEngine(_WithoutUpdates):
    """Samples from one running server, without changing the server."""

    def __init__(self, server: InferenceServer) -> None:
        super().__init__()
        self._server = server

    async def generate(
        self,
        tokens: NDArray[np.int32],
        sampling: Sampling,
        stop: Sequence[int],
        session: str,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        parts: list[Segment] = []
        sampled = np.zeros(0, np.int32)
        while True:
            left = Sampling(sampling.temperature, sampling.max_new_tokens - len(sampled), sampling.grammar)
            so_far = np.concatenate([tokens, sampled])
            parts.append(await self._server.generate(uuid.uuid4().hex, so_far, left, stop, None, images=images))
            sampled = np.concatenate([part.tokens for part in parts])
            if parts[-1].finish != "cut" or not len(parts[-1].tokens):
                break
        logprobs = np.concatenate([part.logprobs for part in parts])
        finish = "stop" if parts[-1].finish == "stop" else "length"
        return Generation(sampled, logprobs, np.full(len(sampled), VERSION, np.int32), finish)

    async def close(self) -> None:
        await self._server.close()


def read_answers(path: Path) -> list[Answer]:
    """The answers of a script, one per line. Raises DataError, which names the line."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--answers={path} cannot be read: {error}") from error
    return [_answer(f"{path}: line {number}", line) for number, line in enumerate(lines, 1) if line.strip()]


def _answer(place: str, line: str) -> Answer:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{place} is not JSON: {error}; write {FORM}") from error
    match found:
        case str():
            return found
        case {"tool_calls": [*calls], **rest} if rest.keys() <= {"content"} and all(map(_is_call, calls)):
            return {"content": str(rest.get("content") or ""), "tool_calls": calls}
        case {"content": str(content), **rest} if not rest:
            return content
    raise DataError(f"{place} is not an answer; write {FORM}")


def _is_call(call: Any) -> bool:
    match call:
        case {"name": str(), "arguments": dict(), **rest}:
            return not rest
    return False
