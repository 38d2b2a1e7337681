"""Compares the training of the demo's task with TRL's GRPOTrainer on the same machine.

Both train the demo's policy in float32 on its tasks, with the same tool, the same rule, 8 groups of 8 samples a step
and a learning rate of 1e-4. TRL alternates between generation and training; asyncrl does both at the same time, with
lags of up to two versions. Runs alternate, and their first steps do not count. TRL needs an environment of its own:

    python3 -m venv trl-venv && trl-venv/bin/pip install 'trl>=1.16' jmespath
    python -m benchmarks.versus_trl --trl-python trl-venv/bin/python
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from asyncrl.commands.demo.prepare import CACHE, SEED, Prepared, prepare_demo, prepared_overrides
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.lines import read_lines
from benchmarks.record import write_result

RUNS = Path("runs/versus_trl")
BATCH = 64
SAMPLE_S = 1.0


def timed(command: Sequence[str], log: Path) -> tuple[str, list[tuple[float, float]]]:
    """The output of a command, and the processor seconds that it and its children had used at several times."""
    samples: list[tuple[float, float]] = []
    with log.open("w") as errors, tempfile.TemporaryFile("w+") as output:
        with subprocess.Popen(command, stdout=output, stderr=errors) as process:
            while process.poll() is None:
                samples.append((time.time(), processor_seconds(process.pid)))
                time.sleep(SAMPLE_S)
        if process.returncode:
            raise SystemExit(f"{command[0]} ended with status {process.returncode}: see {log}")
        output.seek(0)
        return output.read(), samples


def processor_seconds(pid: int) -> float:
    total = 0.0
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return total
    for each in processes:
        try:
            used = each.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total += used.user + used.system
    return total


def run_asyncrl(steps: int, prepared: Prepared, changes: Sequence[str]) -> tuple[list[dict[str, Any]], Any]:
    shutil.rmtree(RUNS / "asyncrl", ignore_errors=True)
    command = [
        *(sys.executable, "-m", "asyncrl", "train", *prepared_overrides(prepared)),
        *(f"run.dir={RUNS}", "run.name=asyncrl", f"learner.steps={steps}", "learner.eval_every=0"),
        *("scoring.prm.path=null", "scoring.shaping.process_weight=0", *changes),
    ]
    _, samples = timed(command, RUNS / "asyncrl.log")
    rows = read_lines(metrics_file(RUNS / "asyncrl", "learner"))
    return [{"time": row["time"], "reward": row["outcome/mean"]} for row in rows if "outcome/mean" in row], samples


def run_trl(steps: int, prepared: Prepared, python: str) -> tuple[list[dict[str, Any]], Any]:
    script = Path(__file__).with_name("trl_grpo.py")
    command = [
        *(python, str(script), "--model", str(prepared.model), "--train", str(prepared.train)),
        *("--out", str(RUNS / "trl"), "--steps", str(steps)),
    ]
    output, samples = timed(command, RUNS / "trl.log")
    return [json.loads(line) for line in output.splitlines()], samples


def figures(rows: Sequence[dict[str, Any]], samples: Sequence[tuple[float, float]], skipped: int) -> dict[str, float]:
    """The rates of one run without its first steps, and the mean rewards of its first and its last step."""
    if len(rows) <= skipped:
        raise SystemExit(f"only {len(rows)} steps were trained")
    first, last = rows[skipped - 1]["time"], rows[-1]["time"]
    count = BATCH * (len(rows) - skipped)
    times, seconds = zip(*samples, strict=True)
    before, after = np.interp([first, last], times, seconds)
    return {
        "samples_per_s": count / (last - first),
        "processor_ms_per_sample": 1e3 * float(after - before) / count,
        "first_reward": rows[0]["reward"],
        "last_reward": rows[-1]["reward"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="Python of the environment that has TRL")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default 3)")
    parser.add_argument("--steps", type=int, default=24, help="steps of each run (default 24)")
    parser.add_argument("--skip", type=int, default=5, help="first steps of each run that no rate counts (default 5)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes of asyncrl's configuration")
    arguments = parser.parse_args()
    if shutil.which(arguments.trl_python) is None:
        parser.error(f"--trl-python {arguments.trl_python}: there is no such program")
    if not 1 <= arguments.skip < arguments.steps:
        parser.error(f"--skip {arguments.skip}: leave out at least one of the {arguments.steps} steps, and not all")
    prepared = prepare_demo(CACHE, SEED, lambda text: print(text, file=sys.stderr))
    RUNS.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[dict[str, float]]] = {"asyncrl": [], "trl": []}
    for number in range(1, arguments.rounds + 1):
        for name, run in (
            ("asyncrl", partial(run_asyncrl, arguments.steps, prepared, arguments.set)),
            ("trl", partial(run_trl, arguments.steps, prepared, arguments.trl_python)),
        ):
            row = figures(*run(), arguments.skip)
            rows[name].append(row)
            print(
                f"round {number}  {name:<8}", "  ".join(f"{key} {value:.3g}" for key, value in row.items()), flush=True
            )
    median = {
        name: {key: statistics.median(row[key] for row in each) for key in each[0]} for name, each in rows.items()
    }
    ours, theirs = median["asyncrl"], median["trl"]
    ratio = ours["samples_per_s"] / theirs["samples_per_s"]
    print(
        f"medians: {ours['samples_per_s']:.1f} against {theirs['samples_per_s']:.1f} samples/s: {ratio:.2f} times TRL"
    )
    print(f"written to {write_result('versus_trl', {'ratio': ratio, 'median': median, 'runs': rows})}")


if __name__ == "__main__":
    main()
