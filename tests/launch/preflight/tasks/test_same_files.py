"""A file of tasks that changes under a run is refused by its name."""

from __future__ import annotations

import os
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.locations import run_dir
from asyncrl.config.schema import DataConfig, RunConfig, TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.errors import ConfigError
from asyncrl.launch.claim import check_begun_files, check_resume, claim
from asyncrl.launch.preflight.tasks.datasets import make_tasks
from asyncrl.launch.preflight.tasks.same_files import check_same_files, task_files
from asyncrl.replay.store.store import Store
from asyncrl.types import BatchPlan
from tests.data.test_tables import parquet, row


def config_of(folder: Path, **data: object) -> TrainConfig:
    parquet(folder / "parts" / "a.parquet", row(0))
    parquet(folder / "parts" / "b.parquet", row(1))
    data_config = DataConfig(train=[str(folder / "parts")], **data)  # type: ignore[arg-type]
    return TrainConfig(run=RunConfig(name="r", dir=str(folder / "runs")), data=data_config)


def check_files(config: TrainConfig, begun: bool) -> None:
    check_same_files(run_dir(config.run), task_files(run_tasks(config)), begun)


def resume(config: TrainConfig, folder: Path) -> None:
    tasks = partial(run_tasks, config)
    check_files = partial(check_begun_files, folder, config.data, config.algorithm.sft.path, tasks)
    check_resume(values_of(config), folder, check_files)


def test_a_file_that_has_changed_is_named_once_its_rows_are_and_not_before(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    check_files(config, begun=True)
    changed = parquet(tmp_path / "parts" / "b.parquet", row(2))
    with pytest.raises(ConfigError, match=r"parts/b\.parquet has changed since the run began"):
        check_files(config, begun=True)
    check_files(config, begun=False)
    check_files(config, begun=True)
    before = changed.stat()
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    check_files(config, begun=True)


def test_a_resume_with_a_changed_file_is_refused_before_its_rows_are_read(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    folder = tmp_path / "runs" / "r"
    claim(config, folder)
    with closing(Store(folder / "replay", 1 << 20, durable=False)) as opened, opened.transaction() as tx:
        tx.put("plans", 0, BatchPlan(0, 0, ["a"], ["g"], [1], [1], [1.0]))
        tx.add("feed_draws")
    resume(config, folder)
    parquet(tmp_path / "parts" / "b.parquet", row(2))
    with pytest.raises(ConfigError, match=r"parts/b\.parquet has changed since the run began"):
        resume(config, folder)


def test_rows_that_were_made_stay_the_same_whatever_becomes_of_their_files(tmp_path: Path) -> None:
    config = config_of(tmp_path, keep_in_memory=False)
    make_tasks(config, config.data.train)
    tasks = list(run_tasks(config).all(config.data.train))
    assert [task.ground_truth for task in tasks] == ["1", "2"]
    (tmp_path / "parts" / "a.parquet").unlink()
    check_files(config, begun=True)
    make_tasks(config, config.data.train, anew=False)
    assert list(run_tasks(config).all(config.data.train)) == tasks
    (tmp_path / "runs" / "r" / "replay").mkdir()
    (tmp_path / "runs" / "r" / "replay" / "data.mdb").touch()
    make_tasks(config, config.data.train)
    assert list(run_tasks(config).all(config.data.train)) == tasks


def test_other_columns_are_another_made_file_and_plain_files_need_none(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_tasks(config).made_file(config.data.train) is None
    assert run_tasks(config).made_file(["hub:a/b?split=train"]) is not None
    config.data.keep_in_memory = False
    first = run_tasks(config).made_file(config.data.train)
    config.data.columns = {"prompt": "question"}
    assert run_tasks(config).made_file(config.data.train) not in (first, None)
