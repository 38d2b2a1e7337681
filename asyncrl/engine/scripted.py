"""An engine that returns the turns of a script, for episodes without a model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.template import QUESTION, TOOL, calling
from asyncrl.engine.base import EngineStats, Generation, IdleClock, PlacedImage
from asyncrl.errors import EngineError, RefusedError
from asyncrl.types import Sampling

if TYPE_CHECKING:
    from asyncrl.weights.canary import CanaryCheck
    from asyncrl.weights.folders import Weights

VERSION = 0
"""The version of all tokens of an engine that never gets new weights."""

Answer = str | Mapping[str, Any]
"""One turn of a script: text that the policy would write, or {content, tool_calls: [{name, arguments}]}, which the chat
template turns into text."""


class EngineWithoutUpdates:
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


class ScriptedEngine(EngineWithoutUpdates):
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
            return self._chat.written([QUESTION, turn], [TOOL])
        except RefusedError as error:
            raise EngineError(f"the model's chat template refuses the answer {answer!r:.200}: {error}") from error
