"""Simulates treatments of groups that become too old: throw them away, wait for them, mask their old tokens, or both.

A simulation around the real replay (`asyncrl.capacity`) runs the workloads of `benchmarks.gpu_loop` on two engines. It
has the same numbers of episodes at once, batches and groups, and rates like those of 0.6B models on H100s. All
treatments get the same episodes. With `both`, a step waits for a few seconds, and then masks.

A new version reaches the engines after 0.4 s, as on two H200 without other work; `--transfer-s` sets another time.
`--request-s` sets the time that each request adds to a pass of an engine: 1.25e-4 makes engines as slow as two SGLang
servers were with short turns.

    python -m benchmarks.old_groups
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from msgspec.structs import replace

from asyncrl.capacity.description import Rates, RunDescription, Sizes
from asyncrl.capacity.simulation import simulate
from benchmarks.loop_runs import LARGE, OLD_GROUPS_OPTIONS
from benchmarks.loop_workload import Workload
from benchmarks.pace import LEARNERS, episodes
from benchmarks.record import write_result

STEPS = {"heavy": (30, 50), "short": (12, 18)}
"""The steps that fill the run, and the measured steps, of each workload."""
LAGS = [1, 2, 4, 8]
TRANSFER_S = 0.4
REQUEST_S = 5e-5
COLUMNS = ("workload", "max_lag", "treatment", "samples_per_s", "trained_tokens_per_s", "thrown_away", "mean_lag")


def run(
    workload: str, max_lag: int, treatment: str, request_s: float = REQUEST_S, transfer_s: float = TRANSFER_S
) -> dict[str, Any]:
    """The forecast for a workload as a row of the result."""
    scale = LARGE[workload]
    rates = Rates(
        tasks=list(episodes(Workload.named(workload), scale.group)),
        pass_s=4e-3,
        request_s=request_s,
        token_s=LEARNERS["fast"],
        step_s=0.3,
        publish_s=0.3,
        transfer_s=transfer_s,
        switch_s=0.1,
        label_s=1e-4,
    )
    sizes = Sizes(
        engines=2, concurrency=scale.at_once // 2, batch_size=scale.batch, group_size=scale.group, max_lag=max_lag
    )
    first, steps = STEPS[workload]
    options = OLD_GROUPS_OPTIONS[treatment]
    treated = replace(sizes, wait_s=options.wait_s, masks_old=options.mask)
    found = simulate(RunDescription(rates, treated), steps, first)
    return {
        "workload": workload,
        "max_lag": max_lag,
        "treatment": treatment,
        "samples_per_s": round(found.trajectories_per_s, 3),
        "trained_tokens_per_s": round(found.tokens_per_s, 1),
        "thrown_away": round(found.discarded, 4),
        "mean_lag": round(sum(lag * share for lag, share in found.lags.items()), 3),
        "learner_idle": round(found.learner_idle, 3),
        "engine_idle": round(found.engine_idle, 3),
        "mean_length": {end: round(each["length"], 1) for end, each in found.decided.items()},
        "chosen_by": found.biased,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--lags", type=int, nargs="+", default=LAGS, help="age bounds; with others than the default nothing is written"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--request-s", type=float, default=REQUEST_S, help="default: %(default)s")
    parser.add_argument("--transfer-s", type=float, default=TRANSFER_S, help="default: %(default)s")
    asked = parser.parse_args()
    slow = "" if asked.request_s == REQUEST_S else f"-{asked.request_s:g}"
    slow += "" if asked.transfer_s == TRANSFER_S else f"-transfer-{asked.transfer_s:g}"
    treatments = {name: asdict(options) for name, options in OLD_GROUPS_OPTIONS.items()}
    for workload in asked.workloads:
        rows = []
        for max_lag in asked.lags:
            for treatment in OLD_GROUPS_OPTIONS:
                rows.append(run(workload, max_lag, treatment, asked.request_s, asked.transfer_s))
                # The simulation takes minutes, so each row is shown when it is known.
                print(*(rows[-1][name] for name in COLUMNS), rows[-1]["mean_length"], rows[-1]["chosen_by"], flush=True)
        if asked.lags != LAGS:
            print(f"not written into benchmarks/results, since only {asked.lags} of {LAGS} were simulated")
            continue
        write_result(
            f"old_groups-{workload}{slow}",
            {"treatments": treatments, "transfer_s": asked.transfer_s, "steps": STEPS[workload], "rows": rows},
        )


if __name__ == "__main__":
    main()
