"""Measures the milliseconds of each advantage, correction and loss. Advantages and losses are also timed as
plain loops.

A batch has B sequences of T tokens, N = B * T tokens in all, in float32. There is one thread. Every figure is the least
processor time of several runs, so that other processes on the machine disturb it little.

- view: selects the policy tokens among the packed ones, once in `prepare` and once in each loss.
- advantage: computes advantages [N] from the view. The plain loop runs over the steps of time or over the sequences.
- correction: computes weights and rejections [N] from the view.
- loss: forward and backward of `Algorithm.loss` with truncated weights, aggregation and all metrics. The plain loop
  handles one sequence after the other.

One tensor of 30 MiB is allocated and freed first, as a model's forward pass does. From then on glibc keeps freed
memory of that size, instead of returning it to the system after each formula.

The floor is the time of copying the bytes that must be read and written once. `--share` is the share of tokens that the
policy sampled. They are at the end of each turn of 512 tokens.

    python -m benchmarks.algorithms --batch 256 --length 4096 --share 1.0
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from asyncrl.algorithms import registry
from asyncrl.algorithms.advantages.base import Advantage, Rollouts, TokenAdvantage
from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Episodes, Tokens, Totals
from asyncrl.algorithms.corrections.base import Ages
from asyncrl.algorithms.log_ratios import clamp_log
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.config.schema import AlgorithmConfig, PartConfig
from benchmarks.record import write_result

GROUP, TURN = 8, 512
PARAMETERS: dict[str, dict[str, Any]] = {
    "gdpo": {"weights": {"format": 1.0, "style": 1.0}},
    "reject": {"high": 0.1},
    "vaco": {"delta": 0.1},
}
"""The parameters of the advantages and corrections that need some."""


@dataclass(frozen=True)
class Row:
    """One measurement. `bytes` is the number of bytes that must be read or written for each token."""

    kind: str
    name: str
    ms: float
    bytes: int
    loop_ms: float | None = None


def alone(values: Tensor) -> Tensor:
    """Return the sum over ranks, for a learner with one rank."""
    return values


def least_ms(work: Callable[[], Any], runs: int) -> float:
    """The least milliseconds of `runs`."""
    best = float("inf")
    for _ in range(runs):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return best * 1e3


def make_batch(batch: int, length: int, share: float) -> tuple[Episodes, Tokens]:
    """Make a batch of groups of eight. The last `share` of the tokens of each turn of 512 are the policy's."""
    generator = torch.Generator().manual_seed(0)
    size = batch * length
    position = torch.arange(length).repeat(batch)
    mask = position % TURN >= round((1 - share) * TURN)

    def noise(scale: float) -> Tensor:
        return torch.randn(size, generator=generator) * scale

    behaviour = -torch.rand(size, generator=generator)
    tokens = Tokens(
        sequence=torch.arange(batch).repeat_interleave(length),
        position=position,
        mask=mask,
        behaviour=behaviour,
        versions=torch.where(mask, torch.randint(0, 4, (size,), generator=generator), -1),
        proximal=behaviour + noise(0.05),
        reference=behaviour + noise(0.05),
        values=noise(1.0),
        implicit=noise(1.0),
        collisions=torch.rand(size, generator=generator),
    )
    ends = torch.arange(TURN, length + 1, TURN)
    reward = torch.rand(batch, generator=generator)
    episodes = Episodes(
        group=torch.arange(batch) // GROUP,
        reward=reward,
        outcome=(reward > 0.5).float(),
        lengths=mask.view(batch, length).sum(1),
        step_scores=torch.rand(batch * len(ends), generator=generator) * 2 - 1,
        step_sequence=torch.arange(batch).repeat_interleave(len(ends)),
        step_end=ends.repeat(batch),
        extra={"format": 1 - reward, "style": reward**2},
        greedy=torch.arange(batch) % GROUP == 0,
        version=4,
    )
    return episodes, tokens


def advantage_rows(episodes: Episodes, tokens: Tokens, shape: tuple[int, int], runs: int) -> Iterator[Row]:
    view, critic = PolicyTokens.of(tokens), _there(tokens.values)
    for name in registry.parts("advantage"):
        advantage = _part("advantage", name)

        def work(advantage: Any = advantage) -> Tensor:
            values = view.take(critic) if advantage.needs_critic else None
            rollouts = Rollouts(episodes, tokens, view, episodes.reward, None, values, alone)
            return view.scatter(advantage(rollouts).advantages.float())

        def loop(advantage: Any = advantage) -> Tensor:
            over = over_time if isinstance(advantage, TokenAdvantage) else over_sequences
            return over(advantage, episodes, tokens, shape)

        read = 8 + 4 * advantage.needs_critic + 4 * (name == "prime")
        read += 8 * (advantage.uses_ratio or advantage.needs_collisions)
        yield Row("advantage", name, least_ms(work, runs), read, least_ms(loop, 2))


def correction_rows(episodes: Episodes, tokens: Tokens, runs: int) -> Iterator[Row]:
    """Measure each correction. `normalise` needs weights, so a truncation is measured together with it."""
    view, proximal = PolicyTokens.of(tokens), _there(tokens.proximal)
    for name in registry.parts("correction"):
        rules = [_part("correction", name)]
        if rules[0].follows_policy:
            continue
        if name == "normalise":
            rules.insert(0, _part("correction", "truncate"))

        def work(rules: Any = rules) -> None:
            behaviour, prox = view.take(tokens.behaviour), view.take(proximal)
            log_w = clamp_log(prox - behaviour)
            ages = Ages(view, log_w, log_w, behaviour=behaviour, proximal=prox, reduce=alone, episodes=episodes)
            for bit, rule in enumerate(rules):
                ages = ages.after(bit, rule)
            for result in (ages.weights, ages.rejected):
                if result is not None:
                    view.scatter(result)

        yield Row("correction", name, least_ms(work, runs), 16)


