"""Bounds log-ratios of two policies, so that ratios stay finite, and combines them over spans of tokens."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.policy_tokens import PolicyTokens

LOG_LIMIT = 20.0
LEVELS = ("token", "turn", "turn_geometric", "sequence", "geometric")
LEVEL_MEANING = (
    "span of tokens that share one ratio; token: each token has its own; turn, sequence: the product of the ratios of "
    "the span's tokens; turn_geometric, geometric: the geometric mean of the ratios in the turn or in the sequence"
)


def clamp_log(log_ratio: Tensor) -> Tensor:
    """The log-ratio, clamped to +-20. Its exp, and the square of the exp, are then finite in float32. Beyond these
    bounds the result has no gradient."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)


def at_level(log_ratio: Tensor, view: PolicyTokens, level: str) -> Tensor:
    """float[M]: token log-ratios float[M], combined over the level's span (see LEVEL_MEANING) and clamped.

    The level turn_geometric is computed as ROLL computes the ratios of segments: Reinforcement Learning Optimization
    for Large-Scale Learning: An Efficient and User-Friendly Scaling Library, 2025.
    """
    if level == "token":
        return log_ratio
    spans = view.turns() if level.startswith("turn") else view.sequences
    gathered = spans.mean(log_ratio) if level.endswith("geometric") else spans.sum(log_ratio)
    return clamp_log(spans.spread(gathered.to(log_ratio.dtype)))
