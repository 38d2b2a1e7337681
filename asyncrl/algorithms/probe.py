"""Tests the user's own parts of the algorithm before the run starts: calls each of them once on a tiny batch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms.advantages.base import Advantage, Rollouts, SequenceAdvantage
from asyncrl.algorithms.aggregation import Aggregation
from asyncrl.algorithms.batch import Episodes, MissingScoreError, Tokens, Totals
from asyncrl.algorithms.corrections.base import Ages, Correction
from asyncrl.algorithms.from_config import composition_of
from asyncrl.algorithms.kl import Kl
from asyncrl.algorithms.loss_streams import LossStream
from asyncrl.algorithms.losses.base import Candidates, Loss, Updates
from asyncrl.algorithms.losses.value import Value
from asyncrl.algorithms.lr_scale import PREFIX, LrScale
from asyncrl.algorithms.parts import Part
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.errors import ConfigError, InvariantError
from asyncrl.text import line_of, own_line, reason_of

_Result = tuple[str, Any, int | None, torch.dtype | None]
"""The name of the call, its result, the expected length (None: a scalar), and the expected dtype (None: any)."""

_RETURNS = {
    "advantage": "`__call__` must return an Estimate with float[M] (with a critic, returns float[M] too), and `scores` "
    "of a SequenceAdvantage float[S]",
    "loss": "`__call__` must return TokenLosses with float[M], and `select` bool[M] or float[M]",
    "correction": "`weigh` must return float[M] or None, and `keep` bool[M] or None",
    "kl": "`form` must return float[M]",
    "aggregation": "`__call__` must return a scalar tensor",
    "reward": "`__call__` must return float[S]",
    "value": "`__call__` must return float[M] and bool[M]",
    "stream": "`__call__` must return TokenLosses with float[M]",
    "lr_scale": f"`sums` must return scalar tensors whose names begin with {PREFIX}, and `__call__` a number",
}


def probe_parts(config: AlgorithmConfig, group_size: int) -> None:
    """Call each of the user's own parts on two groups of short episodes.

    Raises ConfigError with a line for each part that raises an exception, or returns a wrong shape or type.
    """
    parts = composition_of(config)
    chosen = (
        *parts.rewards,
        parts.advantage,
        parts.loss,
        *parts.corrections,
        *parts.streams,
        parts.kl,
        parts.aggregation,
        parts.value,
        parts.lr_scale,
    )
    own = [part for part in chosen if not type(part).__module__.startswith("asyncrl.")]
    if problems := [problem for part in own if (problem := _problem(part, 2 * group_size))]:
        raise ConfigError("\n".join(problems))


def _problem(part: Part, count: int) -> str | None:
    try:
        results = _results(part, _episodes(count, part.reads), _tokens(count))
        # Stop at the first wrong result: later calls may fail only because of it.
        reason, place = next(filter(None, (_wrong(*result) for result in results)), None), f" ({_defined(part)})"
    except Exception as error:  # noqa: BLE001 - errors of the user's code are what the probe looks for
        if isinstance(error, InvariantError) and not isinstance(error, MissingScoreError):
            return None  # The part refuses the made-up data, which proves nothing: only a run has real data.
        reason, place = reason_of(error), "" if own_line(error) else f" ({_defined(part)})"
        if isinstance(error, KeyError):
            reason += ": a score that a part reads must be named in its `reads`"
    if reason is None:
        return None
    return (
        f"algorithm.{part.kind}={type(part).__module__}.{type(part).__qualname__} does not work with {count} short "
        f"episodes: {reason}{place}; {_RETURNS[part.kind]} (S sequences, M policy tokens: docs/algorithms.md, "
        "'A part of yours')"
    )


def _wrong(what: str, value: Any, length: int | None, dtype: torch.dtype | None) -> str | None:
    shape = [] if length is None else [length]
    if not isinstance(value, Tensor):
        return f"{what} is {type(value).__name__}, not a tensor"
    if list(value.shape) != shape:
        return f"{what} has shape {list(value.shape)}, not {shape}"
    return f"{what} is {value.dtype}, not {dtype}" if dtype not in (None, value.dtype) else None


def _results(part: Part, episodes: Episodes, tokens: Tokens) -> Iterator[_Result]:
    """Call the methods of the part one after another, and yield the results."""
    view = PolicyTokens.of(tokens)
    size, count = view.index.numel(), episodes.count
    old = view.take(tokens.behaviour)
    advantages = torch.linspace(-1, 1, size)
    # As in the learner, log-probs and values are results of a computation, not leaves of the autograd graph.
    now = old.clone().requires_grad_() + 0.1
    match part:
        case Reward():
            yield "`__call__`", part(episodes), count, None
        case Advantage():
            with torch.no_grad():
                if isinstance(part, SequenceAdvantage):
                    yield "`scores`", part.scores(episodes), count, None
                values = old.new_zeros(size) if part.needs_critic else None
                estimate = part(Rollouts(episodes, tokens, view, episodes.reward, None, values, torch.clone))
                yield "`advantages` of its Estimate", estimate.advantages, size, None
                if part.needs_critic:
                    yield "`returns` of its Estimate", estimate.returns, size, None
        case Loss():
            selected = None
            if part.selects:
                draw = torch.linspace(0, 0.9, size)
                selected = part.select(Candidates(view, old * 1.1, old, advantages, draw, torch.clone))
                yield "`select`", selected, size, None
            losses = part(Updates(view, now, old, old, advantages, selected))
            yield "`losses` of its TokenLosses", losses.losses, size, None
            for name, mark in losses.marks.items():
                yield f"mark {name!r} of its TokenLosses", mark, size, torch.bool
        case LossStream():
            losses = part(Updates(view, now, old, old, advantages), old)
            yield "`losses` of its TokenLosses", losses.losses, size, None
        case Correction():
            ages = _ages(view, old, advantages, episodes)
            if (weights := part.weigh(ages)) is not None:
                yield "`weigh`", weights, size, None
            if (keep := part.keep(ages)) is not None:
                yield "`keep`", keep, size, torch.bool
        case Kl():
            yield "`form`", part(now, old), size, None
        case Aggregation():
            lengths = view.sequences.lengths
            totals = Totals.of(lengths.tolist(), episodes.group.tolist(), range(count))
            total = part(now, view.sequences, lengths, totals.of_pass(view.owner))
            yield "`__call__`", total, None, None
        case Value():
            errors, clipped = part(now, old, advantages)
            yield "the first result of `__call__`", errors, size, None
            yield "the second result of `__call__`", clipped, size, torch.bool
        case LrScale():
            yield from _of_scale(part, part.sums(view, old / 10))


def _ages(view: PolicyTokens, old: Tensor, advantages: Tensor, episodes: Episodes) -> Ages:
    return Ages(
        view,
        old / 10,
        advantages,
        torch.ones_like(advantages),
        behaviour=old,
        proximal=old * 1.1,
        log_policy=old / 10,
        reduce=torch.clone,
        episodes=episodes,
    )


def _of_scale(part: LrScale, sums: Mapping[str, Tensor]) -> Iterator[_Result]:
    """The results of a scale of the learning rate, of which `sums` is the first."""
    for name, value in sums.items():
        if not name.startswith(PREFIX):
            raise ValueError(f"the sum {name!r} does not begin with {PREFIX}")
        yield f"the sum {name!r}", value, None, None
    yield "`__call__`", torch.tensor(part({name: float(value) for name, value in sums.items()})), None, None


def _episodes(count: int, reads: Sequence[str]) -> Episodes:
    """Two groups of episodes with one step each, which fail and succeed in turn. They have the scores in `reads`."""
    member = torch.arange(count)
    won = (member % 2).float()
    return Episodes(
        group=member // (count // 2),
        reward=won,
        outcome=won,
        lengths=torch.full((count,), 2),
        step_scores=won,
        step_sequence=member,
        step_end=torch.full((count,), 3),
        extra=dict.fromkeys(reads, won),
        greedy=member % (count // 2) == 0,
        version=1,
    )


def _tokens(count: int) -> Tokens:
    """Three tokens for each episode: one of the prompt and two of the policy."""
    position = torch.arange(3).repeat(count)
    logprobs = -torch.linspace(0.1, 1, 3 * count)
    return Tokens(
        sequence=torch.arange(count).repeat_interleave(3),
        position=position,
        mask=position > 0,
        behaviour=logprobs,
        versions=torch.where(position > 0, 0, -1),
        proximal=logprobs,
        reference=logprobs,
        values=torch.zeros(3 * count),
        implicit=torch.zeros(3 * count),
        collisions=torch.full((3 * count,), 0.5),
        lag=torch.ones(3 * count, dtype=torch.int64),
    )


def _defined(part: Part) -> str:
    return line_of(inspect.getfile(type(part)), inspect.getsourcelines(type(part))[1])
