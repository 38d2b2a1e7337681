"""The metrics of a step. Each forward pass gives sums, which are added over all passes and ranks. The step's metrics
are computed from the totals.

Sums are float64, so that they do not depend on the split into micro-batches and ranks. A ratio r is summed as its
excess r - 1, which keeps precision if policies are close. For example, `k3`, an estimate of the KL
divergence, is the mean of `excess - log r`. For the same reason, variances of advantages and returns are summed around
the batch's mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Centres, Episodes, Tokens
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.ratio_bins import CORRECTED, RAW, bin_counts, shares

AGREEMENT = 1e-4
"""Log-probs that differ by no more than this number count as equal. Two float32 programs with the same weights
compute log-probs that differ by less."""

MASKED_BY_GRAMMARS = "masked/grammar"
TAUGHT = "demonstration/tokens"
PERPLEXITIES = ("perplexity_ratio", "behaviour_perplexity", "proximal_perplexity")
"""Metrics that are means over sequences. `perplexity_ratio` is the proximal policy's perplexity divided by the
behaviour policy's."""

LAG_BINS = 17
"""Token lags 0 to 15 have a bin each. The last bin has all larger lags."""


def token_sums(view: PolicyTokens, tokens: Tokens) -> dict[str, Tensor]:
    """The number of all policy tokens, the sum of their lags, and how many of them have each lag."""
    sums = {"tokens": tokens.behaviour.new_full((), view.index.numel(), dtype=torch.float64)}
    if tokens.lag is not None:
        lag = view.take(tokens.lag).clamp(min=0)
        sums["token_lag_sum"] = lag.sum().double()
        lag = lag.clamp(max=LAG_BINS - 1)
        ones = torch.ones_like(lag, dtype=torch.float64)
        # Unlike bincount, this does not make the host wait for the GPU.
        sums["token_lag"] = ones.new_zeros(LAG_BINS).index_add_(0, lag, ones)
    return sums


def age_sums(view: PolicyTokens, log_w: Tensor, tokens: Tokens) -> dict[str, Tensor]:
    """Sums that compare behaviour and proximal policy over the policy tokens that no grammar restricted.

    log_w float[M] is log pi_prox - log mu, clamped.
    """
    spans, excess = view.sequences, log_w.expm1()
    logs, behaviour = spans.sum(log_w), spans.mean(view.take(tokens.behaviour))
    mean = logs / spans.lengths.clamp(min=1)
    present = spans.lengths > 0
    return {
        "age/tokens": logs.new_full((), log_w.numel()),
        "age/sequences": present.count_nonzero().double(),
        "age/log": logs.sum(),
        "age/excess": _sum(excess),
        "age/excess_squared": _sum(excess.square()),
        "age/agree": (log_w.abs() <= AGREEMENT).count_nonzero().double(),
        "age/perplexity_ratio": torch.where(present, (-mean).exp(), 0.0).sum(),
        "age/behaviour_perplexity": torch.where(present, (-behaviour).exp(), 0.0).sum(),
        "age/proximal_perplexity": torch.where(present, (-behaviour - mean).exp(), 0.0).sum(),
        RAW: bin_counts(log_w),
        "age/sequence_squared": torch.where(present, (2 * clamp_log(logs)).exp(), 0.0).sum(),
    }


def update_sums(
    log_ratio: Tensor, weights: Tensor | None, advantages: Tensor, centres: Centres | None
) -> dict[str, Tensor]:
    """Sums over the kept tokens: their update, weights and advantages. The update log_ratio float[M] is log pi_theta -
    log pi_prox, clamped. Without `weights` all weights are 1."""
    log_ratio = log_ratio.detach()
    count = log_ratio.new_full((), log_ratio.numel(), dtype=torch.float64)
    binned = {} if weights is None else {CORRECTED: bin_counts(weights.detach().log())}
    return {
        **binned,
        "kept": count,
        "update/log": _sum(log_ratio),
        "update/excess": _sum(log_ratio.expm1()),
        "weight/sum": count if weights is None else _sum(weights),
        "weight/squared": count if weights is None else _sum(weights.square()),
        **_spread("advantage", advantages, None if centres is None else centres.advantages),
        "advantage/positive": (advantages > 0).count_nonzero().double(),
    }


