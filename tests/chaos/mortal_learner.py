"""A learner that is killed while its run is solved."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from torch import Tensor

from asyncrl.algorithms.batch import Episodes
from asyncrl.algorithms.rewards.base import Reward
from asyncrl.errors import TasksSolvedError
from asyncrl.learner import run
from asyncrl.learner.loop import Learner
from asyncrl.machine.process import WORKER_VARIABLE
from asyncrl.replay.client import shards

FOLDER_VARIABLE = "ASYNCRL_TEST_DEATHS"
"""A folder with a file for each moment at which the learner is to be killed once."""
SHARD, PLAN, SAVED, EXPORTED = MOMENTS = ("shard", "plan", "saved", "exported")
"""The moments: the first shard has said that its tasks are solved, and the other has not; all shards have; the last
steps are saved; the model is exported."""


class Unchanged(Reward):
    """The rewards as they are. The learner loads this class, so that its module gets into the learner's process."""

    name = "unchanged"

    def __call__(self, episodes: Episodes) -> Tensor:
        return episodes.reward


def _die(moment: str) -> None:
    """Kill this process, if it has not died at this moment before."""
    order = Path(os.environ[FOLDER_VARIABLE]) / moment
    if order.exists():
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)


def _dying(function: Callable[..., Any], before: str = "", after: str = "") -> Callable[..., Any]:
    """The function, with deaths before or after its call."""

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        if before:
            _die(before)
        result = function(*given, **named)
        if after:
            _die(after)
        return result

    return call


def _dying_of_one(part: Callable[..., Any]) -> Callable[..., Any]:
    """A shard's part of a plan, with a death once a shard is solved. The other one then is not: see the rule
    `solved`."""

    @wraps(part)
    def call(*given: Any) -> Any:
        found = part(*given)
        if isinstance(found, TasksSolvedError):
            _die(SHARD)
        return found

    return call


if os.environ.get(WORKER_VARIABLE, "").startswith("learner"):
    shards._part = _dying_of_one(shards._part)
    Learner._save_early = _dying(Learner._save_early, before=PLAN)  # type: ignore[method-assign]
    Learner._finish = _dying(Learner._finish, after=SAVED)  # type: ignore[method-assign]
    run._export = _dying(run._export, after=EXPORTED)
