"""Computes the advantages of a step's batch, and all other values that are fixed before the step's updates.

`prepare` runs once per learner step on the sequences of one rank. It computes rewards, advantages, the importance
weights and rejections of the corrections, the weights of the loss streams, and the tokens that the loss selects for
special treatment.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import Rollouts
from asyncrl.algorithms.batch import Centres, Episodes, Reduce, Tokens
from asyncrl.algorithms.composition import Composition
from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.demonstrations import only_sampled
from asyncrl.algorithms.global_threshold import draw
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.loss_streams import stream_weights
from asyncrl.algorithms.losses.base import Candidates
from asyncrl.algorithms.old_tokens import only_trained
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.proximal import INTERPOLATED, is_live
from asyncrl.algorithms.restricted_tokens import only_free, with_restricted_fixed
from asyncrl.errors import InvariantError


def prepare(
    parts: Composition, kl_weight: float, episodes: Episodes, tokens: Tokens, reduce: Reduce
) -> tuple[Tokens, float]:
    """The tokens with their advantages, weights and rejections, and the KL coefficient of the next step.

    `kl_weight` is the coefficient of this step. Raises InvariantError: see `Algorithm.prepare`.
    """
    reference = tokens.reference
    if parts.proximal == "behaviour":
        tokens = replace(tokens, proximal=tokens.behaviour)
    tokens = with_restricted_fixed(tokens)
    if episodes.version is not None:
        tokens = replace(tokens, lag=episodes.version - tokens.versions)
    view, sampled = PolicyTokens.of(tokens), PolicyTokens.of(only_sampled(tokens))
    _check(parts, episodes, tokens, view)
    episodes = parts.shaped(episodes)
    candidates = only_trained(only_sampled(tokens))
    trained, free = PolicyTokens.of(candidates), PolicyTokens.of(only_free(candidates))
    divergence = _divergence(parts, tokens, sampled)
    next_weight = kl_weight
    if divergence is not None:
        next_weight = _adapted(parts, kl_weight, free.take(sampled.scatter(divergence)), episodes, reduce)
    charge = None
    if divergence is not None and parts.kl.place == "reward":
        # Demonstrations get no KL penalty.
        charge = view.take(sampled.scatter(kl_weight * divergence))
    tokens = _with_advantages(parts, _rollouts(episodes, tokens, view, charge, reduce))
    tokens = _with_corrections(parts, episodes, tokens, free, reduce)
    tokens = replace(tokens, centres=_centres(tokens, trained, reduce))
    if parts.streams:
        weights = stream_weights(parts.streams, episodes, trained, reduce).to(tokens.behaviour.dtype)
        tokens = replace(tokens, streams=torch.stack([trained.scatter(each) for each in weights], 1))
    if parts.loss.selects:
        tokens = _with_selection(parts, episodes, tokens, free, reduce)
    return replace(tokens, reference=reference), next_weight


def _check(parts: Composition, episodes: Episodes, tokens: Tokens, view: PolicyTokens) -> None:
    if view.owner.numel() and not 0 <= int(view.owner.min()) <= int(view.owner.max()) < episodes.count:
        raise InvariantError(
            f"sequence reaches {int(view.owner.max())}; it must be in [0, {episodes.count}) (episodes)"
        )
    needed = {
        "behaviour": True,
        "proximal": parts.proximal in ("recompute", "behaviour"),
        "lag": parts.proximal in INTERPOLATED,
        "reference": parts.needs_reference,
        "values": parts.advantage.needs_critic,
        "collisions": parts.advantage.needs_collisions,
    }
    for name in (name for name, is_needed in needed.items() if is_needed):
        _check_finite(name, getattr(tokens, name), tokens, view)


def _check_finite(name: str, values: Tensor | None, tokens: Tokens, view: PolicyTokens) -> None:
    if values is None:
        raise InvariantError(f"{name} is missing ({'give Episodes.version' if name == 'lag' else f'Tokens.{name}'})")
    chosen = view.take(values)
    # The sum is finite only if every value is. It costs far less than checking each value.
    bad = chosen.new_empty(0) if chosen.sum().isfinite() else (~chosen.isfinite()).nonzero()
    if len(bad):
        place = view.index[bad[0, 0]]
        raise InvariantError(
            f"{name} is {float(values[place])} at position {int(tokens.position[place])} of sequence "
            f"{int(tokens.sequence[place])}; every policy token needs a finite value"
        )


def _divergence(parts: Composition, tokens: Tokens, view: PolicyTokens) -> Tensor | None:
    """float[M]: the KL estimate of each policy token at the start of the step. `None` if no part needs it."""
    if not (parts.has_kl and (parts.kl.place == "reward" or parts.kl.target)):
        return None
    assert tokens.proximal is not None
    assert tokens.reference is not None
    return parts.kl(view.take(tokens.proximal), view.take(tokens.reference))


def _adapted(parts: Composition, weight: float, divergence: Tensor, episodes: Episodes, reduce: Reduce) -> float:
    """The KL coefficient of the next step. `divergence` float[K] is the KL estimate of the trained tokens. Without such
    tokens on any rank, the coefficient stays."""
    total = divergence.sum().double()
    total, count = reduce(torch.stack([total, total.new_tensor(divergence.numel())]))
    return parts.kl.adapted(weight, float(total / count), episodes.count) if count else weight


def _rollouts(
    episodes: Episodes, tokens: Tokens, view: PolicyTokens, charge: Tensor | None, reduce: Reduce
) -> Rollouts:
    final = episodes.reward
    if charge is not None:
        charged = torch.zeros(episodes.count, dtype=torch.float64, device=charge.device)
        charged = reduce(charged.index_copy_(0, view.owner, view.sequences.sum(charge)))
        episodes = replace(episodes, reward=final - charged)
    values = None if tokens.values is None else view.take(tokens.values)
    return Rollouts(episodes, tokens, view, final, charge, values, reduce)


def _with_advantages(parts: Composition, rollouts: Rollouts) -> Tokens:
    estimate, view = parts.advantage(rollouts), rollouts.view
    priority = rollouts.episodes.priority
    # The sampler's weights should multiply the loss. To multiply the advantages is the same, because the policy losses
    # are proportional to the advantage; `check` refuses a sampler with weights for any other loss.
    weighted = estimate.advantages if priority is None else estimate.advantages * view.by_sequence(priority)
    advantages = view.scatter(weighted.to(rollouts.dtype))
    returns = None if estimate.returns is None else view.scatter(estimate.returns.to(rollouts.dtype))
    return replace(rollouts.tokens, advantages=advantages, returns=returns)


def _centres(tokens: Tokens, view: PolicyTokens, reduce: Reduce) -> Centres:
    assert tokens.advantages is not None
    values = [view.take(each) for each in (tokens.advantages, tokens.returns) if each is not None]
    sums = [each.sum(dtype=torch.float64) for each in values]
    *totals, count = reduce(torch.stack([*sums, sums[0].new_tensor(view.index.numel())]))
    means = [total / count.clamp(min=1) for total in totals]
    return Centres(means[0], None if tokens.returns is None else means[1])


def _with_corrections(
    parts: Composition, episodes: Episodes, tokens: Tokens, view: PolicyTokens, reduce: Reduce
) -> Tokens:
    if not parts.corrections:
        return tokens
    assert tokens.advantages is not None
    behaviour = view.take(tokens.behaviour)
    proximal = behaviour if tokens.proximal is None else view.take(tokens.proximal)
    ages = Ages(
        view,
        clamp_log(proximal - behaviour),
        view.take(tokens.advantages),
        behaviour=behaviour,
        proximal=proximal,
        reduce=reduce,
        episodes=episodes,
    )
    for bit, rule in enumerate(parts.corrections):
        if not is_live(parts, rule):
            ages = ages.after(bit, rule)
    weights = None if ages.weights is None else view.scatter(ages.weights)
    return replace(tokens, weights=weights, rejected=None if ages.rejected is None else view.scatter(ages.rejected))


def _with_selection(
    parts: Composition, episodes: Episodes, tokens: Tokens, view: PolicyTokens, reduce: Reduce
) -> Tokens:
    assert tokens.proximal is not None
    assert tokens.advantages is not None
    number = draw(view.take(tokens.sequence), view.take(tokens.position), episodes.version or 0)
    candidates = Candidates(
        view,
        view.take(tokens.proximal),
        view.take(tokens.behaviour),
        view.take(tokens.advantages),
        number,
        reduce,
    )
    return replace(tokens, selected=view.scatter(parts.loss.select(candidates)))