def entropy_sums(entropy: Tensor, measured: Tensor | None) -> dict[str, Tensor]:
    """Sums over the entropies float[M] of the kept tokens. `measured` bool[M] is true on the tokens whose entropies
    were computed; the others have entropy 0. None: all were computed."""
    count = entropy.new_full((), entropy.numel(), dtype=torch.float64) if measured is None else measured.sum().double()
    chosen = entropy.detach() if measured is None else torch.where(measured, entropy.detach(), 0.0)
    return {"entropy": _sum(chosen), "entropy_tokens": count}


def taught_sums(logprobs: Tensor, advantages: Tensor) -> dict[str, Tensor]:
    """Sums over the tokens of demonstrations. logprobs and advantages are float[M]."""
    return {
        TAUGHT: logprobs.new_full((), logprobs.numel(), dtype=torch.float64),
        "demonstration/nll": -_sum(logprobs.detach()),
        "demonstration/probability": _sum(logprobs.detach().exp()),
        "demonstration/advantage": _sum(advantages),
    }


def return_sums(view: PolicyTokens, tokens: Tokens) -> dict[str, Tensor]:
    """Sums over the returns of the policy tokens. Empty if the estimator has no returns."""
    if tokens.returns is None:
        return {}
    return _spread("return", view.take(tokens.returns), None if tokens.centres is None else tokens.centres.returns)


def moments(name: str, sums: Mapping[str, float], count: float) -> tuple[float, float]:
    """The mean and the variance of `count` values, from their sums over all passes and ranks."""
    variance = sums[f"{name}/squared"] / count - (sums[f"{name}/centred"] / count) ** 2
    return sums[f"{name}/sum"] / count, max(0.0, variance)


def summarise(sums: Mapping[str, Tensor], rules: Sequence[str]) -> dict[str, float]:
    """The step's metrics from the sums of all passes (see `loss_of_pass` in step_loss.py). `rules` are the names of
    corrections.

    mismatch/ compares behaviour and proximal policy on the policy tokens that no grammar restricted. update/ compares
    proximal and trained policy on the kept tokens. masked/ and clip/ are shares of all policy tokens.
    """
    get = {name: float(value) for name, value in sums.items() if value.dim() == 0}
    tokens, kept = max(1.0, get.get("tokens", 0.0)), max(1.0, get.get("kept", 0.0))
    result = {f"masked/{rule}": get.get(f"masked/{rule}", 0.0) / tokens for rule in rules}
    if MASKED_BY_GRAMMARS in get:
        result[MASKED_BY_GRAMMARS] = get[MASKED_BY_GRAMMARS] / tokens
    result["masked/any"] = 1 - get.get("kept", 0.0) / tokens if get.get("tokens") else 0.0
    result["noop"] = float(get.get("kept", 0.0) == 0)
    if get.get("age/tokens"):
        result |= _ages(get)
    if "return/sum" in get and get.get("tokens"):
        result |= _mean_and_std("return", get, tokens)
    if "token_lag" in sums:
        result |= _lags(sums["token_lag"].tolist(), get["token_lag_sum"])
    result |= shares(sums)
    if get.get("kept"):
        result |= _updates(get, kept, tokens)
    for name in ("clip", "loss"):
        share = tokens if name == "clip" else get.get("minibatches", 0.0) or 1.0
        result |= {key: value / share for key, value in get.items() if key.startswith(f"{name}/")}
    if get.get("entropy_tokens"):
        result["entropy"] = get["entropy"] / get["entropy_tokens"]
    if "kl_reference" in get:
        result["kl_reference"] = get["kl_reference"] / kept
    if TAUGHT in get:
        taught = max(1.0, get[TAUGHT])
        means = {key: get[key] / taught for key in get if key.startswith("demonstration/") and key != TAUGHT}
        result |= {TAUGHT: get[TAUGHT], **means}
    return result


