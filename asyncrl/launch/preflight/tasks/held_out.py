"""Warns of held-out tasks that are also training tasks: their results show memory, and not what the policy can do."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec
import xxhash

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile

log = logging.getLogger("asyncrl.train")

COMPARED = 20_000
"""The maximum number of tasks of a file that are compared. They take about a second."""


def warn_of_shared_tasks(train: Sequence[str], held_out: Sequence[str] | None, files: Sequence[TaskFile]) -> None:
    """Log a warning if `data.eval` names the sources of `data.train`, or if tasks of both have the same prompt.

    `files` has the tasks of `data.train`, followed by those of `data.eval` if it names other sources. Of a large file,
    only COMPARED tasks are read, evenly spread over its rows. A prompt that several held-out tasks have is not
    compared, since something else tells these tasks apart, such as their environment.
    """
    if held_out is not None and list(held_out) == list(train):
        log.warning(
            "data.eval names the same sources as data.train: held-out tasks are training tasks, so evaluations show "
            "memory, too. Name other tasks, or leave data.eval out with learner.eval_every=0"
        )
        return
    if not held_out or len(files) < 2:
        return
    training, compared = files
    counts = Counter(_digests(compared))
    known = {digest for digest, count in counts.items() if count == 1}
    if not (shared := known.intersection(_digests(training))):
        return
    read = min(COMPARED, len(compared))
    log.warning(
        "data.eval: %d of %d held-out tasks have the prompt of a training task%s, so evaluations show memory, too. "
        "Leave these tasks out of one of the two",
        *(len(shared), read, _note(training, compared)),
    )


def _note(*files: TaskFile) -> str:
    large = any(len(file) > COMPARED for file in files)
    return f" (only {COMPARED} rows of a file are compared, so there may be more)" if large else ""


def _digests(tasks: TaskFile) -> Iterator[int]:
    """Yield a digest of the prompt of each compared task."""
    for task in tasks.spread(COMPARED):
        yield xxhash.xxh3_64_intdigest(msgspec.json.encode(task.messages))
