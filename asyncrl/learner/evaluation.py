"""Evaluations on the held-out tasks: asked for at some steps, answered by the fleet while training goes on."""

from __future__ import annotations

import threading

from asyncrl.errors import StoppedError
from asyncrl.learner.ports import Replay
from asyncrl.observe.metrics import Metrics


class Evaluations:
    """Asks `replay` and logs answers at the step whose weights were measured. `pending` is version by step."""

    def __init__(self, replay: Replay, metrics: Metrics, pending: dict[int, int], stop: threading.Event) -> None:
        self._replay = replay
        self._metrics = metrics
        self._stop = stop
        self.pending = pending

    def ask(self, step: int, version: int) -> None:
        """Have `version`, the weights after `step` steps, measured."""
        self._replay.evaluate(version)
        self.pending[step] = version

    def collect(self, wait: bool) -> None:
        """Log the answers that are there, or wait for all. Raises StoppedError."""
        for step, version in list(self.pending.items()):
            while (result := self._replay.evaluation(version, wait)) is None and wait:
                if self._stop.is_set():
                    raise StoppedError("stopped while waiting for an evaluation")
            if result is not None:
                values = {f"eval/{name}": float(value) for name, value in result.items()}
                self._metrics.log(step, {**values, "eval/version": float(version)})
                del self.pending[step]