def loss_rows(episodes: Episodes, tokens: Tokens, batch: int, runs: int) -> Iterator[Row]:
    totals = Totals(int(tokens.mask.sum()), batch)
    logprobs = (tokens.behaviour + 0.01).requires_grad_()
    for name in registry.parts("loss"):
        part = _part("loss", name)
        level = "sequence" if part.sequence_level else "token"
        correction = [] if part.corrects else [PartConfig("truncate", {"level": level})]
        algorithm = Algorithm.from_config(AlgorithmConfig(loss=PartConfig(name), correction=correction))
        prepared = algorithm.prepare(episodes, tokens, alone)
        shares = [prepared.select(rows) for rows in torch.arange(len(logprobs)).tensor_split(batch)]

        def whole(algorithm: Algorithm = algorithm, prepared: Tokens = prepared) -> None:
            algorithm.loss(logprobs, prepared, totals)[0].backward()

        def loop(algorithm: Algorithm = algorithm, shares: list[Tokens] = shares) -> None:
            for share, own in zip(shares, logprobs.tensor_split(batch), strict=True):
                algorithm.loss(own, share, totals)[0].backward()

        yield Row("loss", name, least_ms(whole, runs), 37, least_ms(loop, 2))


def _part(kind: str, name: str) -> Any:
    """The built-in part of that kind and name."""
    return registry.build(kind, name, PARAMETERS.get(name, {}))


def _there(values: Tensor | None) -> Tensor:
    """Return a tensor that `make_batch` always sets. Its type allows None, because a learner's batch may lack it."""
    assert values is not None
    return values


def over_time(advantage: TokenAdvantage, episodes: Episodes, tokens: Tokens, shape: tuple[int, int]) -> Tensor:
    """A backward recursion over padded time steps, with one vector over the sequences at each step."""
    mask, values = tokens.mask.view(shape), _there(tokens.values).view(shape)
    ratio = (_there(tokens.proximal) - tokens.behaviour).view(shape).exp().clamp(max=1)
    rewards = torch.zeros(shape)
    rewards[:, -1] = episodes.reward
    following, after, result = torch.zeros(shape[0]), torch.zeros(shape[0]), torch.zeros(shape)
    for t in reversed(range(shape[1])):
        rho = ratio[:, t] if advantage.uses_ratio else 1.0
        delta = rho * (rewards[:, t] + following - values[:, t]) if advantage.needs_critic else rewards[:, t]
        after = torch.where(mask[:, t], delta + 0.95 * rho * after, after)
        following = torch.where(mask[:, t], values[:, t], following)
        result[:, t] = torch.where(mask[:, t], after, 0.0)
    return result


def over_sequences(advantage: Advantage, episodes: Episodes, tokens: Tokens, shape: tuple[int, int]) -> Tensor:
    """A loop over padded rows: compares the reward with its group, and spreads each step's score over the step."""
    mask, result = tokens.mask.view(shape), torch.zeros(shape)
    for row in range(shape[0]):
        members = episodes.group == episodes.group[row]
        result[row] = episodes.reward[row] - episodes.reward[members].mean()
        if advantage.needs_steps:
            steps = episodes.step_sequence == row
            for end, score in zip(episodes.step_end[steps], episodes.step_scores[steps], strict=True):
                result[row, :end] += score
    return result * mask


def seconds_a_byte() -> float:
    """Time a copy that exceeds the caches, counting each byte once for the read and once for the write."""
    source = torch.zeros(1 << 26)
    target = torch.empty_like(source)
    return least_ms(lambda: target.copy_(source), 5) / 1e3 / (8 * source.numel())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="sequences, a multiple of 8")
    parser.add_argument("--length", type=int, default=4096, help="tokens of each, a multiple of 512")
    parser.add_argument("--share", type=float, default=1.0, help="share of the tokens that the policy sampled")
    parser.add_argument("--runs", type=int, default=10, help="runs, of which the fastest counts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.empty(30 << 18).zero_()
    shape = (options.batch, options.length)
    episodes, tokens = make_batch(*shape, options.share)
    floor = seconds_a_byte() * len(tokens.mask) * 1e3
    print(f"{'':<36}{'ms':>8}{'floor':>8}{'ratio':>8}{'loop':>9}")
    rows = []
    for row in (
        Row("view", "", least_ms(lambda: PolicyTokens.of(tokens), options.runs), 17),
        *advantage_rows(episodes, tokens, shape, options.runs),
        *correction_rows(episodes, tokens, options.runs),
        *loss_rows(episodes, tokens, options.batch, options.runs),
    ):
        least = floor * row.bytes
        loop = f"{row.loop_ms:9.1f}" if row.loop_ms else ""
        print(f"{row.kind + ' ' + row.name:<36}{row.ms:8.2f}{least:8.2f}{row.ms / least:8.1f}{loop}", flush=True)
        rows.append({**asdict(row), "floor_ms": least})
    write_result(f"algorithms-{options.share:g}", {**vars(options), "rows": rows})


if __name__ == "__main__":
    main()
