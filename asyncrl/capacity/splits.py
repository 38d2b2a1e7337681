"""Chooses the numbers of learner GPUs to simulate, around the number at which neither learner nor engines wait on
average."""

from __future__ import annotations

import numpy as np
from msgspec.structs import replace

from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.errors import ConfigError

AROUND = (0.5, 0.75, 1.0, 1.5, 2.0)
ROUNDS = 50
CANDIDATES = 200


def splits(run: RunDescription, gpus: int, host_gpus: int = 1) -> list[Sizes]:
    """Divide `gpus` GPUs between engines and learner in several ways. The learner gets a multiple of `host_gpus`, and
    the scorers grow in proportion to the engines. Raises ConfigError: there are too few GPUs."""
    _check_hosts(run.sizes, gpus, host_gpus)
    most = gpus - max(host_gpus, run.sizes.engine_gpus)
    if most < 1:
        raise ConfigError(
            f"--gpus {gpus}: the learner needs at least {host_gpus} of them, and the engines {gpus - most}"
        )
    hosts = most // host_gpus
    numbers = sorted({round(number) * host_gpus for number in np.geomspace(1, hosts, CANDIDATES)})
    each = {learner: with_learner(run.sizes, gpus, learner) for learner in numbers}
    rates = replace(run.rates, tasks=[[_mean_episode(run.rates)]])
    best = max(numbers, key=lambda learner: balanced_rate(rates, each[learner]))
    wanted = {min(hosts, max(1, round(best * share / host_gpus))) * host_gpus for share in AROUND}
    return [with_learner(run.sizes, gpus, learner) for learner in sorted(wanted)]


def with_learner(sizes: Sizes, gpus: int, learner: int, host_gpus: int = 1) -> Sizes:
    """Return the sizes of a run whose learner has `learner` of the `gpus` GPUs, and whose engines have the rest. Raises
    ConfigError: the rest is too small for an engine, or the hosts of `host_gpus` GPUs cannot be divided like this."""
    _check_hosts(sizes, gpus, host_gpus)
    if learner % host_gpus:
        raise ConfigError(f"--learner-gpus {learner}: it must be a multiple of --host-gpus {host_gpus}")
    engines = (gpus - learner) // sizes.engine_gpus
    if engines < 1:
        raise ConfigError(f"--learner-gpus {learner}: the rest of {gpus} GPUs is too small for an engine")
    scorers = max(1, round(sizes.scorers * engines / sizes.engines))
    return replace(sizes, engines=engines, learner_gpus=learner, scorers=scorers)


def _check_hosts(sizes: Sizes, gpus: int, host_gpus: int) -> None:
    if gpus % host_gpus or (host_gpus > 1 and host_gpus % sizes.engine_gpus):
        raise ConfigError(
            f"--host-gpus {host_gpus}: {gpus} GPUs are not a whole number of hosts, or engines of "
            f"{sizes.engine_gpus} GPUs do not fill a host"
        )


def _mean_episode(rates: Rates) -> TypicalEpisode:
    episodes = [episode for task in rates.tasks for episode in task]
    sampled, tokens, tools_s = (
        sum(getattr(episode, name) for episode in episodes) / len(episodes) for name in ("sampled", "tokens", "tools_s")
    )
    return TypicalEpisode(sampled=round(sampled), tokens=round(tokens), tools_s=tools_s)


def balanced_rate(rates: Rates, sizes: Sizes) -> float:
    """Return the trajectories per second if neither engines nor learner ever waited for the other: the smaller of their
    two mean rates. The age bound still limits the number of running episodes."""
    episode = _mean_episode(rates)
    running = min(sizes.engines * sizes.concurrency, sizes.admitted)
    # The time of an episode depends on the number of requests of its engine. That number depends on the time that
    # episodes spend in the engine. So each is computed from the other, until both hardly change.
    generate_s = 0.0
    for _ in range(ROUNDS):
        share = generate_s / (generate_s + episode.tools_s) if generate_s + episode.tools_s else 1.0
        requests = max(1.0, running * share / sizes.engines)
        generate_s = (generate_s + episode.sampled * (rates.pass_s + rates.request_s * requests)) / 2
    step_s = rates.step_s + rates.publish_s / sizes.publish_every
    step_s += rates.token_s * episode.tokens * sizes.batch_size / sizes.learner_gpus
    return min(running / (generate_s + episode.tools_s), sizes.batch_size / step_s if step_s else float("inf"))
