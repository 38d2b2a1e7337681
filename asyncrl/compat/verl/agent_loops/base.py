"""verl's base class of agent loops, for classes that were written for verl, and the registry of their names.

A loop plays one episode in tokens: it renders messages as tokens, lets the policy continue them, and returns the whole
sequence. Messages are rendered by asyncrl's class Chat, so that new messages continue the sampled tokens exactly.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from asyncrl.chat.image_blocks import image_blocks
from asyncrl.chat.messages import read_messages, read_tools
from asyncrl.chat.prompt_lengths import cut_prompt
from asyncrl.compat.verl.agent_loops.outputs import AgentLoopOutput
from asyncrl.compat.verl.agent_loops.policy import EpisodePolicy
from asyncrl.errors import RefusedError

Messages = Sequence[dict[str, Any]]
Loop = TypeVar("Loop", bound=type)

REGISTRY: dict[str, dict[str, Any]] = {}
"""Maps the name of each loop to the arguments of its class, and the class's dotted path as `_target_`. verl's registry
has the same form."""


def register(agent_name: str) -> Callable[[Loop], Loop]:
    """Register a class of agent loops under the name by which a row of the data chooses it."""

    def add(cls: Loop) -> Loop:
        REGISTRY[agent_name] = {"_target_": f"{cls.__module__}.{cls.__qualname__}"}
        return cls

    return add


class DictConfigWrap:
    """Holds a configuration as `config`."""

    def __init__(self, config: Any) -> None:
        self.config = config


class ToolListWrap:
    """Holds the tools of a run as `tools`."""

    def __init__(self, tools: list[Any]) -> None:
        self.tools = tools


@dataclass(frozen=True)
class MergeResult:
    """The tokens of a conversation to which messages were added. The last `appended_token_count` tokens are new."""

    token_ids: list[int]
    appended_token_count: int
    kind: str = "context"
    inserted_token_ids: list[int] = field(default_factory=list)
    removed_prefix_token_count: int = 0


Merged = tuple[MergeResult, list[int], list[float] | None]
"""All tokens so far, then the mask of the response's tokens, and their log-probs."""


