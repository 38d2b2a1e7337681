"""Compares asynchronous with synchronous training when some tool calls are slow.

Trains the demo's policy on the demo's task at several age bounds. The calculator's delays are heavy-tailed (Pareto).
`max_lag = 0` is synchronous training with the same code. Every ratio is to the first age bound, which is 0 by default.

    python -m benchmarks.async_vs_sync --steps 30 --max-lag 0 1 2 4 8
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from asyncrl.commands.demo.prepare import CACHE, SEED, prepare_demo, prepared_overrides
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from benchmarks.record import write_result

RUNS = Path("runs/async_vs_sync")
FIRST = 2


def run(max_lag: int, steps: int, overrides: list[str]) -> dict[str, Any]:
    """Train `steps` steps at one age bound. The figures leave out the first FIRST steps."""
    name = f"lag-{max_lag}"
    shutil.rmtree(RUNS / name, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "asyncrl", "train", *overrides),
        *(f"run.dir={RUNS}", f"run.name={name}", f"replay.max_lag={max_lag}", f"learner.steps={steps}"),
        *(
            "learner.eval_every=0",
            "actor.tools=[asyncrl.commands.demo.SlowStepCalculator]",
            "network.replay_port=0",
            "network.weights_port=0",
        ),
    ]
    subprocess.run(command, check=True, capture_output=True)
    return figures(max_lag)


def figures(max_lag: int) -> dict[str, Any]:
    """Compute the figures of the run at one age bound from its metrics."""
    name = f"lag-{max_lag}"
    learner = [line for line in read_lines(metrics_file(RUNS / name, "learner")) if "reward/mean" in line]
    actors = read_lines(metrics_file(RUNS / name, "actor-0"))
    steady = learner[FIRST:]
    seconds = learner[-1]["time"] - learner[FIRST - 1]["time"]
    histogram: dict[int, float] = {}
    for line in steady:
        for lag in range(int(line["lag/max"]) + 1):
            histogram[lag] = histogram.get(lag, 0.0) + line[f"lag/{lag}"]
    total = sum(histogram.values())
    return {
        "max_lag": max_lag,
        "samples_per_s": (learner[-1]["trajectories_trained"] - learner[FIRST - 1]["trajectories_trained"]) / seconds,
        "learner_idle": statistics.mean(line["idle"] for line in steady),
        "engine_idle": actors[-1]["idle_seconds"] / actors[-1]["seconds"],
        "max_lag_seen": max(line["lag/max"] for line in steady),
        "lag_histogram": {lag: count / total for lag, count in histogram.items() if count},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--max-lag", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    arguments = parser.parse_args()
    overrides = prepared_overrides(prepare_demo(CACHE, SEED, lambda text: print(text, file=sys.stderr)))
    rows = []
    for max_lag in arguments.max_lag:
        rows.append(run(max_lag, arguments.steps, overrides))
        row = rows[-1]
        row["ratio_to_first"] = row["samples_per_s"] / rows[0]["samples_per_s"]
        print(
            f"max_lag {max_lag}: {row['samples_per_s']:6.1f} samples/s ({row['ratio_to_first']:.2f}x)  "
            f"learner idle {row['learner_idle']:.0%}  engine idle {row['engine_idle']:.0%}  "
            f"lag {json.dumps({k: round(v, 2) for k, v in row['lag_histogram'].items()})}"
        )
    print(f"written to {write_result('async_vs_sync', rows)}")


if __name__ == "__main__":
    main()
