"""Tells where the log-probs of the proximal policy (the policy at the start of a step) come from, and when the parts of
the algorithm need them.

- `recompute`: an extra forward pass before the updates.
- `training`: the forward pass of the update itself, detached. This is exact with one update per step.
- `behaviour`: the log-probs with which the tokens were sampled.
- `interpolate`, `interpolate_linear`: an estimate in the forward pass, from the age of each token.
- `auto`: `training` if that is sufficient, and `recompute` otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor

from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.corrections.base import Correction
from asyncrl.algorithms.loss_streams import LossStream

INTERPOLATED = ("interpolate", "interpolate_linear")


def source_of(parts: Composition, updates: int) -> str:
    """The source of the proximal log-probs for a learner with `updates` updates per step. Resolves `auto`."""
    if parts.proximal != "auto":
        return parts.proximal
    in_time = (updates == 1 or not _read_in_updates(parts)) and not names_before_updates(parts)
    return "training" if in_time else "recompute"


def names_before_updates(parts: Composition) -> list[str]:
    """The names of the parts that need the proximal log-probs of the whole batch before the updates."""
    early = [rule.name for rule in parts.corrections if rule.uses_ratio and rule.whole_batch]
    early += [parts.advantage.name] if parts.advantage.uses_ratio or parts.advantage.needs_collisions else []
    early += [parts.loss.name] if parts.loss.selects else []
    early += [parts.kl.name] if parts.has_kl and (parts.kl.place == "reward" or parts.kl.target) else []
    return early


def is_live(parts: Composition, rule: Correction) -> bool:
    """True if the correction `rule` is applied in every forward pass instead of once before the updates."""
    return rule.follows_policy or (parts.proximal in (*INTERPOLATED, "training") and rule.uses_ratio)


def _read_in_updates(parts: Composition) -> bool:
    """True if a part reads the proximal log-probs during the updates."""
    return (
        parts.loss.reads_proximal
        or any(stream.reads_proximal for stream in parts.streams if isinstance(stream, LossStream))
        or any(rule.uses_ratio for rule in parts.corrections)
    )


def interpolated(behaviour: Tensor, policy: Tensor, lag: Tensor) -> Tensor:
    """log pi_prox without a forward pass of its own: log mu + alpha (log pi_theta - log mu), detached.

    `lag` is int64[M], all other tensors are float[M].

    With the learner's version v and the token's version v_b, alpha = clamp((v - 1 - v_b) / (v - v_b), 0, 1). alpha is
    the share of the way from the behaviour policy to the current policy that version v - 1 had covered. It is 0 at lag
    0.
    Source: the log-linear approximation of proximal log-probs in AReaL: A Large-Scale Asynchronous Reinforcement
    Learning System for Language Reasoning, 2025.
    """
    return behaviour + _progress(lag).to(behaviour.dtype) * (policy.detach() - behaviour)


def interpolated_linearly(behaviour: Tensor, policy: Tensor, lag: Tensor) -> Tensor:
    """log pi_prox with pi_prox = mu + alpha (pi_theta - mu). In all other respects, this is like `interpolated`."""
    alpha = _progress(lag).to(behaviour.dtype)
    return torch.logaddexp(behaviour + torch.log1p(-alpha), policy.detach() + alpha.log())


def _progress(lag: Tensor) -> Tensor:
    """alpha float[M] of `interpolated`."""
    return ((lag - 1) / lag.clamp(min=1)).clamp(0, 1)
