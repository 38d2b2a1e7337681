"""Counts the failures of a step over restarts of the learner, so that the error can say how to continue."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from asyncrl.errors import AsyncrlError, StoppedError
from asyncrl.machine.files import write_whole

logger = logging.getLogger(__name__)

TIMES = 3


class StepFailedError(AsyncrlError):
    """The training of one step has failed several times in the same way."""


class StepFailures:
    """Counts the failures of one rank in the file `path`."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """Count the errors of the block. If errors of the same type come in a row at the same step, the third and all
        later ones become a StepFailedError. Its message tells how to skip the plan."""
        try:
            yield
        except StoppedError:
            raise
        except Exception as error:
            times = self._count(step, type(error).__name__)
            if times < TIMES:
                raise
            logger.exception("step %d has failed %d times", step, times)
            raise StepFailedError(
                f"step {step} has failed {times} times, at last with {type(error).__name__}: {error}\n"
                "The recorded plan of a step never changes. If its data are the cause, `asyncrl inspect skip-plan "
                f"{step} --reason TEXT --run RUN` makes the step train nothing; then start the run again."
            ) from error
        # A resumed learner trains earlier steps first, and their success does not end the count of the failed step.
        if self._last().get("step") == step:
            self._path.unlink(missing_ok=True)

    def _last(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return dict(json.loads(self._path.read_text()))
        return {}

    def _count(self, step: int, kind: str) -> int:
        last = self._last()
        times = last["times"] + 1 if (last.get("step"), last.get("kind")) == (step, kind) else 1
        try:
            write_whole(self._path, json.dumps({"step": step, "kind": kind, "times": times}))
        except OSError as error:
            logger.warning("the failure of step %d is not counted: %s", step, error)
        return times
