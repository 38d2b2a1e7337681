"""What a killed actor held is removed by the next one on its machine; what a living one holds never is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.actor.engine.fleet.claims import CLAIM
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.weights.folders import versions_in
from tests.weights.fakes import some_tensors

LOAD_S = 300.0
ANOTHER = """
import sys, time
from pathlib import Path
from asyncrl.actor.engine.fleet.folders import Folders
from tests.weights.fakes import some_tensors
folders = Folders(Path(sys.argv[1]), lambda folder: None)
folders.write(1, some_tensors())
print("written", flush=True)
time.sleep(1000)
"""


@contextmanager
def another_actor(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds a version under `directory`."""
    process = subprocess.Popen([sys.executable, "-c", ANOTHER, directory], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def nothing(folder: Path) -> None:
    """A version without a configuration."""


def long_ago(directory: Path) -> None:
    """Nobody has begun to load from it for longer than a server is given."""
    os.utime(directory / CLAIM, (time.time() - LOAD_S - 60,) * 2)


def start(held: Path) -> None:
    Folders(held / "actor-new", nothing, load_s=LOAD_S)


def push(held: Path) -> None:
    Folders(held / "actor-new", nothing, load_s=LOAD_S).write(2, some_tensors())


@pytest.mark.parametrize("begin", [start, push])
def test_what_a_killed_actor_held_is_removed_once_no_server_can_be_loading_it(
    tmp_path: Path, begin: Callable[[Path], None]
) -> None:
    gone = tmp_path / "actor-gone"
    with another_actor(gone) as actor:
        long_ago(gone)
        begin(tmp_path)
        assert list(versions_in(gone)) == [1], "its actor lives"
        actor.kill()
        actor.wait()
        os.utime(gone / CLAIM)
        begin(tmp_path)
        assert list(versions_in(gone)) == [1], "a server may be loading it"
        long_ago(gone)
        begin(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} <= {"actor-new"}


def test_an_actor_that_goes_on_removes_what_another_leaves(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "actor-on", nothing, load_s=LOAD_S)
    with another_actor(tmp_path / "actor-gone") as actor:
        actor.kill()
        actor.wait()
        long_ago(tmp_path / "actor-gone")
        folders.write(1, some_tensors())
    assert [each.name for each in tmp_path.iterdir()] == ["actor-on"]


def test_what_another_machine_claimed_and_what_nobody_claimed_stays(tmp_path: Path) -> None:
    for name in ("actor-elsewhere", "actor-old"):
        Folders(tmp_path / name, nothing).write(1, some_tensors())
    (tmp_path / "actor-elsewhere" / CLAIM).write_text("claimed by a process of asyncrl on elsewhere\n")
    long_ago(tmp_path / "actor-elsewhere")
    (tmp_path / "actor-old" / CLAIM).unlink()
    start(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["actor-elsewhere", "actor-old"]


def test_a_load_that_begins_late_counts_from_then_on(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "held", nothing)
    path = folders.write(1, some_tensors())
    long_ago(tmp_path / "held")
    with folders.reading(path):
        assert time.time() - (tmp_path / "held" / CLAIM).stat().st_mtime < LOAD_S


def test_a_killed_actor_that_is_started_again_claims_what_is_its_own(tmp_path: Path) -> None:
    with another_actor(tmp_path / "actor-0") as actor:
        actor.kill()
        actor.wait()
    long_ago(tmp_path / "actor-0")
    with another_actor(tmp_path / "actor-0"):
        long_ago(tmp_path / "actor-0")
        start(tmp_path)
        assert list(versions_in(tmp_path / "actor-0")) == [1]


def test_a_directory_that_cannot_be_claimed_is_used_all_the_same_and_claimed_later(tmp_path: Path, caplog) -> None:
    with another_actor(tmp_path / "actor-0") as first:
        second = Folders(tmp_path / "actor-0", nothing)
        second.write(2, some_tensors())
        assert "cannot be claimed" in caplog.text
        first.kill()
        first.wait()
        second.write(3, some_tensors())
    long_ago(tmp_path / "actor-0")
    start(tmp_path)
    assert sorted(versions_in(tmp_path / "actor-0")) == [2, 3]
