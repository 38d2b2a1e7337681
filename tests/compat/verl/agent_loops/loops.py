"""Agent loops as users of verl write them. The file is imported once verl's names are provided."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer
from verl.workers.rollout.replica import TokenOutput


@register("twice")
class Twice(AgentLoopBase):
    """Asks the policy again, with its first answer in view."""

    def __init__(self, *args: Any, question: str = "sure?", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.question = question
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        request_id = uuid4().hex
        prompt_ids = await self.apply_chat_template(list(kwargs["raw_prompt"]))
        start, mask, logprobs = len(prompt_ids), [], []
        for turn in range(2):
            if turn:
                added = await self.apply_chat_template(
                    [{"role": "user", "content": self.question}], remove_system_prompt=True
                )
                prompt_ids, mask, logprobs = prompt_ids + added, mask + [0] * len(added), logprobs + [0.0] * len(added)
            with simple_timer("generate_sequences", metrics):
                output: TokenOutput = await self.server_manager.generate(
                    request_id=request_id, prompt_ids=prompt_ids, sampling_params=sampling_params
                )
            prompt_ids = prompt_ids + output.token_ids
            mask, logprobs = mask + [1] * len(output.token_ids), logprobs + output.log_probs
        return self.finish(prompt_ids, start, mask, logprobs, metrics, kwargs)

    def finish(
        self, ids: list[int], start: int, mask: list[int], logprobs: list[float], metrics: Any, row: dict[str, Any]
    ) -> AgentLoopOutput:
        return AgentLoopOutput(
            prompt_ids=ids[:start],
            response_ids=ids[start:][: self.response_length],
            response_mask=mask[: self.response_length],
            response_logprobs=logprobs[: self.response_length],
            num_turns=4,
            metrics=metrics,
            reward_score=float(row["reward_model"]["ground_truth"] == "15"),
            extra_fields={"turn_scores": [0.25, 1.0], "depth": 2, "note": row["hint"]},
        )
