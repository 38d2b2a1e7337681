"""Checks, before anything starts, that a resumed run has the tasks that it began with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from asyncrl.data.opening import RunTasks
from asyncrl.errors import ConfigError, StoreError
from asyncrl.launch.preflight.tasks.same_files import check_same_files, task_files
from asyncrl.launch.run_folder import store_folders


def check_same_tasks(tasks: RunTasks, run_dir: Path) -> None:
    """Raises ConfigError: a file has changed, or the run's store was made with other tasks, which the replay would
    refuse; DataError: the files cannot be read; StoreError: the store cannot be read."""
    from asyncrl.replay.store.pinned import pinned_tasks, require_pinned
    from asyncrl.replay.store.store import StoreReader

    data, folders = tasks.data, store_folders(run_dir)
    check_same_files(run_dir, task_files(tasks), begun=names_tasks(run_dir))
    if not folders:
        return
    now = pinned_tasks(tasks.usable(data.train), tasks.usable(data.eval, held_out=True) if data.eval else ())
    for folder in folders:
        with closing(StoreReader(folder)) as store, store.transaction() as tx:
            try:
                require_pinned(tx, now)
            except StoreError as error:
                raise ConfigError(f"{run_dir} holds a run: {error}") from error


def names_tasks(run_dir: Path) -> bool:
    """True if the store of the run has given out a task. Before that, a user may still correct the files."""
    from asyncrl.replay.store.store import StoreReader

    for folder in store_folders(run_dir):
        with closing(StoreReader(folder)) as store, store.transaction() as tx:
            if tx.counter("feed_draws") or tx.count("groups"):
                return True
    return False
