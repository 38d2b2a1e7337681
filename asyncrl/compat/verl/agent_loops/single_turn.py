"""The loop `single_turn_agent`: the policy answers once."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from asyncrl.compat.verl.agent_loops.base import AgentLoopBase, register
from asyncrl.compat.verl.agent_loops.helpers import simple_timer
from asyncrl.compat.verl.agent_loops.outputs import AgentLoopOutput


@register("single_turn_agent")
class SingleTurnAgentLoop(AgentLoopBase):
    """Lets the policy answer the prompt of a row once, with at most `response_length` tokens."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompt_length = self.rollout_config.prompt_length
        self.response_length = self.rollout_config.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        metrics: dict[str, Any] = {}
        prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
        with simple_timer("generate_sequences", metrics):
            sampled = await self.server_manager.generate(
                uuid4().hex, prompt_ids=prompt_ids, sampling_params=sampling_params
            )
        length = self.response_length
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=sampled.token_ids[:length],
            response_mask=[1] * len(sampled.token_ids[:length]),
            response_logprobs=sampled.log_probs[:length] if sampled.log_probs else None,
            num_turns=2,
            metrics=metrics,  # type: ignore[arg-type]
            extra_fields={**sampled.extra_fields, "turn_scores": [], "tool_rewards": []},
        )
