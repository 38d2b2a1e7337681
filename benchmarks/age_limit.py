"""Computes how long steps of equal length must be if only a small share of the sampled tokens may become too old.

    python -m benchmarks.age_limit --share 0.02

It takes the heavy-tailed episodes of `benchmarks.gpu_loop`, in groups whose members begin together and are trained
together. The engines make the same number of tokens a second for each request. A token is too old if its group is
trained more than `max_lag` versions after it was sampled.

Each group is trained at the best moment: as soon as its last member has ended, just before the next version is
published. The result is the shortest step with which at most the given share is too old, for each speed of the engines
and each age bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.loop_runs import LARGE
from benchmarks.loop_workload import Workload
from benchmarks.record import write_result

GROUPS = 2000
STEPS_S = np.round(np.arange(0.5, 60.0, 0.05), 2)
"""The lengths of a step that are tried, in seconds."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The turns of many groups, one element each: the seconds from the begin of the group until the turn begins and
    until it ends, its tokens, and the seconds until the last turn of its group ends."""

    begins: NDArray[np.float64]
    ends: NDArray[np.float64]
    tokens: NDArray[np.float64]
    group_ends: NDArray[np.float64]

    def too_old(self, step_s: float, max_lag: int) -> float:
        """The share of the tokens that are too old with steps of this length."""
        oldest_trained = self.group_ends - (max_lag + 1) * step_s
        before = np.clip((oldest_trained - self.begins) / (self.ends - self.begins), 0.0, 1.0)
        return float((before * self.tokens).sum() / self.tokens.sum())

    def shortest_step(self, max_lag: int, share: float) -> float | None:
        """The shortest of STEPS_S with which at most `share` is too old. None: all are too short."""
        return next((float(each) for each in STEPS_S if self.too_old(each, max_lag) <= share), None)


def drawn(workload: Workload, group: int, tokens_per_s: float) -> Groups:
    """GROUPS groups of `group` members, on engines with this speed for each request."""
    rows: list[tuple[float, float, float]] = []
    ends: list[float] = []
    for number in range(GROUPS):
        of_group = []
        for member in range(group):
            now = 0.0
            for turn in workload.episode(f"{number}.{member}"):
                of_group.append((now, now + turn.tokens / tokens_per_s, turn.tokens))
                now += turn.tokens / tokens_per_s + turn.wait_s
        rows += of_group
        ends += [max(end for _, end, _ in of_group)] * len(of_group)
    begins, until, tokens = np.asarray(rows, np.float64).T
    return Groups(begins, until, tokens, np.asarray(ends))


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--share", type=float, default=0.02, help="tokens that may be too old; default: %(default)s")
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 2, 4, 8], help="age bounds; default: 1 2 4 8")
    parser.add_argument(
        "--tokens-per-s",
        type=float,
        nargs="+",
        default=[110.0, 200.0, 300.0],
        help="speeds of the engines, for each request; default: 110 200 300",
    )
    asked = parser.parse_args(words)
    scale, workload = LARGE["heavy"], Workload.named("heavy")
    rows = []
    for speed in asked.tokens_per_s:
        groups = drawn(workload, scale.group, speed)
        for lag in asked.lags:
            step_s = groups.shortest_step(lag, asked.share)
            samples = None if step_s is None else round(scale.batch / step_s, 2)
            rows.append({"tokens_per_s": speed, "max_lag": lag, "step_s": step_s, "samples_per_s": samples})
            print(f"{speed:g} tokens/s, max_lag {lag}: steps of {step_s} s or more, at most {samples} samples/s")
    print(write_result("age_limit", {"share": asked.share, "rows": rows}))


if __name__ == "__main__":
    main()
