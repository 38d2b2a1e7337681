"""Writes, restores and removes checkpoints. The number of ranks may change between writing and reading.

A checkpoint holds the weights, the optimisers' state and the progress. Random numbers need no state, since every
learner step seeds them. The state is copied to host memory while training continues, and only the next update waits for
the copy.

Threads write the copy into a hidden folder, rename the folder, and mark it as complete. A folder without the mark is
not a checkpoint. A checkpoint has checksums of all its files, which show damage later.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import re
import shutil
import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future, wait
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError
from asyncrl.learner.checkpoint.files import COMPLETE, FORMAT, PROGRESS, CheckpointFiles, find_damage
from asyncrl.learner.checkpoint.progress import Progress
from asyncrl.learner.checkpoint.state import HostCopy, Models, read_state, read_weights
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.files import when_there_is_room, write_whole
from asyncrl.modelling.adapters import adapted_layers
from asyncrl.weights.threads import begin

logger = logging.getLogger(__name__)

DAMAGED = "damaged"
"""The mark of a checkpoint is the file `COMPLETE`. It is renamed to this when the checkpoint is found damaged."""
RATINGS = "ratings.json"
"""The file, next to the checkpoints, that maps each evaluated step to the result by which it is rated."""
POLL_S = 0.1
SAMPLED = 256
"""The digest of the base model reads at most this many numbers of the first row of each frozen tensor."""
_STEP = re.compile(r"step-(\d{6,})")


class Checkpoints:
    """The checkpoints under `folder`. The newest `keep` checkpoints stay, and so do the `keep_best` checkpoints with
    the best ratings. All ranks call the methods together, except methods that only rank 0 calls. A write that waits for
    room on the disk ends when `stop` is set."""

    def __init__(
        self, folder: Path, keep: int, ranks: Ranks, stop: threading.Event | None = None, keep_best: int = 0
    ) -> None:
        self._folder = folder
        self._keep_best = keep_best
        self._stop = stop or threading.Event()
        self._keep = keep
        self._ranks = ranks
        # Complete checkpoints that could not be read. The next start tries them again, unless this run has written
        # others since.
        self._unread: set[Path] = set()
        self._copy = HostCopy(ranks.device)
        self._fingerprint = ""
        self._base: str | None = None
        self._moved = -1
        self._writing: Future[int] | None = None
        self._gives_up = threading.Event()

    def complete(self) -> list[Path]:
        """Return the complete checkpoints, oldest first, without those that could not be read."""
        return [each for each in self._folders() if (each / COMPLETE).exists() and each not in self._unread]

    def prepare(self, models: Models) -> None:
        """Find the tensors for `save_prepared`, and begin to get memory for them. Call this after each step."""
        # New tensors appear only when an optimiser makes moments for a parameter, at the parameter's first update.
        # Finding tensors in each step would keep a GPU waiting for milliseconds.
        if self._moved != _moved(models):
            self._find(models)
        self._copy.changed()
        if self._ranks.is_in_first_copy:
            self._copy.reserve()

    def _find(self, models: Models) -> None:
        self._fingerprint, self._moved = _fingerprint(models), _moved(models)
        if self._base is None:
            self._base = _base(models)
        if self._ranks.is_in_first_copy:
            self._copy.find(models, self._ranks)

    def save(self, progress: Progress, models: Models) -> None:
        """Begin a checkpoint, once the previous one is complete. Later changes of the models and of `progress` are not
        in the checkpoint.

        Raises StoppedError on every rank: a rank was asked to stop while it waited for room on the disk.
        """
        self._find(models)
        self._copy.changed()
        copied = self.save_prepared(progress)
        for model in models.values():
            model.copied = copied

    def save_prepared(self, progress: Progress) -> torch.cuda.Event | None:
        """Begin a checkpoint of the models that the last `prepare` found. A pass may be running, but call this only
        if no weight has changed since that `prepare`. If this returns an event, the weights must not change before the
        event has happened."""
        self.wait()
        files = CheckpointFiles(self._path(progress.step))
        identity = {"fingerprint": self._fingerprint, "base": self._base, "ranks": self._ranks.shards}
        content = {**asdict(progress), **identity}
        make = partial(when_there_is_room, files.begin, self._stop, str(files.final))
        self._ranks.together(make if self._ranks.rank == 0 else lambda: None)
        if self._ranks.is_in_first_copy:
            (tensors, copied), pending = self._copy.take(), list(progress.evaluations)
            write = partial(self._write, files, tensors, copied, progress.step, json.dumps(content), pending)
            self._writing = begin(write, "checkpoint", daemon=True)
            return copied
        return None

    def _write(
        self,
        files: CheckpointFiles,
        tensors: Mapping[str, Tensor],
        copied: torch.cuda.Event | None,
        step: int,
        progress: str,
        pending: Collection[int],
    ) -> int:
        started = time.monotonic()
        with self._ranks.activity.finishing(f"the checkpoint {files.final.name}"):
            if copied is not None:
                with torch.cuda.device(self._ranks.device):
                    copied.synchronize()
            if not files.write(tensors, progress, self._ranks, self._gives_up):
                return 0
            self._unread.discard(files.final)
            self.clean(pending)
        logger.info("%s is complete, %.1f s after its copy was begun", files.final, time.monotonic() - started)
        return step

    def wait(self) -> None:
        """Wait until no checkpoint is being written.

        Raises StoppedError on every rank, as `save` does. Raises OSError on a rank whose part could not be written.
        """
        self._ranks.together(self._wait)

    def _wait(self) -> None:
        while (writing := self._writing) is not None and not writing.done():
            if self._stop.is_set():
                self._gives_up.set()
            wait([writing], POLL_S)
        if writing is not None:
            writing.result()

    def completed(self) -> int:
        """Return the number of steps before the checkpoint that has become complete since the last call. Returns 0 if
        none has, and always on ranks other than rank 0. Does not wait. Raises the errors of `wait`, but perhaps not on
        all ranks."""
        if self._writing is None or not self._writing.done():
            return 0
        written, self._writing = self._writing, None
        return written.result()

    def close(self) -> None:
        """Wait until the checkpoint that is being written is complete, unless the disk is full."""
        self._gives_up.set()
        if (writing := self._writing) is None:
            return
        with self._ranks.activity.waiting():
            error = writing.exception()
        if error is not None:
            logger.warning("the last checkpoint was not written: %s", error)

    def rate(self, step: int, value: float) -> None:
        """Record the result of evaluating the weights after `step` steps. A higher value is better. Only rank 0 calls
        this. Raises StoppedError, as `save` does."""
        ratings = json.dumps({**self._ratings(), step: value})
        when_there_is_room(lambda: write_whole(self._folder / RATINGS, ratings), self._stop, RATINGS)

    def _ratings(self) -> dict[int, float]:
        path = self._folder / RATINGS
        try:
            return {int(step): float(value) for step, value in json.loads(path.read_text()).items()}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, AttributeError) as error:
            raise CheckpointError(
                f"{path} cannot be read: {error!r}; restore it, or remove it: then only later checkpoints are rated"
            ) from error

    def best(self) -> list[Path]:
        """Return the complete checkpoints that were rated, the best one first. Of checkpoints with equal ratings the
        newest comes first. Raises CheckpointError: the ratings cannot be read."""
        ratings = self._ratings()
        rated = [folder for folder in self.complete() if not math.isnan(ratings.get(step_of(folder), math.nan))]
        return sorted(rated, key=lambda folder: (ratings[step_of(folder)], step_of(folder)), reverse=True)

    def restore(self, models: Models) -> Progress | None:
        """Load the newest undamaged checkpoint into `models`. Returns None, and changes nothing, if there is none. A
        damaged checkpoint loses its mark, and is not read again. One that the disk cannot read keeps its mark, since
        the next start may be able to read it.

        Raises CheckpointError: the checkpoint is of another model or format, or has adapters of another base model, or
        all checkpoints are damaged or cannot be read.
        """
        self._base = _base(models)
        # All ranks use rank 0's answer, since it marks checkpoints: other ranks might not see a new mark on a shared
        # disk yet.
        while step := self._ranks.agree(self._newest()):
            folder = self._path(step)
            damage, is_proven = self._examined(folder)
            if damage is None:
                return self._load(folder, models)
            logger.error("%s is not used: %s; trying the one before it, if there is one", folder, damage)
            if not is_proven:
                self._unread.add(folder)
            elif self._ranks.rank == 0:
                (folder / COMPLETE).rename(folder / DAMAGED)
        if self._unread:
            names = ", ".join(folder.name for folder in sorted(self._unread, key=step_of))
            raise CheckpointError(
                f"{names} in {self._folder} cannot be read: mend the disk or the permissions, and start again"
            )
        if self._ranks.agree(any((folder / DAMAGED).exists() for folder in self._folders())):
            raise CheckpointError(
                f"the newest checkpoints in {self._folder} are damaged: restore one of them from a copy, or move that "
                "folder away to train from the first step again, if the replay still has its data "
                "(replay.retention=all keeps it)"
            )
        return None

    def covered(self) -> int:
        """Return the number of steps in the oldest of the newest `keep` checkpoints. No resumed run trains these steps
        again. Returns 0 if there are fewer than `keep` checkpoints, since a run may then resume from the first
        weights."""
        complete = self.complete()
        return step_of(complete[-self._keep]) if len(complete) >= self._keep else 0

    def damage(self, folder: Path) -> str | None:
        """Describe the damage of a checkpoint's files. Returns None, on every rank, if they are undamaged. Each rank
        reads a part of the files. Raises CheckpointError: the checkpoint has another format."""
        return self._examined(folder)[0]

    def _examined(self, folder: Path) -> tuple[str | None, bool]:
        """Return the damage (see `damage`), and whether the damage is proven: some rank could read its part of the
        files, and found damage. Every rank gets the same second value."""
        is_proven = True
        try:
            mark = (folder / COMPLETE).read_text(errors="replace")
            if mark != FORMAT and (not mark or mark.isdecimal()):
                raise CheckpointError(
                    f"{folder} was written by an earlier version of asyncrl, in another format: finish the run with "
                    "that version, or start another run.name, with model.path at the last export of this run"
                )
            damage = (
                find_damage(folder, self._ranks.rank, self._ranks.size)
                if mark == FORMAT
                else f"its mark is {mark!r:.50}"
            )
        except OSError as error:
            # The disk cannot read a file that exists, or this process has too many open files.
            damage, is_proven = f"it cannot be read: {error}", False
        if not self._ranks.any(damage is not None):
            return None, False
        is_proven = self._ranks.any(damage is not None and is_proven)
        return damage or "another rank found it damaged, or cannot read it", is_proven

    def _load(self, folder: Path, models: Models) -> Progress:
        values = json.loads((folder / PROGRESS).read_text())
        fingerprint, base, ranks = values.pop("fingerprint"), values.pop("base"), values.pop("ranks")
        if fingerprint != _fingerprint(models):
            raise CheckpointError(
                f"{folder} is a checkpoint of another model than model.path now names; choose another run.name"
            )
        if self._ranks.any(self._ranks.rank == 0 and base != self._base):
            raise CheckpointError(
                f"{folder} has only adapters, and the weights of their base model have changed: restore the files of "
                "that model (docs/models.md), or choose another run.name"
            )
        values["evaluations"] = {int(step): version for step, version in values["evaluations"].items()}
        read_state(models, folder, ranks, self._ranks)
        progress = Progress(**values)
        logger.info("resumed after step %d from %s", progress.step, folder)
        return progress

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}"

    def _newest(self) -> int:
        """Return the step of the newest complete checkpoint that can be read; 0 if there is none. Older checkpoints
        than the newest `keep` are ignored: the replay may have dropped the data that was trained after them."""
        marked = [each for each in self._folders() if (each / COMPLETE).exists() or (each / DAMAGED).exists()]
        usable = set(self.complete())
        return max((step_of(each) for each in marked[-self._keep :] if each in usable), default=0)

    def _folders(self) -> list[Path]:
        """Return the folders with the name of a checkpoint, oldest first. Other folders stay untouched."""
        return sorted((each for each in self._folder.glob("step-*") if _STEP.fullmatch(each.name)), key=step_of)

    def clean(self, pending: Collection[int] = ()) -> None:
        """Remove all checkpoints except the newest `keep`. If the best checkpoints are kept, too, they also stay, and
        so do the checkpoints whose evaluation is `pending`. If a checkpoint cannot be removed, this is logged, and the
        next call tries again. Only rank 0 calls this, while no checkpoint is being written."""
        keep = self.complete()[-self._keep :]
        if self._keep_best:
            keep += [*self.best()[: self._keep_best], *map(self._path, pending)]
        for folder in [*self._folder.glob(".tmp-*"), *self._folders()]:
            if folder not in keep:
                try:
                    _remove(folder)
                except OSError as error:
                    logger.warning("%s could not be removed, and still takes space on the disk: %s", folder, error)


def _remove(folder: Path) -> None:
    """Remove a checkpoint, or a hidden folder. A checkpoint is hidden first: if its removal is interrupted, it must not
    look complete."""
    if _STEP.fullmatch(folder.name):
        folder = folder.rename(CheckpointFiles(folder).partial)
    shutil.rmtree(folder)


def step_of(folder: Path) -> int:
    """Return the number of trained steps that the name of a checkpoint gives."""
    return int(folder.name.removeprefix("step-"))


def read_policy(folder: Path, policy: nn.Module) -> None:
    """Load the weights of the policy: see `read_model_of`."""
    read_model_of("policy", folder, policy)


def read_model_of(name: str, folder: Path, module: nn.Module) -> None:
    """Load the weights of the model `name` from a checkpoint into a module that is not sharded. Raises CheckpointError:
    the weights cannot be read, or belong to another model."""
    try:
        ranks = json.loads((folder / PROGRESS).read_text())["ranks"]
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error
    read_weights(name, module, folder, ranks)


def _moved(models: Models) -> int:
    """Count the parameters that have moments."""
    return sum(len(model.moments()) for model in models.values())


def _fingerprint(models: Models) -> str:
    """Compute a digest of the names and shapes of all parameters."""
    layout = {
        name: [(key, list(parameter.shape)) for key, parameter in model.module.named_parameters()]
        for name, model in models.items()
    }
    return hashlib.sha256(json.dumps(layout).encode()).hexdigest()


def _base(models: Models) -> str:
    """Compute a digest of the adapters' base model, whose weights no checkpoint has. Only rank 0's digest is used,
    since rank 0 has the first row of every frozen tensor."""
    digest = hashlib.sha256()
    for model in models.values():
        frozen = [each for each in model.module.parameters() if not each.requires_grad]
        for each in frozen if adapted_layers(model.module) else []:
            local = each.to_local() if isinstance(each, DTensor) else each
            digest.update(local.detach()[:1].flatten()[:SAMPLED].cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
