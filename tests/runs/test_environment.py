"""Each start of a run records on what it ran."""

from __future__ import annotations

from pathlib import Path

import pytest

import asyncrl
from asyncrl.runs import environment
from asyncrl.runs.environment import (
    ENVIRONMENT_FILE,
    Environment,
    environments_of,
    read_environments,
    record_environment,
)


def test_each_start_is_added_and_the_newest_of_each_host_counts(tmp_path: Path) -> None:
    record_environment(tmp_path, lambda: 1.0)
    record_environment(tmp_path, lambda: 2.0)
    record_environment(tmp_path / "host-1", lambda: 3.0)
    assert [start.time for start in read_environments(tmp_path)] == [1.0, 2.0]
    assert [start.time for start in environments_of(tmp_path)] == [2.0, 3.0]
    newest = environments_of(tmp_path)[0]
    assert newest.asyncrl == asyncrl.__version__
    assert newest.cores > 0
    assert newest.packages is not None
    assert "torch" in newest.packages


def test_the_time_of_every_start_is_kept_and_the_details_of_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "DETAILED_STARTS", 2)
    monkeypatch.setattr(environment, "this_environment", lambda now: Environment(time=now, host="one"))
    for start in range(4):
        record_environment(tmp_path, lambda now=float(start): now)  # type: ignore[misc]
    assert [(start.time, start.host) for start in read_environments(tmp_path)] == [
        *((0.0, ""), (1.0, "")),
        *((2.0, "one"), (3.0, "one")),
    ]


def test_a_checkout_whose_changes_git_cannot_tell_is_not_called_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").mkdir()
    monkeypatch.setattr(environment, "_git", lambda checkout, word, *rest: "abc" if word == "rev-parse" else None)
    assert environment._commit(tmp_path) == "abc+unknown"


def test_a_record_that_cannot_be_read_or_written_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / ENVIRONMENT_FILE).write_text('{"starts": [3]}')
    assert read_environments(tmp_path) == []
    (tmp_path / ENVIRONMENT_FILE).write_text('{"starts": [{"host": "a", "from_a_later_version": 1}]}')
    assert [start.host for start in read_environments(tmp_path)] == ["a"]
    (tmp_path / "file").touch()
    record_environment(tmp_path / "file")


def test_a_record_that_the_disk_cannot_read_now_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    record_environment(tmp_path, lambda: 1.0)
    with monkeypatch.context() as broken:

        def fail(path: Path) -> bytes:
            raise OSError(24, "Too many open files")

        broken.setattr(Path, "read_bytes", fail)
        record_environment(tmp_path, lambda: 2.0)
    assert "this start was not added" in caplog.text
    assert [start.time for start in read_environments(tmp_path)] == [1.0]
