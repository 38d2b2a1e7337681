"""Measures how evenly sequences are dealt to ranks and passes, and the time of dealing.

The lengths are heavy-tailed (log-normal, 64 to 16,384 tokens), a pass has at most 16,384 tokens, and costs are those of
a Qwen3-0.6B. Each schedule has three figures: the passes; `rank`, the excess of the most expensive rank's cost over the
mean; and `lockstep`, the excess if the ranks wait for each other after each pass. The comparison is Karmarkar-Karp
followed by first-fit-decreasing. Times are processor time, the least of three.

    python -m benchmarks.packing
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from asyncrl.learner.batch.bins import first_fit_decreasing, karmarkar_karp
from asyncrl.learner.batch.schedule import Passes, schedule
from asyncrl.modelling.flops import ForwardFlops
from benchmarks.record import write_result

FLOPS = ForwardFlops(per_token=2 * 596e6, per_pair={None: 28 * 4.0 * 16 * 128})
LIMIT = 16384


def measured(parts: Sequence[Passes], costs: Sequence[float]) -> dict[str, float]:
    """The passes, and the excess cost of the most expensive rank and of the passes in lockstep over the mean rank."""
    passes = max(map(len, parts))
    by_rank = [[sum(costs[i] for i in each) for each in rank] + [0.0] * (passes - len(rank)) for rank in parts]
    mean = sum(costs) / len(parts)
    lockstep = sum(map(max, zip(*by_rank, strict=True)))
    return {"passes": passes, "rank": max(map(sum, by_rank)) / mean - 1, "lockstep": lockstep / mean - 1}


def main() -> None:
    rows = []
    print(f"{'':24}{'ms':>6}{'passes':>8}{'rank':>7}{'lockstep':>10}   Karmarkar-Karp, first fit")
    for count in (64, 256, 1024, 4096):
        lengths = np.random.default_rng(0).lognormal(6.5, 1.0, count).clip(64, LIMIT).astype(int).tolist()
        costs = FLOPS(lengths).tolist()
        for ranks in (1, 2, 8, 32):
            times = []
            for _ in range(3):
                started = time.process_time()
                (parts,) = schedule(lengths, costs, ranks, 1, LIMIT)
                times.append(1e3 * (time.process_time() - started))
            found = measured(parts, costs)
            decreasing = sorted(range(count), key=lambda i: -lengths[i])
            shards = [sorted(each, key=lambda i: -lengths[i]) for each in karmarkar_karp(costs, decreasing, ranks)]
            other = measured([first_fit_decreasing(lengths, shard, LIMIT) for shard in shards], costs)
            rows.append({"lengths": count, "ranks": ranks, "ms": min(times), "schedule": found, "reference": other})
            texts = [f"{each['passes']:8}{each['rank']:7.1%}{each['lockstep']:10.1%}" for each in (found, other)]
            print(f"{f'{count} lengths, {ranks} ranks':24}{min(times):6.1f}{texts[0]}{texts[1]}")
    write_result("packing", rows)


if __name__ == "__main__":
    main()
