"""Folders of one process: they stay while it lives and while a server may load them, and go afterwards."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from asyncrl.engine.fleet.folders import Folders
from asyncrl.errors import WeightsError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import run_directory, versions_in
from tests.helpers import GENEROUS_S, OWN_RUN, async_until
from tests.weights.fakes import Killed, some_tensors

pytestmark = pytest.mark.slow

LOAD_S = 300.0


def nothing(folder: Path) -> None:
    """A version without a configuration."""


def killed_actor(parent: Path, run: RunIdentity = OWN_RUN) -> Path:
    """The directory of an actor that was killed in the middle of its third version."""

    def fill(folder: Path) -> None:
        if folders.path(2).exists():
            raise Killed

    folders = Folders(parent, fill, run, load_s=LOAD_S)
    for version in (1, 2):
        folders.write(version, some_tensors())
    with pytest.raises(Killed):
        folders.write(3, some_tensors())
    assert len(list(folders.directory.iterdir())) == 3
    return folders.directory


def untouched_for(directory: Path, seconds: float) -> None:
    os.utime(directory, (time.time() - seconds,) * 2)


def actor(parent: Path, run: RunIdentity = OWN_RUN) -> Folders:
    return Folders(parent, nothing, run, load_s=LOAD_S)


def test_what_a_killed_actor_left_goes_once_no_server_can_be_loading_it(tmp_path: Path) -> None:
    left = killed_actor(tmp_path)
    folders = actor(tmp_path)
    untouched_for(left, LOAD_S)
    folders.tend()
    assert sorted(versions_in(left)) == [1, 2], "a server may be loading it"
    untouched_for(left, 3 * LOAD_S)
    folders.tend()
    assert list(tmp_path.glob("*/*")) == [folders.directory]


def test_a_directory_that_cannot_be_removed_keeps_no_other_from_its_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = [killed_actor(tmp_path) for _ in range(3)]
    for each in left:
        untouched_for(each, 3 * LOAD_S)
    remove = shutil.rmtree

    def fails_once(path: Path) -> None:
        if path == left[1]:
            raise PermissionError("no")
        remove(path)

    monkeypatch.setattr(shutil, "rmtree", fails_once)
    folders = actor(tmp_path)
    folders.tend()
    assert set(tmp_path.glob("*/*")) == {folders.directory, left[1]}


def test_a_living_actors_folders_stay_however_long_no_version_comes(tmp_path: Path) -> None:
    idle, other = actor(tmp_path), actor(tmp_path)
    idle.write(1, some_tensors())
    untouched_for(idle.directory, 3 * LOAD_S)

    async def live() -> None:
        before = idle.directory.stat().st_mtime
        keeper = asyncio.create_task(idle.keep())
        await async_until(lambda: idle.directory.stat().st_mtime > before)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)

    asyncio.run(live())
    other.tend()
    assert list(versions_in(idle.directory)) == [1]


def test_actors_whose_machine_slept_do_not_take_each_other_for_killed(tmp_path: Path) -> None:
    actors = actor(tmp_path), actor(tmp_path)
    for each in actors:
        each.write(1, some_tensors())
        untouched_for(each.directory, 3 * LOAD_S)
    for each in (*actors, *actors):
        each.tend()
    assert [list(versions_in(each.directory)) for each in actors] == [[1], [1]]


def test_a_new_process_of_the_same_actor_has_folders_of_its_own(tmp_path: Path) -> None:
    first, second = actor(tmp_path), actor(tmp_path)
    first.write(1, some_tensors(1))
    second.write(1, some_tensors(2))
    second.close()
    assert list(versions_in(first.directory)) == [1]


def test_folders_of_other_runs_and_a_persons_files_stay(tmp_path: Path) -> None:
    for other in (RunIdentity("other", OWN_RUN.id), RunIdentity(OWN_RUN.name, "another")):
        untouched_for(killed_actor(tmp_path, other), 3 * LOAD_S)
    (tmp_path / "notes").write_text("a person's")
    kept = sorted(tmp_path.rglob("*"))
    for left in (killed_actor(tmp_path), killed_actor(tmp_path, RunIdentity(OWN_RUN.name))):
        untouched_for(left, 3 * LOAD_S)
    folders = actor(tmp_path)
    folders.tend()
    folders.close()
    for run in (OWN_RUN, RunIdentity(OWN_RUN.name)):
        run_directory(tmp_path, run).rmdir()
    assert sorted(tmp_path.rglob("*")) == kept


def test_folders_are_closed_after_the_version_that_is_being_written_and_take_no_other(tmp_path: Path) -> None:
    begun, go_on = Event(), Event()

    def slowly(folder: Path) -> None:
        begun.set()
        go_on.wait(GENEROUS_S)

    folders = Folders(tmp_path, slowly, OWN_RUN)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(folders.write, 1, some_tensors())
        assert begun.wait(GENEROUS_S)
        closing = threads.submit(folders.close)
        assert not closing.done()
        go_on.set()
        first.result()
        closing.result()
    with pytest.raises(WeightsError, match="closed"):
        folders.write(2, some_tensors())
    folders.tend()
    assert not list(tmp_path.glob("*/*"))
