"""Reads the folder of a run that was started before, and moves its files away so that the run can begin again."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

from asyncrl.config.locations import CHECKPOINTS, CONFIG_FILE, IDENTITY_FILE
from asyncrl.errors import ConfigError
from asyncrl.replay.store.store import in_use
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.stored import shard_paths
from asyncrl.runs.run import STORE, Run

_METRICS = "metrics"


def store_folders(run_dir: Path) -> list[Path]:
    """Return the folders of the shards that the run's replay has begun."""
    return sorted(file.parent for file in (run_dir / STORE).rglob("data.mdb"))


def has_store(run_dir: Path) -> bool:
    """True if the run has a store or a checkpoint, even if it never began a step."""
    return _has_checkpoint(run_dir) or bool(store_folders(run_dir))


def is_begun(run_dir: Path) -> bool:
    """True if the run has a checkpoint or a recorded plan of a step, or a process serves its replay at the moment.

    Raises StoreError: its store cannot be read.
    """
    store = run_dir / STORE
    if _has_checkpoint(run_dir):
        return True
    if not any(store.rglob("data.mdb")):
        return False
    with Run(run_dir).stored() as stored:
        return any(map(in_use, shard_paths(store))) or any(stored.each(Transaction.count, "plans"))


def _has_checkpoint(run_dir: Path) -> bool:
    # The folder also has files that are no checkpoints: custom code of the model, and the evaluation of the first
    # weights.
    return any((run_dir / CHECKPOINTS).glob("step-*"))


def set_aside(run_dir: Path) -> Path:
    """Move the files of a run that never began a step into a new folder `earlier-N` in the run's folder, and return
    the new folder. Nothing is deleted: the run's episodes may have taken hours. All other files, such as logs,
    stay in place.

    Raises ConfigError: a file cannot be moved.
    """
    folders = (run_dir / f"earlier-{number}" for number in count(1))
    aside = next(folder for folder in folders if not folder.exists())
    try:
        aside.mkdir()
        for name in (STORE, CHECKPOINTS, _METRICS, IDENTITY_FILE, CONFIG_FILE):
            # A link moves as a link. The configuration moves last: while it is there, the next start moves the rest.
            if os.path.lexists(run_dir / name):
                (run_dir / name).rename(aside / name)
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot start over: {error}; choose another run.name") from error
    return aside
