"""Log-ratios of two policies: the bound that keeps them finite, and the spans over which one ratio is taken."""

from __future__ import annotations

from torch import Tensor

from asyncrl.algorithms.policy_tokens import PolicyTokens

LOG_LIMIT = 20.0
LEVELS = ("token", "turn", "turn_geometric", "sequence", "geometric")
LEVEL_MEANING = (
    "what one ratio spans: a product over the turn or sequence; turn_geometric and geometric are the mean of its "
    "log-ratios"
)


def clamp_log(log_ratio: Tensor) -> Tensor:
    """The log-ratio within +-20, so that its exp and the square of that are finite in float32; no gradient beyond."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)


def at_level(log_ratio: Tensor, view: PolicyTokens, level: str) -> Tensor:
    """float[M]: token log-ratios float[M] gathered over the level's span (see LEVEL_MEANING) and clamped.

    The geometric level of a turn equals ROLL's for segments: Reinforcement Learning Optimization for Large-Scale
    Learning: An Efficient and User-Friendly Scaling Library, 2025.
    """
    if level == "token":
        return log_ratio
    spans = view.turns() if level.startswith("turn") else view.sequences
    gathered = spans.mean(log_ratio) if level.endswith("geometric") else spans.sum(log_ratio)
    return clamp_log(spans.spread(gathered.to(log_ratio.dtype)))
