"""`python -m tests.learner.killed_while_saving FOLDER`: a process that saves on and on is killed at many moments.

After each kill the next process resumes. No checkpoint that was reported may be lost, and none may have what the steps
after its copy changed.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from itertools import count
from pathlib import Path

import torch
from torch import nn

from asyncrl.config.schema import LearnerConfig
from asyncrl.learner.checkpoint.checkpoint import Checkpoints
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.ranks.ranks import Ranks

KILLS = 12


def make(value: float) -> dict[str, Trainable[nn.Linear]]:
    """A model whose weights and moments are all `value`."""
    model = Trainable(nn.Linear(1500, 1000), 0.1, LearnerConfig())
    model.begin_moments(dict(model.module.named_parameters()))
    fill(model, value)
    return {"policy": model}


@torch.no_grad()
def fill(model: Trainable[nn.Linear], value: float) -> None:
    for name, parameter in model.module.named_parameters():
        for each in (parameter, model.moments()[name]["exp_avg"]):
            each.fill_(value)


def values(model: Trainable[nn.Linear]) -> set[float]:
    found = [(each, model.moments()[name]["exp_avg"]) for name, each in model.module.named_parameters()]
    return {number for pair in found for each in pair for number in each.unique().tolist()}


def save_on_and_on(folder: Path, reports: int) -> None:
    models = make(-1)
    checkpoints = Checkpoints(folder, 2, Ranks.alone())
    done = checkpoints.restore(models) or Progress()
    for step in count(done.step + 1):
        fill(models["policy"], step)
        checkpoints.save(Progress(step=step), models)
        fill(models["policy"], -step)
        checkpoints.wait()
        os.write(reports, f"{checkpoints.completed()}\n".encode())


def kill_once(folder: Path, delay: float) -> int:
    """Kill a process `delay` seconds after it reported its first checkpoint. Returns the step that it reported last."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        save_on_and_on(folder, writer)
    os.close(writer)
    with os.fdopen(reader) as reports:
        reported = reports.readline()
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return int((reported + reports.read()).split()[-1])


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    moments = random.Random(0)
    for _ in range(KILLS):
        last = kill_once(folder, moments.uniform(0, 0.2))
        models = make(-1)
        resumed = Checkpoints(folder, 2, Ranks.alone()).restore(models) or Progress()
        assert resumed.step >= last, (resumed.step, last)
        assert values(models["policy"]) == {resumed.step}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
