"""Agent loops that err, rewrite their history, or return another sequence than they played."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register

from asyncrl.errors import EngineError, RefusedError
from tests.vision import vision_tokenizer

Ids = list[int]


@register("once")
class Once(AgentLoopBase):
    """Asks the policy once. A subclass may change the output."""

    params: ClassVar[dict[str, Any]] = {}

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        self.ids = await self.ct_build_initial_tokens(kwargs["raw_prompt"])
        self.sampled = await self.ask(self.ids, sampling_params)
        output = AgentLoopOutput(
            prompt_ids=self.ids, response_ids=self.sampled, response_mask=[1] * len(self.sampled), metrics={}
        )
        return await self.changed(output, sampling_params)

    async def ask(self, ids: Ids, sampling_params: dict[str, Any]) -> Ids:
        output = await self.server_manager.generate(
            request_id="r", prompt_ids=ids, sampling_params={**sampling_params, **self.params}
        )
        return output.token_ids

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return output


class Edits(Once):
    """Replaces the third token of the policy's turn."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_ids=[*self.sampled[:2], 42, *self.sampled[3:]])


class ClaimsMore(Once):
    """Says that the policy sampled a token which the loop added."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_ids=[*self.sampled, 42], response_mask=[1] * (len(self.sampled) + 1))


class ClaimsPrompt(Once):
    """Says that the policy sampled the last two tokens of its prompt."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        ids = [*self.ids[-2:], *self.sampled]
        return replace(output, prompt_ids=self.ids[:-2], response_ids=ids, response_mask=[1] * len(ids))


class CutsPrompt(Once):
    """Leaves out the beginning of the prompt that the policy saw."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, prompt_ids=self.ids[4:])


class OtherLogprobs(Once):
    """Returns log-probs of its own."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_logprobs=[-0.25] * len(self.sampled))


class ShortMask(Once):
    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_mask=[1])


class MasksAll(Once):
    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_mask=[0] * len(self.sampled))


class Nothing(Once):
    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> Any:
        return None


class MasksFirst(Once):
    """Masks the first four tokens of the policy's turn."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_mask=[0] * 4 + [1] * (len(self.sampled) - 4))


class CutsResponse(Once):
    """Cuts the response after five tokens."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        return replace(output, response_ids=self.sampled[:5], response_mask=[1] * 5)


class Summarises(Once):
    """Begins a new conversation from a summary of the first, and returns only the second."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        self.ids = await self.ct_build_initial_tokens([{"role": "user", "content": "so far: 15. go on"}])
        self.sampled = await self.ask(self.ids, sampling_params)
        return replace(output, prompt_ids=self.ids, response_ids=self.sampled, response_mask=[1] * len(self.sampled))


class BestOf(Once):
    """Samples two further candidates for the same prompt, and returns the longest."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        others = [await self.ask(self.ids, sampling_params) for _ in range(2)]
        best = max([self.sampled, *others], key=len)
        return replace(output, response_ids=best, response_mask=[1] * len(best), reward_score=1.0)


class ManyNumbers(Once):
    """Returns more numbers than can be metrics, and one that is none."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        numbers = {f"n{number}": number for number in range(40)}
        return replace(output, reward_score=1.0, num_turns=2, extra_fields={"entropy": float("nan"), **numbers})


@register("shows_row")
class ShowsRow(Once):
    """Keeps the fields of its row in the class."""

    row: ClassVar[dict[str, Any]] = {}

    async def run(self, params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        type(self).row = kwargs
        return await super().run(params, **kwargs)


class Nested(Once):
    """Has arguments of a YAML file."""

    made: ClassVar[list[Any]] = []

    def __init__(self, *args: Any, cfg: Any, home: str, inner: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        type(self).made = [home, inner, cfg.depth]


class PlainRun(AgentLoopBase):
    def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> Any:
        return None


class AsksOn(Once):
    """Lets the policy go on where its turn was cut, as long as the episode has room."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        while True:
            self.sampled = [*self.sampled, *await self.ask([*self.ids, *self.sampled], sampling_params)]


class StopsWhenFull(Once):
    """Lets the policy go on like AsksOn, but returns what it has once the episode is full."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        try:
            while True:
                self.sampled = [*self.sampled, *await self.ask([*self.ids, *self.sampled], sampling_params)]
        except RefusedError:
            return replace(output, response_ids=self.sampled, response_mask=[1] * len(self.sampled))


class IgnoresFault(Once):
    """Returns its first turn although the engine failed on the second."""

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        with suppress(EngineError):
            await self.ask([*self.ids, *self.sampled], sampling_params)
        return output


class Waits(Once):
    """Waits for ever after its turn. `ended` is set when it is cancelled."""

    began = asyncio.Event()
    ended = asyncio.Event()

    async def changed(self, output: AgentLoopOutput, sampling_params: dict[str, Any]) -> AgentLoopOutput:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()
        return output


class Hotter(Once):
    params: ClassVar = {"temperature": 1.3}


class Narrow(Once):
    params: ClassVar = {"top_p": 0.9}


class Stops(Once):
    params: ClassVar = {"stop": ["\n"]}


class StopsAtTokens(Once):
    params: ClassVar = {"stop_token_ids": [30]}


class Short(Once):
    params: ClassVar = {"max_tokens": 3}


class Breaks(Once):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise KeyError("board")


class Exits(Once):
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        raise SystemExit(3)


class ShowsImages(Once):
    async def ask(self, ids: Ids, sampling_params: dict[str, Any]) -> Ids:
        output = await self.server_manager.generate(
            request_id="r", prompt_ids=ids, sampling_params=sampling_params, image_data=[b"png"]
        )
        return output.token_ids


class Forges(Once):
    """Puts the placeholder of an image among the tokens of its prompt."""

    async def ask(self, ids: Ids, sampling_params: dict[str, Any]) -> Ids:
        [image] = vision_tokenizer().convert_tokens_to_ids(["<|image_pad|>"])
        return await super().ask([*ids, image], sampling_params)
