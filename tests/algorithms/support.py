"""Batches for tests, and learners of several ranks in one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from omegaconf import OmegaConf
from torch import Tensor

from asyncrl.algorithms.advantages.base import Rollouts
from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.algorithms.losses.base import Updates
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config.compose import composed
from asyncrl.config.schema import AlgorithmConfig, PartConfig, TrainConfig
from tests.helpers import GENEROUS_S

Result = TypeVar("Result")


def alone(values: Tensor) -> Tensor:
    """The sum over the ranks of a learner with one."""
    return values


def make_config(**changes: Any) -> AlgorithmConfig:
    """A config in which a part may be given as its name, or as (name, params)."""

    def choice(value: Any) -> PartConfig:
        return PartConfig(value) if isinstance(value, str) else PartConfig(value[0], dict(value[1]))

    for name, value in changes.items():
        if name in ("advantage", "loss", "kl", "aggregation", "value", "value_aggregation", "lr_scale"):
            changes[name] = choice(value)
        elif name in ("correction", "reward", "stream"):
            changes[name] = [choice(each) for each in value]
    return AlgorithmConfig(**changes)


def preset(name: str) -> AlgorithmConfig:
    """The algorithm of a preset of `configs/algorithm`."""
    config = OmegaConf.to_object(composed([f"algorithm={name}", "model.path=x", "data.train=x"]))
    assert isinstance(config, TrainConfig)
    return config.algorithm


def make_algorithm(**changes: Any) -> Algorithm:
    """The algorithm of `make_config`, for tokens that have proximal log-probs."""
    return Algorithm.from_config(make_config(**{"proximal": "recompute", **changes}))


def make_episodes(reward: Sequence[float], group: Sequence[int], **changes: Any) -> Episodes:
    """Episodes with these rewards and groups, float64; steps are given as (sequence, end, score)."""
    steps = changes.pop("steps", [])
    scores = torch.tensor(reward, dtype=torch.float64)
    values: dict[str, Any] = {
        "group": torch.tensor(group),
        "reward": scores,
        "outcome": scores,
        "lengths": torch.ones(len(reward), dtype=torch.int64),
        "step_scores": torch.tensor([score for _, _, score in steps], dtype=torch.float64),
        "step_sequence": torch.tensor([sequence for sequence, _, _ in steps], dtype=torch.int64),
        "step_end": torch.tensor([end for _, end, _ in steps], dtype=torch.int64),
        "extra": {},
    }
    return Episodes(**{**values, **changes})


def make_tokens(masks: Sequence[Sequence[int]], **changes: Any) -> Tokens:
    """One sequence for each mask; float64 zeros for log-probs that are not given."""
    lengths = torch.tensor([len(mask) for mask in masks])
    mask = torch.tensor([bool(flag) for each in masks for flag in each])
    values: dict[str, Any] = {
        "sequence": torch.arange(len(masks)).repeat_interleave(lengths),
        "position": torch.cat([torch.arange(len(each)) for each in masks]),
        "mask": mask,
        "behaviour": torch.zeros(len(mask), dtype=torch.float64),
        "versions": torch.where(mask, 0, -1),
    }
    values["proximal"] = values["behaviour"]
    return Tokens(**{**values, **changes})


def make_rollouts(episodes: Episodes, tokens: Tokens, **changes: Any) -> Rollouts:
    view = PolicyTokens.of(tokens)
    values = None if tokens.values is None else view.take(tokens.values)
    made = Rollouts(episodes, tokens, view, episodes.reward, None, values, alone)
    return replace(made, **changes)


def make_updates(log_ratio: Sequence[float], advantages: Sequence[float], lengths: Sequence[int] = ()) -> Updates:
    """Policy tokens whose proximal and behaviour log-probs are -1, float64; log-probs ask for gradient."""
    lengths = lengths or [len(log_ratio)]
    tokens = make_tokens([[1] * length for length in lengths])
    old = torch.full((len(log_ratio),), -1.0, dtype=torch.float64)
    policy = (old + torch.tensor(log_ratio, dtype=torch.float64)).requires_grad_()
    return Updates(PolicyTokens.of(tokens), policy, old, old, torch.tensor(advantages, dtype=torch.float64))


def random_batch(seed: int, dtype: torch.dtype = torch.float64, drift: float = 0.3) -> tuple[Episodes, Tokens]:
    """Three to eight sequences in groups of two to four, tool tokens in between, two steps each, all fields filled."""
    generator = torch.Generator().manual_seed(seed)

    def randint(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    group = [index for index in range(randint(1, 3)) for _ in range(randint(2, 5))]
    masks = []
    for _ in group:
        spans = [
            [0] * randint(1, 4),
            [1] * randint(1, 6),
            [0] * randint(1, 3),
            [1] * randint(1, 6),
            [0] * randint(0, 2),
        ]
        masks.append([flag for span in spans for flag in span])
    ends = [[len(mask) - mask[::-1].index(1), mask.index(1) + 1] for mask in masks]
    steps = [
        (sequence, end, float(torch.rand((), generator=generator)) * 2 - 1)
        for sequence, (last, first) in enumerate(ends)
        for end in sorted({first, last})
    ]
    size = sum(len(mask) for mask in masks)

    def floats(scale: float = 1.0) -> Tensor:
        return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(dtype)

    behaviour = -torch.rand(size, generator=generator, dtype=torch.float64).to(dtype) - 0.1
    proximal = behaviour + floats(drift)
    tokens = make_tokens(
        masks,
        behaviour=behaviour,
        proximal=proximal,
        reference=behaviour + floats(drift),
        values=floats(),
        implicit=floats(),
        collisions=(2 * proximal).exp() + floats().square(),
    )
    versions = torch.randint(0, 5, (size,), generator=generator)
    tokens = replace(tokens, versions=torch.where(tokens.mask, versions, -1))
    reward = torch.rand(len(group), generator=generator, dtype=torch.float64)
    greedy = torch.tensor([member == group.index(index) for member, index in enumerate(group)])
    episodes = make_episodes(
        reward.tolist(),
        group,
        steps=steps,
        outcome=(reward > 0.5).double(),
        lengths=torch.tensor([sum(mask) for mask in masks]),
        extra={"format": 1 - reward, "style": reward**2},
        greedy=greedy,
        version=5,
    )
    return episodes, tokens


def totals_of(tokens: Tokens, episodes: Episodes | None = None) -> Totals:
    """The totals of these tokens, with groups where the episodes of the batch are given."""
    if episodes is None:
        return Totals(int(tokens.mask.sum()), int(tokens.sequence[tokens.mask].unique().numel()))
    sampled = [int(tokens.mask[tokens.sequence == row].sum()) for row in range(episodes.count)]
    return Totals.of(sampled, episodes.group.tolist(), tokens.sequence[tokens.mask].unique().tolist())


def rows(tokens: Tokens, members: Sequence[int]) -> Tensor:
    """Return the indices of the tokens of these sequences, in the order of `members`."""
    return torch.cat([(tokens.sequence == member).nonzero().squeeze(1) for member in members])


def on_ranks(size: int, work: Callable[[int, Callable[[Tensor], Tensor]], Result]) -> list[Result]:
    """work(rank, reduce) on `size` threads at once; reduce sums over them."""
    barrier, shared = threading.Barrier(size, timeout=GENEROUS_S), [torch.zeros(())] * size

    def run(rank: int) -> Result:
        def reduce(values: Tensor) -> Tensor:
            shared[rank] = values
            barrier.wait()
            total = torch.stack(shared).sum(0)
            barrier.wait()
            return total

        return work(rank, reduce)

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
