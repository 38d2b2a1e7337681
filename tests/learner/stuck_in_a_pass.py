"""Run as one rank or two by test_stopping.py: a small training whose third step never ends on the last rank, in a call
into C that no signal interrupts. It is stuck in a pass, before the other rank's pass can end or after, or while the
weights after the step are published, or never."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import torch

from asyncrl.config.exits import EXIT_STOPPED
from asyncrl.config.load import log_to_stderr
from asyncrl.errors import StoppedError
from asyncrl.learner.publishing import Publishing
from asyncrl.learner.ranks.joining import joined
from asyncrl.learner.ranks.stopping import Stopping
from asyncrl.learner.trainer import Trainer
from asyncrl.machine import process
from asyncrl.observe.sinks import JsonLines
from tests.learner.support import Run, make_config

STUCK_STEP = 2


def stick(folder: Path) -> None:
    (folder / "stuck").touch()
    lock = ctypes.create_string_buffer(256)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


def main(model: str, folder: Path, where: str) -> None:
    torch.set_num_threads(1)
    log_to_stderr()
    stop = process.stop_on_signals()
    process.set_at_once(stop)
    stopping = Stopping()
    with stopping.watched(stop, patience_s=1.0), joined(stopping=stopping) as ranks:
        run = Run(make_config(Path(model), folder, steps=4, checkpoint_every=10, micro_tokens=40))
        run.stop = stop
        run.metrics = JsonLines(folder / "metrics.jsonl")
        forward, steps = Trainer._backward, [-1]
        learn = Trainer.learn

        def count(self, step, *arguments):
            steps[0] = step
            return learn(self, step, *arguments)

        def backward(self, *arguments):
            sticks = steps[0] == STUCK_STEP and ranks.rank == ranks.size - 1
            if sticks and where == "before":
                stick(folder)
            sums = forward(self, *arguments)
            if sticks and where == "after":
                stick(folder)
            return sums

        push = Publishing._push

        def publish(self, version, *arguments):
            push(self, version, *arguments)
            if where == "publish" and version == STUCK_STEP + 1 and ranks.rank == ranks.size - 1:
                stick(folder)

        Trainer.learn, Trainer._backward, Publishing._push = count, backward, publish
        run.train(ranks)
        if ranks.rank == 0:
            torch.save(run.weights, folder / "weights.pt")


if __name__ == "__main__":
    try:
        main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
    except StoppedError:
        sys.exit(EXIT_STOPPED)
