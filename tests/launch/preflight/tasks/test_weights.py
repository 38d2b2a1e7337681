"""Each data source with a weight has tasks in each shard, or the start is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import DataConfig
from asyncrl.data.opening import Rendering, RunTasks
from asyncrl.errors import DataError
from asyncrl.launch.preflight.tasks.weights import check_weights


def tasks_of(folder: Path, *sources: str, **options: Any) -> RunTasks:
    rows = [{"prompt": f"{number}?", "answer": "1", "data_source": each} for number, each in enumerate(sources)]
    (folder / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return RunTasks(DataConfig(train=[str(folder / "a.jsonl")], **options), folder / "run", Rendering([], []))


WEIGHTS = {"large": 1.0, "small": 1.0}
MIXED = (*["large"] * 9, "small", *["large"] * 90)


def test_a_limit_that_leaves_a_small_source_empty_is_refused_and_a_larger_one_is_not(tmp_path: Path) -> None:
    check_weights(1, tasks_of(tmp_path, *MIXED, weights=WEIGHTS))
    with pytest.raises(DataError) as refused:
        check_weights(1, tasks_of(tmp_path, *MIXED, weights=WEIGHTS, limit=5))
    assert str(refused.value) == (
        "data.weights names small, of which data.train has no task after data.limit=5; it has tasks of large: raise "
        "data.limit or set it to null, add tasks of this data source, or leave it out of data.weights"
    )
    check_weights(1, tasks_of(tmp_path, *MIXED, weights=WEIGHTS, limit=99))


def test_each_shard_needs_a_task_of_each_source(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has 1 task, and each of replay\.shards=2 needs one: add tasks of this"):
        check_weights(2, tasks_of(tmp_path, *MIXED, weights=WEIGHTS))
    check_weights(2, tasks_of(tmp_path, "large", "large", "small", "small", weights=WEIGHTS))
    with pytest.raises(DataError, match="has 2 tasks, and each"):
        check_weights(2, tasks_of(tmp_path, "small", "large", "small", "large", weights={"small": 1.0}))


def test_without_weights_a_source_may_be_left_out(tmp_path: Path) -> None:
    check_weights(1, tasks_of(tmp_path, *MIXED, limit=5))
    check_weights(1, tasks_of(tmp_path, *MIXED, limit=5, weights={"large": 1.0}))
