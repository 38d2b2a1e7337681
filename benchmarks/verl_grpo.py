"""Parts of benchmarks.versus_verl that run in verl's processes: the tool, the rule, the agent loop and the sampler.

They have asyncrl's own arithmetic and reading of numbers, so both sides have the same work. verl loads them by the
names in the files that `verl_settings` writes.
"""

from __future__ import annotations

from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer, ReplayBufferAsync

from asyncrl.arithmetic import calculate
from asyncrl.scoring.rules.exact_number import MARK, final_number

POLL_S = 0.1
_LAST_TURN = "assistant\n"
"""The text that the chat template puts before the assistant's turn, without its special tokens."""


class Calculator(BaseTool):  # type: ignore[misc]
    """asyncrl's calculator."""

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, ToolResponse]:
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        try:
            return ToolResponse(text=calculate(parameters["expression"])), 0.0, {}
        except ValueError as error:
            return ToolResponse(text=f"Error: {error}"), 0.0, {}


def exact_number(solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 if the number of the last turn is the ground truth, else 0."""
    found = final_number(_last_turn(solution_str))
    return float(found is not None and found == final_number(ground_truth))


def gsm8k(solution_str: str, ground_truth: str, **_: Any) -> float:
    """1 if the number after the last `####` of the last turn is the ground truth, else 0."""
    return exact_number(solution_str, ground_truth) if MARK.search(_last_turn(solution_str)) else 0.0


def _last_turn(solution: str) -> str:
    return solution.rpartition(_LAST_TURN)[2]


class BoundedEpisode(ToolAgentLoop):  # type: ignore[misc]
    """verl's agent loop with two more bounds: tokens of a turn, and tokens of an episode with its prompt."""

    def __init__(self, *args: Any, turn_tokens: int, episode_tokens: int, **kwargs: Any) -> None:
        # Qwen's chat template has a line break after <|im_end|>, as this one has. verl's default for `llama` would
        # leave it out between turns.
        super().__init__(*args, **{**kwargs, "hf_model_type": "qwen2"})
        self._turn_tokens, self._episode_tokens = turn_tokens, episode_tokens

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        return await super().run(sampling_params, **kwargs)

    async def _handle_pending_state(self, agent_data: AgentData, sampling_params: dict[str, Any]) -> AgentState:
        state = await super()._handle_pending_state(agent_data, sampling_params)
        # This object plays one episode.
        self.response_length = self._episode_tokens - len(agent_data.prompt_ids)
        return state

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        left = self._episode_tokens - len(agent_data.prompt_ids)
        bounded = {**sampling_params, "max_tokens": min(self._turn_tokens, left)}
        return await super()._handle_generating_state(agent_data, bounded, ignore_termination)


class FrequentSampler(ReplayBuffer):  # type: ignore[misc]
    """verl's own replay buffer. It looks every POLL_S seconds for finished groups, instead of every 2 seconds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": POLL_S})


class FrequentAsyncSampler(ReplayBufferAsync):  # type: ignore[misc]
    """The same for verl's asynchronous trainers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "poll_interval": POLL_S})
