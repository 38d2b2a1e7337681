"""A stand-in for `asyncrl train`: `python -m tests.benchmarks.studies.stand_in KEY=VALUE ...`.

It appends a line to the files `starts` and `gpus` in the folder of runs, then acts by the learning rate:

- at 1 it fails;
- at 2 it trains two of its four steps and waits to be stopped;
- at 3 and 4 it trains two steps, and ends as if it had been stopped: at 3 with an exit status, at 4 by a signal;
- at any other rate it trains all steps.

A run that has trained two steps trains the other two when it is started again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from itertools import count
from pathlib import Path

from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.runs.lines import read_lines

FAILS, WAITS, STOPPED, KILLED = 1.0, 2.0, 3.0, 4.0
STEPS = 4


def train(folder: Path, first: int, last: int) -> None:
    clock = count(10.0 * first).__next__
    roles = ("learner", "evaluation", "replay", "scoring-0")
    learner, evaluation, replay, scorer = (JsonLines(metrics_file(folder, role), clock) for role in roles)
    for step in range(first, last):
        lags = {"lag/max": step, "lag/mean": step / 2, "token_lag/mean": step / 4}
        seconds = {"seconds/step": 2.0, "idle": 0.5}
        values = {
            "entropy": 0.1 * step,
            "mismatch/ess": 1 - 0.1 * step,
            "mismatch/k3": 0.01 * step,
            "reward/mean": 0.1 * step,
        }
        learner.log(step, {**lags, **seconds, **values, "trajectories_trained": 8 * (step + 1)})
        replay.log(step, {"evicted": step})
        scorer.log(step, {"prm_agreement": 1 - 0.1 * step, "hack_alarms": step // 3})
        if step % 2:
            evaluation.log(step + 1, {"eval/accuracy": 0.2 * (step + 1)})


def main() -> None:
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    runs, lr = Path(words["run.dir"]), float(words["learner.lr"])
    folder = runs / words["run.name"]
    with (runs / "starts").open("a") as starts:
        starts.write(folder.name + "\n")
    with (runs / "gpus").open("a") as gpus:
        gpus.write(os.environ.get("CUDA_VISIBLE_DEVICES", "all") + "\n")
    if lr == FAILS:
        sys.exit("the loss is not finite")
    trained = len(read_lines(metrics_file(folder, "learner")))
    if lr in (WAITS, STOPPED, KILLED) and not trained:
        train(folder, 0, STEPS // 2)
        if lr == KILLED:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        if lr == WAITS:
            signal.sigwait({signal.SIGTERM})
        sys.exit(130)
    train(folder, trained, STEPS)
    (folder / "summary.json").write_text(json.dumps({"trajectories": {"trained": 8 * STEPS, "evicted": 5}}))


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    main()
