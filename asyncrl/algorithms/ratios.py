"""Log-ratios between policies, made safe for exp."""

from __future__ import annotations

from torch import Tensor

LOG_LIMIT = 20.0


def clamp_log(log_ratio: Tensor) -> Tensor:
    """The log-ratio within +-20, so that its exp and the square of that are finite in float32; no gradient beyond."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)


def interpolated(behaviour: Tensor, policy: Tensor, lag: Tensor) -> Tensor:
    """log pi_prox without a forward pass: log mu + alpha (log pi_theta - log mu), detached; all float[M], lag int64[M].

    With v the learner's version and v_b the token's: alpha = clamp((v - 1 - v_b) / (v - v_b), 0, 1), the share of the
    way from behaviour to policy that the version before this one had gone; 0 at lag 0. Source: the log-linear
    approximation of proximal log-probs in AReaL: A Large-Scale Asynchronous Reinforcement Learning System for Language
    Reasoning, 2025.
    """
    alpha = ((lag - 1) / lag.clamp(min=1)).clamp(0, 1).to(behaviour.dtype)
    return behaviour + alpha * (policy.detach() - behaviour)
