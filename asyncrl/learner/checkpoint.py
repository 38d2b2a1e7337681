"""Checkpoints: any number of ranks may read what any other number wrote.

A checkpoint is written under a hidden name, renamed, and marked complete; a folder without the mark is no checkpoint.
Checksums of all its files tell later whether they are still what was written. It holds the weights, the optimisers'
state and the progress. Random numbers need no state, since every learner step seeds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torch import nn
from xxhash import xxh3_64

from asyncrl.errors import CheckpointError
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.state import Models, read_state, read_weights, write_state
from asyncrl.machine.files import sync, when_there_is_room, write_whole
from asyncrl.types import BatchPlan

logger = logging.getLogger(__name__)

COMPLETE, DAMAGED = "complete", "damaged"
"""The file that marks a folder as a checkpoint, and its name once the checkpoint was found damaged."""
FORMAT = "3"
"""What the mark contains. Earlier versions of asyncrl wrote another number, or nothing."""
PROGRESS = "progress.json"
CHECKSUMS = "checksums-"
CHUNK_BYTES = 16 << 20
_STEP = re.compile(r"step-(\d{6,})")


@dataclass(slots=True)
class Progress:
    """What a run has done: finished steps, running totals, evaluations without an answer so far (version by step), and
    what the algorithm keeps from step to step."""

    step: int = 0
    trajectories: int = 0
    tokens: int = 0
    updates_skipped: int = 0
    updates_too_large: int = 0
    updates_empty: int = 0
    steps_skipped: int = 0
    evaluations: dict[int, int] = field(default_factory=dict)
    algorithm: dict[str, float] = field(default_factory=dict)

    def add(self, plan: BatchPlan, skipped: int, too_large: int, empty: int) -> None:
        """One more step is finished."""
        self.step += 1
        self.trajectories += len(plan.ids)
        self.tokens += sum(plan.tokens)
        self.updates_skipped += skipped
        self.updates_too_large += too_large
        self.updates_empty += empty

    def skip(self) -> None:
        """One more step is finished that trained nothing."""
        self.step += 1
        self.steps_skipped += 1


class Checkpoints:
    """The checkpoints under `folder`, of which the newest `keep` stay. Every method is called by all ranks alike. A
    write that waits for room on the disk ends when `stop` is set."""

    def __init__(self, folder: Path, keep: int, ranks: Ranks, stop: threading.Event | None = None) -> None:
        self._folder = folder
        self._stop = stop or threading.Event()
        self._keep = keep
        self._ranks = ranks

    def complete(self) -> list[Path]:
        """Complete checkpoints, oldest first."""
        return [folder for folder in self._folders() if (folder / COMPLETE).exists()]

    def save(self, progress: Progress, models: Models) -> None:
        """Write a checkpoint, as soon as the disk has room for it. It is complete when this returns.

        Raises StoppedError on every rank: one was asked to stop while it waited for room.
        """
        final = self._path(progress.step)
        partial = self._folder / f".tmp-{final.name}"
        content = {**asdict(progress), "fingerprint": _fingerprint(models), "ranks": self._ranks.shards}
        self._write(final, lambda: _make_anew(partial), by_first=True)
        writes = self._ranks.is_in_first_copy
        self._write(final, lambda: sync(write_state(models, partial, self._ranks)) if writes else None)
        self._write(final, lambda: write_whole(partial / PROGRESS, json.dumps(content)), by_first=True)
        self._write(final, lambda: sync(_write_checksums(partial, self._ranks)))
        if self._ranks.rank == 0:
            sync(partial)
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        self._write(final, lambda: write_whole(final / COMPLETE, FORMAT), by_first=True)
        if self._ranks.rank == 0:
            self._clean()
        self._ranks.barrier()

    def _write(self, checkpoint: Path, write: Callable[[], None], by_first: bool = False) -> None:
        """Have every rank, or the first one alone, `write`. All ranks go on together."""
        writes = self._ranks.rank == 0 or not by_first
        self._ranks.together(lambda: when_there_is_room(write, self._stop, str(checkpoint)) if writes else None)

    def restore(self, models: Models) -> Progress | None:
        """Load the newest undamaged checkpoint into `models`. Returns None, and changes nothing, where there is no
        checkpoint. A damaged one loses its mark, and is not looked at again.

        Raises CheckpointError: the checkpoint is of another model or format, or all are damaged.
        """
        # Rank 0 alone looks for checkpoints, since only it marks them: another rank may see the disk before a mark.
        while step := self._ranks.agree(self._newest()):
            folder = self._path(step)
            damage = self.damage(folder)
            if damage is None:
                return self._load(folder, models)
            logger.error("%s is damaged: %s; trying the checkpoint before it", folder, damage)
            if self._ranks.rank == 0:
                (folder / COMPLETE).rename(folder / DAMAGED)
        if self._ranks.agree(any((folder / DAMAGED).exists() for folder in self._folders())):
            raise CheckpointError(
                f"every checkpoint in {self._folder} is damaged: restore one from a copy, or remove that folder to "
                "train from the first step again, if the replay still has its data (replay.retention=all keeps them)"
            )
        return None

    def covered(self) -> int:
        """How many steps no resumed run will ask for again: those in the oldest checkpoint that stays. The first
        weights count as a checkpoint while there are fewer than `keep`."""
        complete = self.complete()
        return step_of(complete[-self._keep]) if len(complete) >= self._keep else 0

    def damage(self, folder: Path) -> str | None:
        """What is wrong with the files of a checkpoint; None, on every rank, where nothing is. Each rank reads a part
        of the files. Raises CheckpointError: it has another format."""
        try:
            mark = (folder / COMPLETE).read_text(errors="replace")
            if mark != FORMAT and (not mark or mark.isdecimal()):
                raise CheckpointError(
                    f"{folder} was written by an earlier version of asyncrl, in another format: finish the run with "
                    "that version, or begin another run.name with model.path at its last export"
                )
            damage = _find_damage(folder, self._ranks) if mark == FORMAT else f"its mark is {mark!r:.50}"
        except OSError as error:
            # The file is there, and the disk does not give it back.
            damage = f"it cannot be read: {error}"
        if not self._ranks.any(damage is not None):
            return None
        return damage or "another rank found it damaged"

    def _load(self, folder: Path, models: Models) -> Progress:
        values = json.loads((folder / PROGRESS).read_text())
        fingerprint, ranks = values.pop("fingerprint"), values.pop("ranks")
        if fingerprint != _fingerprint(models):
            raise CheckpointError(
                f"{folder} is a checkpoint of another model than model.path now names; choose another run.name"
            )
        values["evaluations"] = {int(step): version for step, version in values["evaluations"].items()}
        read_state(models, folder, ranks, self._ranks)
        progress = Progress(**values)
        logger.info("resumed after step %d from %s", progress.step, folder)
        return progress

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _newest(self) -> int:
        """The step of the newest complete checkpoint; 0 where there is none."""
        return max(map(step_of, self.complete()), default=0)

    def _folders(self) -> list[Path]:
        """The folders with the name of a checkpoint, oldest first. Others are left alone."""
        return sorted((each for each in self._folder.glob("step-*") if _STEP.fullmatch(each.name)), key=step_of)

    def _clean(self) -> None:
        keep = self.complete()[-self._keep :]
        for folder in [*self._folders(), *self._folder.glob(".tmp-*")]:
            if folder not in keep:
                shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """How many steps a checkpoint covers."""
    return int(folder.name.removeprefix("step-"))


def read_policy(folder: Path, policy: nn.Module) -> None:
    """Load the policy's weights from a checkpoint into a module that is not sharded. Raises CheckpointError: they
    cannot be read, or are another model's."""
    try:
        ranks = json.loads((folder / PROGRESS).read_text())["ranks"]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    read_weights("policy", policy, folder, ranks)


