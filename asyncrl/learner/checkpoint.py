"""Checkpoints: any number of ranks may read what any other number wrote.

One is written aside under a name that nobody looks for, renamed, and only then marked complete; without the mark it
does not exist. Besides weights and optimiser it holds the progress; random numbers need no state, since every learner
step seeds them anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from asyncrl.errors import CheckpointError, StoppedError
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.seals import damage, seal
from asyncrl.learner.state import Parts, read_state, write_state
from asyncrl.machine.disk import when_there_is_room
from asyncrl.machine.files import sync, write_whole
from asyncrl.types import BatchPlan

logger = logging.getLogger(__name__)

STEP = "step-"
COMPLETE, DAMAGED = "complete", "damaged"
"""The mark of a folder that is a checkpoint, and what becomes of the mark once the checkpoint is found damaged."""
PROGRESS = "progress.json"


@dataclass(slots=True)
class Progress:
    """What a run has done: finished steps, running totals, evaluations asked for (version by step) that have not been
    answered, and what the algorithm keeps from step to step."""

    step: int = 0
    trajectories: int = 0
    tokens: int = 0
    updates_skipped: int = 0
    updates_empty: int = 0
    steps_skipped: int = 0
    evaluations: dict[int, int] = field(default_factory=dict)
    algorithm: dict[str, float] = field(default_factory=dict)

    def add(self, plan: BatchPlan, skipped: int, empty: int) -> None:
        """One more step is finished."""
        self.step += 1
        self.trajectories += len(plan.ids)
        self.tokens += sum(plan.tokens)
        self.updates_skipped += skipped
        self.updates_empty += empty

    def skip(self) -> None:
        """One more step is finished that trained nothing."""
        self.step += 1
        self.steps_skipped += 1


class Checkpoints:
    """The checkpoints under `folder`, of which the newest `keep` stay. Every method is called by all ranks alike. What
    waits for room on the disk waits no longer than until `stop` is set."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks, stop: threading.Event | None = None) -> None:
        self._folder = folder
        self._stop = stop or threading.Event()
        self._keep = keep
        self._ranks = ranks

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return sorted(mark.parent for mark in self._folder.glob(f"{STEP}*/{COMPLETE}"))

    def save(self, progress: Progress, parts: Parts) -> None:
        """Write a checkpoint, as soon as the disk has room for it; once this returns it is complete.

        Raises StoppedError on every rank: one was asked to stop while it waited for room.
        """
        final = self._folder / f"{STEP}{progress.step:06d}"
        aside = self._folder / f".tmp-{final.name}"
        extra = {"fingerprint": _fingerprint(parts), "ranks": self._ranks.size}
        text = json.dumps({**asdict(progress), **extra})
        self._written(final, lambda: _make_anew(aside), by_first=True)
        self._written(final, lambda: sync(write_state(parts, aside, self._ranks)))
        self._written(final, lambda: write_whole(aside / PROGRESS, text), by_first=True)
        self._written(final, lambda: sync(seal(aside, self._ranks)))
        if self._ranks.rank == 0:
            sync(aside)
            shutil.rmtree(final, ignore_errors=True)
            aside.rename(final)
        self._written(final, lambda: write_whole(final / COMPLETE, ""), by_first=True)
        if self._ranks.rank == 0:
            self._clean()
        self._ranks.barrier()

    def _written(self, checkpoint: Path, write: Callable[[], None], by_first: bool = False) -> None:
        """Have every rank, or the first one alone, `write`; all go on together."""
        stopped = False
        if self._ranks.rank == 0 or not by_first:
            try:
                when_there_is_room(write, self._stop, str(checkpoint))
            except StoppedError:
                stopped = True
        self._ranks.leave_if(stopped)

    def restore(self, parts: Parts) -> Progress | None:
        """Load the newest checkpoint that is undamaged into `parts`; None, and nothing done, where there is none at
        all. A damaged one loses its mark, so that it does not exist any more.

        Raises CheckpointError: it is of another model, or all are damaged.
        """
        complete = self.complete()
        while complete:
            newest = complete.pop()
            found = damage(newest, self._ranks)
            if found is None:
                return self._load(newest, parts)
            logger.error("%s is damaged: %s; trying the checkpoint before it", newest, found)
            if self._ranks.rank == 0:
                (newest / COMPLETE).rename(newest / DAMAGED)
        if any(self._folder.glob(f"{STEP}*/{DAMAGED}")):
            raise CheckpointError(
                f"every checkpoint in {self._folder} is damaged: restore one from a copy, or remove that folder to "
                "train from the first step again, if the replay still has its data (replay.retention=all keeps them)"
            )
        return None

    def covered(self) -> int:
        """How many steps every checkpoint covers that the run may yet be resumed from. While fewer than `keep` are
        there, the first weights are one of them."""
        complete = self.complete()
        return int(complete[-self._keep].name.removeprefix(STEP)) if len(complete) >= self._keep else 0

    def _load(self, newest: Path, parts: Parts) -> Progress:
        progress, count = _read_progress(newest, parts)
        read_state(parts, newest, count, self._ranks)
        logger.info("resumed after step %d from %s", progress.step, newest)
        return progress

    def _clean(self) -> None:
        keep = self.complete()[-self._keep :]
        for folder in [*self._folder.glob(f"{STEP}*"), *self._folder.glob(".tmp-*")]:
            if folder not in keep:
                shutil.rmtree(folder)


def _read_progress(folder: Path, parts: Parts) -> tuple[Progress, int]:
    """The progress, and how many ranks wrote the checkpoint."""
    try:
        values = json.loads((folder / PROGRESS).read_text())
        fingerprint, ranks = values.pop("fingerprint"), values.pop("ranks", 0)
        values["evaluations"] = {int(step): version for step, version in values["evaluations"].items()}
        progress = Progress(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{folder / PROGRESS} cannot be read: {error!r}; remove {folder}") from error
    if fingerprint != _fingerprint(parts):
        raise CheckpointError(
            f"{folder} is a checkpoint of another model than model.path now names; choose another run.name"
        )
    if not ranks:
        raise CheckpointError(
            f"{folder} was written by an earlier version of asyncrl, in another format: finish the run with that "
            "version, or begin another run.name with model.path at its last export"
        )
    return progress, ranks


def _fingerprint(parts: Parts) -> str:
    """What tells one architecture from another: names and shapes of the parameters."""
    layout = {
        name: [(key, list(parameter.shape)) for key, parameter in part.module.named_parameters()]
        for name, part in parts.items()
    }
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
