"""Simulates two ways to waste fewer tokens: train the oldest groups first, and play fewer episodes while groups wait.

A simulation around the real replay (`asyncrl.capacity`) runs the workload of `benchmarks.gpu_loop` on two engines, at
rates like those of 0.6B models on H100s. The learner `fast` is as fast as measured. The learner `slow` takes about
three times as long, so the engines are ahead of it. Every setting gets the same episodes.

    python -m benchmarks.pace
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from asyncrl.capacity.description import Rates, RunDescription, Sizes, TypicalEpisode
from asyncrl.capacity.simulation import Forecast, simulate
from benchmarks.loop_workload import Workload
from benchmarks.record import write_result

TASKS, MEMBERS = 400, 8
LEARNERS = {"fast": 2.4e-5, "slow": 8e-5}
"""Maps each learner to the seconds in which it trains a token."""
SETTINGS: dict[str, dict[str, Any]] = {
    "fifo, all": {"sampler": "fifo", "spare_batches": None},
    "oldest, all": {"sampler": "oldest", "spare_batches": None},
    "oldest, paced": {"sampler": "oldest", "spare_batches": 0.5},
}
FIRST, STEPS = 30, 50


def episodes(workload: Workload, members: int = MEMBERS) -> Iterator[list[TypicalEpisode]]:
    """The episodes of each task."""
    for task in range(TASKS):
        yield [_episode(workload, f"{task}.{member}") for member in range(members)]


def _episode(workload: Workload, name: str) -> TypicalEpisode:
    turns = workload.episode(name)
    dice = random.Random(name)
    sampled = sum(_length(turn.tokens, workload.mean_turn, dice) for turn in turns)
    observed = sum(turn.message for turn in turns[:-1])
    waits = sum(turn.wait_s for turn in turns[:-1])
    return TypicalEpisode(sampled, sampled + observed + workload.prompt_tokens, len(turns), waits)


def _length(most: int, mean: float | None, dice: random.Random) -> int:
    """The tokens of a turn with at most `most` tokens. With a mean, the policy ends turns with the same probability at
    each token."""
    return most if mean is None else min(most, 1 + int(dice.expovariate(-math.log1p(-1 / mean))))


def run(learner: str, max_lag: int, setting: str) -> Forecast:
    rates = Rates(
        tasks=list(episodes(Workload.named("heavy"))),
        pass_s=4e-3,
        request_s=5e-5,
        token_s=LEARNERS[learner],
        step_s=0.3,
        publish_s=0.3,
        switch_s=0.1,
        label_s=1e-4,
    )
    sizes = Sizes(
        engines=2,
        concurrency=64 * (max_lag + 1),
        batch_size=64,
        group_size=MEMBERS,
        max_lag=max_lag,
        masks_old=False,
    )
    return simulate(RunDescription(rates, replace(sizes, **SETTINGS[setting])), STEPS, FIRST)


def described(learner: str, max_lag: int, setting: str) -> dict[str, Any]:
    found = run(learner, max_lag, setting)
    return {
        "learner": learner,
        "max_lag": max_lag,
        "setting": setting,
        "samples_per_s": found.trajectories_per_s,
        "tokens_per_s": found.tokens_per_s,
        "learner_idle": found.learner_idle,
        "engine_idle": found.engine_idle,
        "thrown_away": found.discarded,
        "mean_length": {end: round(each["length"], 1) for end, each in found.decided.items()},
        "chosen_by": found.biased,
        "mean_lag": sum(lag * share for lag, share in found.lags.items()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[2, 4, 8], help="age bounds")
    asked = parser.parse_args()
    rows = [
        described(learner, max_lag, setting) for learner in LEARNERS for max_lag in asked.lags for setting in SETTINGS
    ]
    write_result("pace", {"first_steps": FIRST, "steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
