"""Computes the loss: the sum of the policy loss, the KL, the entropy, the loss streams and the demonstrations.

`loss_of_pass` runs in every forward pass of a step. The loss that it returns is divided by counts over the global
minibatch, so the sum over all micro-batches and ranks is the loss of the update. It also returns sums, which become
metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens, Totals
from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.demonstrations import of_demonstrations, only_sampled
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.loss_streams import LossStream, weighted
from asyncrl.algorithms.losses.base import TokenLosses, Updates
from asyncrl.algorithms.metrics import (
    MASKED_BY_GRAMMARS,
    TAUGHT,
    age_sums,
    entropy_sums,
    return_sums,
    taught_sums,
    token_sums,
    update_sums,
)
from asyncrl.algorithms.old_tokens import only_trained
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.proximal import interpolated, interpolated_linearly, is_live
from asyncrl.algorithms.restricted_tokens import behaviour_where_restricted, only_free, with_restricted_fixed
from asyncrl.errors import InvariantError


@dataclass(frozen=True, slots=True, eq=False)
class _Pass:
    """The policy tokens of the pass, without old ones, and the kept tokens with their importance weights (None: all
    weights are 1).

    A token is kept if neither a correction nor a grammar dropped it.
    """

    everything: Updates
    kept: Updates
    weights: Tensor | None
    sums: dict[str, Tensor]


def loss_of_pass(
    parts: Composition, kl_weight: float, logprobs: Tensor, tokens: Tokens, totals: Totals, entropy: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a micro-batch, and its sums for metrics: see `Algorithm.loss`."""
    _check(parts, logprobs, tokens, entropy)
    shown, all_tokens = of_demonstrations(tokens), tokens
    logprobs = behaviour_where_restricted(logprobs, tokens)
    tokens = only_trained(only_sampled(with_restricted_fixed(tokens)))
    this = _pass(parts, logprobs, tokens)
    updates, lengths = this.kept, this.everything.view.sequences.lengths
    policy = parts.loss(updates)
    terms = {"policy": policy.losses if this.weights is None else this.weights * policy.losses}
    sums = this.sums | update_sums(updates.log_ratio, this.weights, updates.advantages, tokens.centres)
    sums |= {f"clip/{name}": mark.count_nonzero().double() for name, mark in policy.marks.items()}
    sums |= parts.lr_scale.sums(updates.view, clamp_log(updates.logprobs.detach() - updates.behaviour))
    if (weights := _in_stream(parts, "rl", tokens, updates.view)) is not None:
        terms["policy"] = weighted(terms["policy"], weights)
    if parts.has_kl and tokens.reference is not None:
        reference = updates.view.take(tokens.reference)
        if parts.kl.importance_weighted:
            divergence = parts.kl.weighted(updates.logprobs, reference, updates.behaviour)
        else:
            divergence = parts.kl(updates.logprobs, reference)
        sums["kl_reference"] = divergence.detach().sum().double()
        terms |= {"kl": kl_weight * divergence} if parts.kl.place == "loss" else {}
    if entropy is not None:
        spread = updates.view.take(entropy)
        measured = None if parts.entropy_weight or tokens.measured is None else updates.view.take(tokens.measured)
        sums |= entropy_sums(spread, measured)
        terms |= {"entropy": -parts.entropy_weight * spread} if parts.entropy_weight else {}
    totals = totals.of_pass(updates.view.owner)
    losses = {
        name: parts.aggregation(values, updates.view.sequences, lengths, totals) for name, values in terms.items()
    }
    for name, more in _streamed(parts, this.everything, tokens).items():
        losses[name] = parts.aggregation(more.losses, this.everything.view.sequences, lengths, totals)
        sums |= {f"clip/{name}_{mark}": marked.count_nonzero().double() for mark, marked in more.marks.items()}
    taught: Tensor | float = 0.0
    if shown is not None:
        losses["demonstration"], found = _taught(parts, logprobs, all_tokens, shown, totals)
        sums, taught = sums | found, found[TAUGHT]
    sums |= {f"loss/{name}": value.detach() for name, value in losses.items()}
    sums["minibatches"] = (sums["tokens"] + taught) / max(1, totals.tokens)
    return torch.stack(list(losses.values())).sum(), sums


