"""Measures whether a process reward model in addition to the outcome saves samples.

The task and the policy are the demo's. Every pair of runs has the same seed, data and budget, and differs only in the
weight of the process score. The result is the number of trajectories that were trained until greedy accuracy on the
held-out tasks reached the target, measured every other step.

    python -m benchmarks.process_rewards --seeds 0 1 2
"""

from __future__ import annotations

import argparse
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

RUNS = Path("runs/process_rewards")
BATCH = 64


def run(seed: int, weight: float, steps: int, target: float, overrides: list[str]) -> dict[str, Any]:
    """Train once. Returns the accuracy by step, and the number of trajectories trained until the target."""
    name = f"seed-{seed}-weight-{weight}"
    shutil.rmtree(RUNS / name, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "asyncrl", "train", *overrides),
        *(f"run.dir={RUNS}", f"run.name={name}", f"run.seed={seed}", f"scoring.shaping.process_weight={weight}"),
        *(
            f"learner.steps={steps}",
            f"learner.checkpoint_every={steps}",
            "learner.eval_every=2",
            "learner.export=false",
        ),
    ]
    subprocess.run(command, check=True, capture_output=True)
    lines = read_lines(metrics_file(RUNS / name, "evaluation"))
    accuracies = {int(line["step"]): line["eval/accuracy"] for line in lines}
    reached = [step for step, accuracy in sorted(accuracies.items()) if accuracy >= target]
    samples = reached[0] * BATCH if reached else None
    return {"seed": seed, "process_weight": weight, "samples_to_target": samples, "accuracy": accuracies}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--weight", type=float, default=0.5, help="weight of the process score in the second run of a pair"
    )
    parser.add_argument("--steps", type=int, default=14)
    parser.add_argument("--target", type=float, default=0.9)
    arguments = parser.parse_args()
    overrides = prepared_overrides(prepare_demo(CACHE, SEED, lambda text: print(text, file=sys.stderr)))
    rows = []
    for seed in arguments.seeds:
        for weight in (0.0, arguments.weight):
            rows.append(run(seed, weight, arguments.steps, arguments.target, overrides))
            print(f"seed {seed}, process weight {weight}: {rows[-1]['samples_to_target']} trajectories to the target")
    ends = {
        weight: statistics.mean(
            row["samples_to_target"] or (arguments.steps + 2) * BATCH for row in rows if row["process_weight"] == weight
        )
        for weight in (0.0, arguments.weight)
    }
    result = {"target": arguments.target, "runs": rows, "mean_samples_to_target": ends}
    print(f"written to {write_result('process_rewards', result)}: {ends}")


if __name__ == "__main__":
    main()
