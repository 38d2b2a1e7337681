"""What the folder of an earlier start holds, and whether the run may begin anew."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

from asyncrl.config.locations import CONFIG_FILE, IDENTITY_FILE
from asyncrl.replay.store import Transaction, in_use
from asyncrl.replay.stored import StoredRun, shard_paths

_STORE, _CHECKPOINTS, _METRICS = "replay", "checkpoints", "metrics"


def is_begun(run_dir: Path) -> bool:
    """Whether the run has a checkpoint or a recorded plan of a step, or a process serves its replay at the moment.

    Raises StoreError: its store cannot be read.
    """
    store = run_dir / _STORE
    if any((run_dir / _CHECKPOINTS).glob("*")):
        return True
    if not any(store.rglob("data.mdb")):
        return False
    with closing(StoredRun(store)) as stored:
        return any(map(in_use, shard_paths(store))) or any(stored.each(Transaction.count, "plans"))


def clear(run_dir: Path) -> None:
    """Delete what a run has that has not begun. Its logs stay, and so do files that no role made."""
    for name in (_STORE, _METRICS):
        shutil.rmtree(run_dir / name, ignore_errors=True)
    for name in (CONFIG_FILE, IDENTITY_FILE):
        (run_dir / name).unlink(missing_ok=True)