class AgentLoopBase(ABC):
    """Plays one episode. An object is made for each episode, with the arguments of verl's own class.

    `config` is a configuration with those of verl's keys for which asyncrl has values. `server_manager.generate`
    samples the policy's turns. `processor` is None, since the policy sees only text.
    """

    _class_initialized: bool = False
    """Classes of earlier releases of verl set this once they are prepared."""

    def __init__(
        self,
        trainer_config: DictConfigWrap,
        server_manager: EpisodePolicy,
        tokenizer: Any,
        processor: Any = None,
        dataset_cls: type | None = None,
        data_config: DictConfigWrap | None = None,
        **kwargs: Any,
    ) -> None:
        self.init_class(config=trainer_config.config, tokenizer=tokenizer, processor=processor, **kwargs)
        self.config = trainer_config.config
        self.rollout_config = self.config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.processor = processor
        self.dataset_cls = dataset_cls
        self.data_config = self.dataset_config = self.config.data if data_config is None else data_config.config
        self.apply_chat_template_kwargs = self.data_config.get("apply_chat_template_kwargs", {})
        self.mm_processor_kwargs = self.data_config.get("mm_processor_kwargs", {})
        self.loop = asyncio.get_running_loop()
        self._chat = server_manager.chat

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any = None, **kwargs: Any) -> None:
        """Prepare what the objects of a class share. Loops of earlier releases of verl define this method."""

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        """Play the episode. `kwargs` are the fields of the row, as verl's data set gives them."""

    async def apply_chat_template(
        self,
        messages: Messages,
        tools: Messages | None = None,
        images: Sequence[Any] | None = None,
        videos: Sequence[Any] | None = None,
        remove_system_prompt: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """The tokens of a conversation up to the policy's next turn.

        With `remove_system_prompt`, `messages` are the answer to a turn of the policy: results of its calls, or a
        user's message. Then the tokens are only those after the end token of that turn.
        """
        self._assert_mm_supported(bool(images or videos or kwargs.get("audios")))
        if remove_system_prompt:
            return self._suffix((), messages, tools, None)
        return self._prompt(messages, tools)

    async def process_vision_info(self, messages: Messages) -> dict[str, Any]:
        """The images of messages: none. A message that shows an image is refused when it is rendered."""
        return {}

    async def process_multi_modal_info(self, messages: Messages) -> dict[str, Any]:
        """The images, videos and audio of messages: none, as in `process_vision_info`."""
        return {}

    async def ct_build_initial_tokens(
        self, messages: Messages, tools: Messages | None = None, **media: Any
    ) -> list[int]:
        """The tokens of the first prompt. It is cut to `data.max_prompt_length` as `data.truncation` says.

        Raises RefusedError: the prompt is too long and `data.truncation` is `error`, or the prompt has images.
        """
        self._assert_mm_supported(any(media.get(name) for name in ("images", "videos", "audios")))
        return self._cap_text_prompt_length(self._prompt(messages, tools))

    async def ct_merge_context_msg(
        self,
        previous_messages: Messages,
        updated_messages: Messages,
        runtime_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        tools: Messages | None = None,
    ) -> Merged:
        """Add the messages that follow `previous_messages` in `updated_messages` to the tokens so far. The tokens so
        far end with a turn of the policy."""
        known = len(previous_messages)
        before, following = list(updated_messages[:known]), list(updated_messages[known:])
        added = self._suffix(before, following, tools, runtime_token_ids[-1]) if following else []
        result = MergeResult([*runtime_token_ids, *added], len(added))
        return _aligned(result, response_mask, 0, response_logprobs, [0.0] * len(added))

    async def ct_merge_assistant_token(
        self,
        runtime_token_ids: list[int],
        assistant_token_ids: list[int],
        response_mask: list[int],
        response_logprobs: list[float] | None = None,
        assistant_logprobs: list[float] | None = None,
    ) -> Merged:
        """Add a turn of the policy to the tokens so far."""
        count = len(assistant_token_ids)
        result = MergeResult([*runtime_token_ids, *assistant_token_ids], count, "assistant")
        return _aligned(result, response_mask, 1, response_logprobs, assistant_logprobs or [0.0] * count)

    @staticmethod
    def build_sglang_video_payload(videos: Any, mm_inputs: Mapping[str, Any]) -> None:
        """Return None, since no videos are shown."""

    def _assert_mm_supported(self, has_multi_modal: bool) -> None:
        if has_multi_modal:
            raise RefusedError("agent loops of verl show only text here: leave out images, videos and audio")

    def _get_mm_processor_kwargs(self, audio_data: Any = None) -> dict[str, Any]:
        return dict(self.mm_processor_kwargs or {})

    def _cap_text_prompt_length(self, prompt_ids: list[int]) -> list[int]:
        limit, truncation = int(self.rollout_config.prompt_length), str(self.data_config.get("truncation", "error"))
        if len(prompt_ids) > limit and truncation == "error":
            raise RefusedError(f"the prompt has {len(prompt_ids)} tokens; data.max_prompt_length is {limit}")
        cut: list[int] = cut_prompt(np.asarray(prompt_ids, np.int32), limit, truncation).tolist()
        return cut

    def _prompt(self, messages: Messages, tools: Messages | None) -> list[int]:
        read = read_messages(messages)
        self._assert_mm_supported(bool(image_blocks(read)))
        ids: list[int] = self._chat.prompt(read, _tools(tools)).tolist()
        return ids

    def _suffix(self, before: Messages, messages: Messages, tools: Messages | None, last: int | None) -> list[int]:
        following = read_messages([*before, *messages])[len(before) :]
        self._assert_mm_supported(bool(image_blocks(following)))
        ids: list[int] = self._chat.suffix(following, _tools(tools), last).tolist()
        return ids


def _tools(tools: Messages | None) -> tuple[Mapping[str, Any], ...]:
    return read_tools(list(tools)) if tools else ()


def _aligned(
    result: MergeResult, mask: list[int], value: int, logprobs: list[float] | None, added: list[float]
) -> Merged:
    following = None if logprobs is None else [*logprobs, *added]
    return result, [*mask, *[value] * result.appended_token_count], following