def episode_metrics(episodes: Episodes) -> dict[str, float]:
    """The rewards and lengths of the batch's sampled episodes, and the number and mean reward of demonstrations.
    Members that were decoded greedily are left out."""
    shown = {}
    if episodes.demonstrated is not None:
        taught = episodes.reward[episodes.demonstrated].double()
        shown = {"demonstration/episodes": float(taught.numel()), "demonstration/reward": float(taught.mean())}
    reward, lengths = episodes.reward[episodes.samples].double(), episodes.lengths[episodes.samples].double()
    return {
        **shown,
        "reward/mean": float(reward.mean()),
        "reward/std": float(reward.std(correction=0)),
        "reward/min": float(reward.min()),
        "reward/max": float(reward.max()),
        "length/mean": float(lengths.mean()),
        "length/max": float(lengths.max()),
    }


def level_groups(episodes: Episodes, score: str) -> float:
    """The share of groups whose members all have the same score. `score` is its name."""
    groups, values = episodes.groups, episodes.score(score)
    level = groups.total(groups.greatest(values) == groups.least(values)) > 0
    return float(level.double().mean())


def _ages(get: Mapping[str, float]) -> dict[str, float]:
    tokens, sequences = get["age/tokens"], get["age/sequences"]
    excess, squared = get["age/excess"] / tokens, get["age/excess_squared"] / tokens
    second_moment = squared + 2 * excess + 1
    return {
        # If all ratios are at their lower bound, float32 rounds each excess to -1, and the second moment is 0.
        "mismatch/ess": (1 + excess) ** 2 / second_moment if second_moment > 0 else 0.0,
        "mismatch/kl": -get["age/log"] / tokens,
        "mismatch/k3": excess - get["age/log"] / tokens,
        "mismatch/chi_square": second_moment - 1,
        "mismatch/agree": get["age/agree"] / tokens,
        "mismatch/chi_square_sequence": get["age/sequence_squared"] / sequences - 1,
        **{f"mismatch/{name}": get[f"age/{name}"] / sequences for name in PERPLEXITIES},
    }


def _updates(get: Mapping[str, float], kept: float, tokens: float) -> dict[str, float]:
    return {
        "update/kl": -get["update/log"] / kept,
        "update/k3": (get["update/excess"] - get["update/log"]) / kept,
        "weight/mean": get["weight/sum"] / kept,
        "weight/ess": get["weight/sum"] ** 2 / (tokens * get["weight/squared"]) if get["weight/squared"] else 0.0,
        "advantage/positive": get["advantage/positive"] / kept,
        **_mean_and_std("advantage", get, kept),
    }


def _spread(name: str, values: Tensor, centre: Tensor | None) -> dict[str, Tensor]:
    """The sums of values float[M] that `moments` needs. `centre` float64[] is a number near their mean."""
    centred = values.double() if centre is None else values.double() - centre
    return {f"{name}/sum": _sum(values), f"{name}/centred": centred.sum(), f"{name}/squared": centred.square().sum()}


def _mean_and_std(name: str, sums: Mapping[str, float], count: float) -> dict[str, float]:
    mean, variance = moments(name, sums, count)
    return {f"{name}/mean": mean, f"{name}/std": variance**0.5}


def _lags(counts: Sequence[float], lags: float) -> dict[str, float]:
    total = sum(counts)
    if not total:
        return {}
    longest = max(lag for lag, count in enumerate(counts) if count)
    return {"token_lag/mean": lags / total, **{f"token_lag/{lag}": counts[lag] / total for lag in range(longest + 1)}}


def _sum(values: Tensor) -> Tensor:
    """The sum in float64."""
    # Moments are differences of sums, and float32 would lose their digits.
    return values.sum(dtype=torch.float64)
