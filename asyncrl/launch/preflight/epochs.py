"""`learner.epochs`: computes the number of learner steps in which a run trains on all of its tasks for this number of
epochs."""

from __future__ import annotations

import logging
from fractions import Fraction
from math import ceil

from asyncrl.config.schema import LearnerConfig
from asyncrl.data.opening import RunTasks

log = logging.getLogger("asyncrl.train")


def count_steps(learner: LearnerConfig, shards: int, tasks: RunTasks) -> None:
    """Set `learner.steps` to the number of steps that `learner.epochs` needs, and `learner.epochs` to null. If both are
    null, set `learner.steps` to its default.

    A resumed run gets the same number, since it has the same tasks and batch size. Raises DataError: the training tasks
    cannot be read.
    """
    if learner.epochs is not None:
        rows = len(tasks.usable(tasks.data.train))
        steps = steps_of(learner, learner.epochs, rows, shards)
        log.info(
            "learner.epochs=%g of %d tasks are learner.steps=%d, each of %d groups (rounded up to %g epochs)",
            *(learner.epochs, rows, steps, learner.batch_size // learner.group_size),
            round(steps * (learner.batch_size // learner.group_size) / rows, 3),
        )
        learner.steps, learner.epochs = steps, None
    learner.steps = learner.total_steps


def steps_of(learner: LearnerConfig, epochs: float, rows: int, shards: int = 1) -> int:
    """Return the fewest steps after which every task was trained `epochs` times, if each group that is drawn is trained
    once.

    Each of the `shards` feeds its own share of the `rows` into its own share of a batch, so the shard that needs the
    most steps gives the result. The result is rounded up to a multiple of `publish_every`, because a run's number of
    steps must be such a multiple.
    """
    groups, wanted = learner.batch_size // learner.group_size, Fraction(str(epochs))
    slowest = max(
        wanted * len(range(shard, rows, shards)) / len(range(shard, groups, shards)) for shard in range(shards)
    )
    return ceil(slowest / learner.publish_every) * learner.publish_every