def _taught(
    parts: Composition, logprobs: Tensor, tokens: Tokens, shown: PolicyTokens, totals: Totals
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the demonstrations' tokens `shown`, and its sums for metrics."""
    assert tokens.advantages is not None
    policy, advantages = shown.take(logprobs), shown.take(tokens.advantages)
    values = parts.demonstration(policy, advantages)
    loss = parts.aggregation(values, shown.sequences, shown.sequences.lengths, totals)
    return loss, taught_sums(policy, advantages)


def importance(parts: Composition, logprobs: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
    """The proximal log-probs and importance weights of a pass: see `Algorithm.importance`."""
    policy, fixed = behaviour_where_restricted(logprobs, tokens), only_sampled(with_restricted_fixed(tokens))
    this = _pass(parts, policy, only_trained(fixed))
    # Old tokens have no weight, but a proximal log-prob.
    everything, updates = _updates(parts, policy, fixed, PolicyTokens.of(fixed)), this.kept
    weights = torch.ones_like(updates.behaviour) if this.weights is None else this.weights
    proximal, found = everything.view.scatter(everything.proximal), updates.view.scatter(weights)
    if (shown := of_demonstrations(tokens)) is None:
        return proximal, found
    taught = shown.take(logprobs)
    return proximal + shown.scatter(taught), found + shown.scatter(parts.demonstration.weights(taught))


def _streamed(parts: Composition, everything: Updates, tokens: Tokens) -> dict[str, TokenLosses]:
    """The weighted losses of all streams except rl, by name."""
    reference = None if tokens.reference is None else everything.view.take(tokens.reference)
    found = {}
    for stream in parts.streams:
        weights = _in_stream(parts, stream.name, tokens, everything.view)
        if isinstance(stream, LossStream) and weights is not None:
            result = stream(everything, reference)
            found[stream.name] = replace(result, losses=weighted(result.losses, weights))
    return found


def _in_stream(parts: Composition, name: str, tokens: Tokens, view: PolicyTokens) -> Tensor | None:
    """float[M]: the tokens' weights in the stream `name`. `None` if the configuration does not have the stream."""
    names = [stream.name for stream in parts.streams]
    if name not in names:
        return None
    if tokens.streams is None:
        raise InvariantError("streams are missing: give the tokens that prepare returned")
    return view.take(tokens.streams[:, names.index(name)])


def _check(parts: Composition, logprobs: Tensor, tokens: Tokens, entropy: Tensor | None) -> None:
    for name, given in (("logprobs", logprobs), ("entropy", entropy)):
        if given is not None and given.shape != tokens.mask.shape:
            raise InvariantError(f"{name} has shape {list(given.shape)}; the tokens have {list(tokens.mask.shape)}")
    if entropy is None and parts.entropy_weight:
        raise InvariantError(f"entropy is missing: algorithm.entropy_weight={parts.entropy_weight} needs it")
    if tokens.advantages is None:
        raise InvariantError("advantages are missing: give the tokens that prepare returned")


def _pass(parts: Composition, logprobs: Tensor, tokens: Tokens) -> _Pass:
    view = PolicyTokens.of(tokens)
    everything = updates = _updates(parts, logprobs, tokens, view)
    sums = token_sums(view, tokens) | return_sums(view, tokens)
    if tokens.restricted is not None:
        updates = _updates(parts, logprobs, tokens, PolicyTokens.of(only_free(tokens)))
        sums[MASKED_BY_GRAMMARS] = sums["tokens"] - len(updates.behaviour)
    with torch.no_grad():
        ages = _ages(parts, updates, tokens)
        sums |= age_sums(updates.view, ages.log_w, tokens)
    if ages.rejected is None:
        return _Pass(everything, updates, ages.weights, sums)
    for bit, name in enumerate(parts.rule_names):
        sums[f"masked/{name}"] = (ages.rejected >> bit & 1).count_nonzero().double()
    keep = ages.rejected == 0
    weights = None if ages.weights is None else ages.weights[keep]
    return _Pass(everything, _updates(parts, logprobs, tokens, updates.view.narrow(keep)), weights, sums)


def _updates(parts: Composition, logprobs: Tensor, tokens: Tokens, view: PolicyTokens) -> Updates:
    assert tokens.advantages is not None
    policy, behaviour = view.take(logprobs), view.take(tokens.behaviour)
    if tokens.proximal is not None:
        proximal = view.take(tokens.proximal)
    elif parts.proximal == "training":
        proximal = policy.detach()
    else:
        assert tokens.lag is not None
        between = interpolated if parts.proximal == "interpolate" else interpolated_linearly
        proximal = between(behaviour, policy, view.take(tokens.lag))
    selected = None if tokens.selected is None else view.take(tokens.selected)
    return Updates(view, policy, proximal, behaviour, view.take(tokens.advantages), selected)


def _ages(parts: Composition, updates: Updates, tokens: Tokens) -> Ages:
    """The results of all corrections. `Algorithm.prepare` has already applied some of them; the others are applied
    here, in every pass."""
    view = updates.view
    ages = Ages(
        view,
        clamp_log(updates.proximal - updates.behaviour),
        updates.advantages,
        weights=None if tokens.weights is None else view.take(tokens.weights),
        rejected=None if tokens.rejected is None else view.take(tokens.rejected),
        behaviour=updates.behaviour,
        proximal=updates.proximal,
        log_policy=clamp_log(updates.logprobs.detach() - updates.behaviour),
    )
    for bit, rule in enumerate(parts.corrections):
        if is_live(parts, rule):
            ages = ages.after(bit, rule)
    return ages
