"""verl's example of a tool: the policy submits answers, and reads whether they are right."""

from __future__ import annotations

from typing import Any

from asyncrl.compat.verl.rewards.rewarding import gsm8k_score
from asyncrl.compat.verl.tools.base import BaseTool
from asyncrl.compat.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

PENALTY = -0.05
"""The score of a submission that is not better than the one before."""


class Gsm8kTool(BaseTool):
    """Compares submitted answers with the task's ground truth. The reward is 1 if the last one is right, else 0."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        super().__init__(config, tool_schema)
        self._truths: dict[str, Any] = {}
        self._rewards: dict[str, float] = {}

    async def create(
        self, instance_id: str | None = None, ground_truth: Any = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        instance, response = await super().create(instance_id)
        given = kwargs.get("create_kwargs") or {}
        self._truths[instance] = given.get("ground_truth") if ground_truth is None else ground_truth
        self._rewards[instance] = 0.0
        return instance, response

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        answer = str(parameters.get("answer", ""))
        reward = gsm8k_score(f"#### {answer.removeprefix('#### ')}", self._truths[instance_id], method="flexible")
        score = 0.0 if reward > self._rewards[instance_id] else PENALTY
        self._rewards[instance_id] = reward
        return ToolResponse(text=f"Current parsed {answer=} {reward=}"), score, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return self._rewards[instance_id]

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self._truths[instance_id], self._rewards[instance_id]