def _fingerprint(models: Models) -> str:
    """Tells one architecture from another: a digest of the names and shapes of the parameters."""
    layout = {
        name: [(key, list(parameter.shape)) for key, parameter in model.module.named_parameters()]
        for name, model in models.items()
    }
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _make_anew(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _write_checksums(folder: Path, ranks: Ranks) -> Path:
    """Write the sizes and checksums of this rank's part of the files in `folder`, once all files are there. Returns the
    file, which need not be on the disk yet."""
    files = sorted(file for file in folder.iterdir() if not file.name.startswith(CHECKSUMS))
    checksums = {file.name: _checksum(file) for file in files[ranks.rank :: ranks.size]}
    path = folder / f"{CHECKSUMS}{ranks.rank:05d}.json"
    path.write_text(json.dumps({"ranks": ranks.size, "files": checksums}))
    return path


def _find_damage(folder: Path, ranks: Ranks) -> str | None:
    """What is wrong with this rank's part of the files in `folder`. Raises OSError."""
    try:
        read = [json.loads(path.read_text()) for path in folder.glob(f"{CHECKSUMS}*.json")]
        checksums = {name: checksum for each in read for name, checksum in each["files"].items()}
        expected = read[0]["ranks"] if read else 1
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        return f"its checksums cannot be read: {error!r}"
    if len(read) != expected:
        return f"{len(read)} of {expected} files of checksums are there"
    for name in sorted(checksums)[ranks.rank :: ranks.size]:
        if not (folder / name).is_file():
            return f"{name} is gone"
        if _checksum(folder / name) != checksums[name]:
            return f"{name} is not what was written"
    return None


def _checksum(path: Path) -> list[int | str]:
    """Size and XXH3 of a file."""
    digest, size = xxh3_64(), 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            size += len(chunk)
    return [size, digest.hexdigest()]
