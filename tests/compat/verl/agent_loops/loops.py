"""Agent loops as users of verl write them. The file is imported once verl's names are provided."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput

Message = dict[str, Any]


@register("twice")
class Twice(AgentLoopBase):
    """Asks the policy again, with its first answer in view."""

    def __init__(self, *args: Any, question: str = "sure?", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.question = question
        self.response_length = self.config.actor_rollout_ref.rollout.response_length
        self.metrics: dict[str, Any] = {}
        self.mask: list[int] = []
        self.logprobs: list[float] = []

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        messages: list[Message] = list(kwargs["raw_prompt"])
        prompt_ids = await self.ct_build_initial_tokens(messages)
        start, ids = len(prompt_ids), await self.answered(prompt_ids, sampling_params)
        answer = {"role": "assistant", "content": "seen"}
        before, after = [*messages, answer], [*messages, answer, {"role": "user", "content": self.question}]
        merged, self.mask, self.logprobs = await self.ct_merge_context_msg(before, after, ids, self.mask, self.logprobs)
        ids = await self.answered(merged.token_ids, sampling_params)
        length = self.response_length
        return AgentLoopOutput(
            prompt_ids=ids[:start],
            response_ids=ids[start:][:length],
            response_mask=self.mask[:length],
            response_logprobs=self.logprobs[:length],
            num_turns=4,
            metrics=self.metrics,
            reward_score=float(kwargs["reward_model"]["ground_truth"] == "15"),
            extra_fields={"turn_scores": [0.25, 1.0], "depth": 2, "note": kwargs["extra_info"]["hint"]},
        )

    async def answered(self, ids: list[int], sampling_params: dict[str, Any]) -> list[int]:
        """The tokens with the policy's next turn."""
        with simple_timer("generate_sequences", self.metrics):
            output: TokenOutput = await self.server_manager.generate(
                request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params
            )
        merged, self.mask, self.logprobs = await self.ct_merge_assistant_token(
            ids, output.token_ids, self.mask, self.logprobs, assistant_logprobs=output.log_probs
        )
        return list(merged.token_ids)


@register("renders")
class Renders(AgentLoopBase):
    """Renders its prompt by the tokenizer itself."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(kwargs["raw_prompt"], add_generation_prompt=True, tokenize=True),
        )
        start = len(prompt_ids)
        output = await self.server_manager.generate("1", prompt_ids=prompt_ids, sampling_params=sampling_params)
        prompt_ids += output.token_ids
        mask = [1] * len(output.token_ids)
        return AgentLoopOutput(
            prompt_ids=prompt_ids[:start], response_ids=prompt_ids[start:], response_mask=mask, metrics={}
        )


@register("older")
class Older(AgentLoopBase):
    """Asks twice in the way of releases 0.6 and 0.7."""

    ready = 0

    @classmethod
    def init_class(cls, config: Any, tokenizer: Any, processor: Any, **kwargs: Any) -> None:
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.ready += 1

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        images = (await self.process_vision_info(kwargs["raw_prompt"])).get("images")
        prompt_ids = await self.apply_chat_template(kwargs["raw_prompt"], images=images)
        first = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt_ids, sampling_params=sampling_params, image_data=images
        )
        added = await self.apply_chat_template([{"role": "user", "content": "sure?"}], remove_system_prompt=True)
        second = await self.server_manager.generate(
            request_id="1", prompt_ids=prompt_ids + first.token_ids + added, sampling_params=sampling_params
        )
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=first.token_ids + added + second.token_ids,
            response_mask=[1] * len(first.token_ids) + [0] * len(added) + [1] * len(second.token_ids),
            metrics={},
        )
