"""The types of agent loops of verl: a turn of the policy, and the output of an episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class TokenOutput:
    """One turn of the policy: its tokens, and their log-probs at the sampling temperature.

    `extra_fields` has the versions of the policy that sampled the first and the last token, as `min_global_steps` and
    `max_global_steps`. `global_steps` is the last one.
    """

    token_ids: list[int]
    log_probs: list[float] | None = None
    routed_experts: Any = None
    stop_reason: str | None = None
    num_preempted: int | None = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class AgentLoopMetrics:
    """Seconds of an episode by phase. `num_preempted` is -1 if it is unknown."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> AgentLoopMetrics:
        """The metrics among `values`. As in verl, other values are left out."""
        return cls(**{each.name: values[each.name] for each in fields(cls) if each.name in values})


@dataclass(kw_only=True)
class AgentLoopOutput:
    """The sequence of an episode: `prompt_ids`, then `response_ids`.

    `response_mask` is 1 on the response's tokens that the policy sampled. `metrics` may be given as a mapping.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    routed_experts: Any = None
    multi_modal_data: dict[str, Any] | None = None
    reward_score: float | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics
    extra_fields: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = None
    mm_processor_output: list[dict[str, Any]] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.metrics, Mapping):
            self.metrics = AgentLoopMetrics.of(self.metrics)
