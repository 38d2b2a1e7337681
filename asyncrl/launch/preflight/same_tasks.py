"""A check before anything starts that a run goes on with the tasks that it began with."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, StoreError
from asyncrl.launch.preflight.same_files import check_same_files
from asyncrl.launch.run_folder import store_folders


def check_same_tasks(config: TrainConfig, run_dir: Path) -> None:
    """Raises ConfigError: a file has changed, or the run's store names other tasks than those that the files have now,
    and every start of the replay would refuse it; DataError: the files cannot be read; StoreError: the store cannot."""
    from asyncrl.data.from_config import run_tasks
    from asyncrl.replay.pinned import pinned_tasks, require_pinned
    from asyncrl.replay.store import StoreReader

    data, folders = config.data, store_folders(run_dir)
    check_same_files(config, begun=any(map(_names_rows, folders)))
    if not folders:
        return
    now = pinned_tasks(run_tasks(config).usable(data.train), run_tasks(config).usable(data.eval) if data.eval else ())
    for folder in folders:
        with closing(StoreReader(folder)) as store, store.transaction() as tx:
            try:
                require_pinned(tx, now)
            except StoreError as error:
                raise ConfigError(f"{run_dir} holds a run: {error}") from error


def check_files_of_run(config: TrainConfig, run_dir: Path) -> None:
    """The part of `check_same_tasks` that reads no row. Raises ConfigError: a file has changed."""
    if any(map(_names_rows, store_folders(run_dir))) and not missing_data(config):
        check_same_files(config, begun=True)


def _names_rows(folder: Path) -> bool:
    """Whether the store has given out a task; before that, files may still be mended."""
    from asyncrl.replay.store import StoreReader

    with closing(StoreReader(folder)) as store, store.transaction() as tx:
        return bool(tx.counter("feed_draws") or tx.count("groups"))
