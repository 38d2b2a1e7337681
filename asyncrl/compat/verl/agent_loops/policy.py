"""The policy of one episode, as verl's agent loops call it: token ids in; token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.chat.chat import Chat
from asyncrl.chat.parsing import ParsedTurn
from asyncrl.compat.verl.agent_loops.outputs import TokenOutput
from asyncrl.episode.episode import Episode
from asyncrl.episode.limits import LimitError
from asyncrl.episode.recorder import CompletionRequest
from asyncrl.errors import EngineError, RefusedError

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "n": (1,),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "stop": ([], ""),
}
"""Sampling parameters that a loop may set, each with its allowed values. These values change neither the policy's
distribution nor the end of its turns."""
_WITHOUT_EFFECT = ("logprobs", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output")
_LIMITS = ("max_tokens", "max_new_tokens")
_MEDIA = ("image_data", "video_data", "audio_data", "mm_processor_output")


class EpisodePolicy:
    """Samples and records the policy's turns in `episode`. verl calls such an object `server_manager`.

    `fault` is the first error of the engine, which a loop may have ignored. `full` is true if the last request found no
    room in the episode.
    """

    def __init__(self, episode: Episode) -> None:
        self.fault: EngineError | None = None
        self.full = False
        self._episode = episode

    @property
    def chat(self) -> Chat:
        """The chat template of the policy."""
        return self._episode.chat

    async def generate(
        self, request_id: str, *, prompt_ids: Any, sampling_params: Mapping[str, Any], **kwargs: Any
    ) -> TokenOutput:
        """Sample the turn that continues `prompt_ids`. The episode is one session, so `request_id` has no effect.

        Raises RefusedError: the parameters would change the policy's distribution, there are no token ids, or images
        are shown. Raises LimitError: the episode has no room for a turn. Raises EngineError: the engine failed.
        """
        shown = [name for name in _MEDIA if kwargs.get(name)]
        if shown:
            raise RefusedError(f"{', '.join(shown)}: agent loops of verl show only text here")
        tokens, limit = read_ids(prompt_ids, "prompt_ids"), self._limit(sampling_params)
        request = CompletionRequest((), (), max_tokens=limit, tokens=tokens)
        try:
            completion = await self._episode.complete(request, lambda text, ended: ParsedTurn(text))
        except LimitError:
            self.full = True
            raise
        except EngineError as error:
            self.fault = self.fault or error
            raise
        self.full = False
        sampled = completion.sampled
        first, last = int(sampled.versions[0]), int(sampled.versions[-1])
        return TokenOutput(
            token_ids=sampled.tokens.tolist(),
            log_probs=sampled.logprobs.tolist(),
            stop_reason="completed",
            extra_fields={"global_steps": last, "min_global_steps": first, "max_global_steps": last},
        )

    def _limit(self, params: Mapping[str, Any]) -> int | None:
        """The most tokens that the caller wants, or None. Raises RefusedError: other parameters ask for another way of
        sampling than that of the episode."""
        for name, value in params.items():
            if value is None or name in _WITHOUT_EFFECT or name in _LIMITS:
                continue
            if name == "temperature":
                if value != self._episode.ticket.temperature:
                    raise RefusedError(
                        f"temperature={value!r:.50}: this episode is sampled at {self._episode.ticket.temperature:g}; "
                        "set actor.temperature"
                    )
            elif name == "stop_token_ids":
                if further := sorted({*value} - {*self.chat.stop_ids}):
                    names = [self.chat.piece(token) for token in further]
                    raise RefusedError(f"stop_token_ids: these tokens end no turn; set actor.end_tokens={names}")
            elif value not in _NEUTRAL.get(name, ()):
                raise RefusedError(f"{name}={value!r:.50}: turns are sampled without this setting; leave it out")
        limit = next((params[name] for name in _LIMITS if params.get(name) is not None), None)
        if limit is not None and (not isinstance(limit, (int, np.integer)) or limit < 1):
            raise RefusedError(f"max_tokens is {limit!r:.50}; it must be a positive integer")
        return None if limit is None else int(limit)


def read_ids(ids: Any, name: str) -> NDArray[np.int32]:
    """Token ids as int32[T], from a list, an array, a tensor, or what a tokenizer returns.

    Raises RefusedError: they are not a flat list with at least one id.
    """
    given = ids["input_ids"] if isinstance(ids, Mapping) else ids
    try:
        array = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise RefusedError(f"{name} must be a list of token ids, not {ids!r:.100}") from error
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise RefusedError(f"{name} must be a list of token ids, not {ids!r:.100}")
    if array.min() < 0 or array.max() > np.iinfo(np.int32).max:
        raise RefusedError(f"{name} must be token ids; they range from {array.min()} to {array.max()}")
    return array.astype(np.int32)
