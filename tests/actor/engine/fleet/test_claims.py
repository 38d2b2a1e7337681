"""What a killed actor held is removed by the next one on its machine; what a living one holds never is."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest

from asyncrl.actor.engine.fleet.claims import CLAIM
from asyncrl.actor.engine.fleet.folders import Folders
from asyncrl.errors import ConfigError, WeightsError
from asyncrl.types import RunIdentity
from asyncrl.weights.folders import versions_in
from tests.helpers import GENEROUS_S, OWN_RUN, until
from tests.weights.fakes import some_tensors

LOAD_S = 300.0
ANOTHER = """
import sys, time
from pathlib import Path
from asyncrl.actor.engine.fleet.folders import Folders
from tests.helpers import OWN_RUN
from tests.weights.fakes import some_tensors
folders = Folders(Path(sys.argv[1]), lambda folder: None, OWN_RUN)
folders.write(1, some_tensors())
print("written", flush=True)
time.sleep(1000)
"""
KILLED_WHILE_REMOVING = """
import os, shutil, sys
from pathlib import Path
from asyncrl.actor.engine.fleet.folders import Folders
from tests.helpers import OWN_RUN
from tests.weights.fakes import some_tensors
folders = Folders(Path(sys.argv[1]), lambda folder: None, OWN_RUN)
folders.write(1, some_tensors())
rmdir = os.rmdir
os.rmdir = lambda *at, **options: (rmdir(*at, **options), os._exit(0))
folders.close()
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
    Folders(held / "actor-new", nothing, OWN_RUN, load_s=LOAD_S)


def push(held: Path) -> None:
    Folders(held / "actor-new", nothing, OWN_RUN, load_s=LOAD_S).write(2, some_tensors())


@pytest.mark.parametrize("begin", [start, push])
def test_what_a_killed_actor_held_is_removed_once_no_server_can_be_loading_it(
    tmp_path: Path, begin: Callable[[Path], None]
) -> None:
    gone = tmp_path / "actor-gone"
    with another_actor(gone) as actor:
        long_ago(gone)
        begin(tmp_path)
        assert list(versions_in(gone, OWN_RUN)) == [1], "its actor lives"
        actor.kill()
        actor.wait()
        os.utime(gone / CLAIM)
        begin(tmp_path)
        assert list(versions_in(gone, OWN_RUN)) == [1], "a server may be loading it"
        long_ago(gone)
        begin(tmp_path)
    assert {each.name for each in tmp_path.iterdir()} <= {"actor-new"}


def test_an_actor_that_goes_on_removes_what_another_leaves(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "actor-on", nothing, OWN_RUN, load_s=LOAD_S)
    with another_actor(tmp_path / "actor-gone") as actor:
        actor.kill()
        actor.wait()
        long_ago(tmp_path / "actor-gone")
        folders.write(1, some_tensors())
    assert [each.name for each in tmp_path.iterdir()] == ["actor-on"]


def test_what_another_machine_claimed_and_what_nobody_claimed_stays(tmp_path: Path) -> None:
    for name in ("actor-elsewhere", "actor-old"):
        Folders(tmp_path / name, nothing, OWN_RUN).write(1, some_tensors())
    (tmp_path / "actor-elsewhere" / CLAIM).write_text(
        json.dumps({"run": OWN_RUN.name, "id": OWN_RUN.id, "host": "elsewhere"})
    )
    long_ago(tmp_path / "actor-elsewhere")
    (tmp_path / "actor-old" / CLAIM).unlink()
    start(tmp_path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["actor-elsewhere", "actor-old"]


def test_a_load_that_begins_late_counts_from_then_on(tmp_path: Path) -> None:
    folders = Folders(tmp_path / "held", nothing, OWN_RUN)
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
        assert list(versions_in(tmp_path / "actor-0", OWN_RUN)) == [1]


def test_an_actor_whose_name_another_one_has_that_lives_is_refused_and_removes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.actor.engine.fleet.folders.PREDECESSOR_S", 0.1)
    early = Folders(tmp_path / "actor-0", nothing, OWN_RUN)
    with another_actor(tmp_path / "actor-0") as first:
        long_ago(tmp_path / "actor-0")
        with pytest.raises(ConfigError, match="actor-0 belongs to another actor"):
            Folders(tmp_path / "actor-0", nothing, OWN_RUN)
        with pytest.raises(WeightsError, match="actor-0 belongs to another actor"):
            early.write(2, some_tensors())
        assert list(versions_in(tmp_path / "actor-0", OWN_RUN)) == [1]
        first.kill()
        first.wait()
        early.write(2, some_tensors())
    long_ago(tmp_path / "actor-0")
    start(tmp_path)
    assert sorted(versions_in(tmp_path / "actor-0", OWN_RUN)) == [1, 2]


def test_where_there_are_no_locks_directories_are_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    folders = Folders(tmp_path / "actor-0", nothing, OWN_RUN)
    for version in range(2):
        folders.write(version, some_tensors())
    assert caplog.text.count("cannot be claimed") == 1
    folders.close()
    assert not list(tmp_path.iterdir())


def test_what_an_earlier_life_wrote_goes_once_no_server_can_be_loading_it(tmp_path: Path) -> None:
    Folders(tmp_path / "actor-0", nothing, OWN_RUN).write(100, some_tensors())
    now = time.time()
    second = Folders(tmp_path / "actor-0", nothing, OWN_RUN, load_s=LOAD_S, clock=lambda: now)
    for version in range(4):
        second.write(version, some_tensors())
    assert sorted(versions_in(tmp_path / "actor-0", OWN_RUN)) == [2, 3, 100], (
        "a server of the first life may be loading it"
    )
    now += LOAD_S + 60
    second.write(4, some_tensors())
    assert sorted(versions_in(tmp_path / "actor-0", OWN_RUN)) == [3, 4]


def test_an_actor_that_starts_while_another_one_looks_whether_it_lives_is_claimed(tmp_path: Path) -> None:
    Folders(tmp_path / "actor-0", nothing, OWN_RUN).write(1, some_tensors())
    probe = (tmp_path / "actor-0" / CLAIM).open("r+")
    fcntl.flock(probe, fcntl.LOCK_EX | fcntl.LOCK_NB)
    Timer(0.2, probe.close).start()
    folders = Folders(tmp_path / "actor-0", nothing, OWN_RUN)
    folders.write(2, some_tensors())
    long_ago(tmp_path / "actor-0")
    start(tmp_path)
    assert sorted(versions_in(tmp_path / "actor-0", OWN_RUN)) == [1, 2]


def test_a_claim_that_is_a_new_one_by_the_time_it_is_locked_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone, flock, again = tmp_path / "actor-0", fcntl.flock, []
    Folders(gone, nothing, OWN_RUN).write(1, some_tensors())
    long_ago(gone)

    def slow_lock(*arguments: Any) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        shutil.rmtree(gone)
        again.append(Folders(gone, nothing, OWN_RUN))
        again[0].write(2, some_tensors())
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", slow_lock)
    start(tmp_path)
    assert list(versions_in(gone, OWN_RUN)) == [2]


def test_what_is_left_by_somebody_who_is_killed_while_removing_is_removed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED_WHILE_REMOVING, tmp_path / "actor-0"], check=True)
    [left] = tmp_path.iterdir()
    long_ago(left)
    start(tmp_path)
    assert not list(tmp_path.iterdir())


def test_folders_are_closed_once_the_version_under_way_is_written_and_take_no_other(tmp_path: Path) -> None:
    begun, go_on = Event(), Event()

    def slowly(folder: Path) -> None:
        begun.set()
        go_on.wait(GENEROUS_S)

    folders = Folders(tmp_path / "actor-0", slowly, OWN_RUN)
    with ThreadPoolExecutor(3) as threads:
        first = threads.submit(folders.write, 1, some_tensors())
        assert begun.wait(GENEROUS_S)
        queued, closing = threads.submit(folders.write, 2, some_tensors()), threads.submit(folders.close)
        until(lambda: folders._closed)
        assert not closing.done()
        go_on.set()
        first.result()
        closing.result()
        with pytest.raises(WeightsError, match="closed"):
            queued.result()
    assert not list(tmp_path.iterdir())


PERSON = {"v3/notes": "mine", "v00000009/notes": "mine", ".v00000001.partial/notes": "mine", "log": "mine"}


def persons(directory: Path) -> dict[str, str]:
    """The files that are not an actor's."""
    files = [each for each in directory.rglob("*") if each.is_file() and each.name in ("notes", "log")]
    return {str(each.relative_to(directory)): each.read_text() for each in files}


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """An actor's directory in which a person has files too."""
    for name, text in PERSON.items():
        (tmp_path / "actor-0" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "actor-0" / name).write_text(text)
    return tmp_path / "actor-0"


def test_a_persons_files_in_an_actors_directory_stay_when_it_starts_pushes_and_closes(shared: Path) -> None:
    folders = Folders(shared, nothing, OWN_RUN, load_s=0.0)
    for version in range(5):
        folders.write(version, some_tensors())
    assert sorted(versions_in(shared, OWN_RUN)) == [3, 4]
    folders.close()
    assert persons(shared) == PERSON
    assert not versions_in(shared, OWN_RUN)
    assert not (shared / CLAIM).exists()


def test_a_persons_files_stay_when_a_killed_actors_directory_is_cleared(shared: Path) -> None:
    with another_actor(shared) as actor:
        actor.kill()
        actor.wait()
    long_ago(shared)
    start(shared.parent)
    assert persons(shared) == PERSON
    assert not versions_in(shared, OWN_RUN)


def test_a_version_in_whose_way_a_persons_folder_is_is_refused_by_name(shared: Path) -> None:
    folders = Folders(shared, nothing, OWN_RUN)
    with pytest.raises(WeightsError, match=r"v00000009 carries no run's mark.* set weights\.dir"):
        folders.write(9, some_tensors())
    assert persons(shared) == PERSON


@pytest.mark.parametrize("other", [RunIdentity("other", OWN_RUN.id), RunIdentity(OWN_RUN.name, "another")], ids=str)
def test_what_a_killed_actor_of_another_run_held_is_neither_removed_nor_taken_over(
    tmp_path: Path, other: RunIdentity
) -> None:
    gone = tmp_path / "actor-0"
    Folders(gone, nothing, other).write(1, some_tensors())
    long_ago(gone)
    start(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(f"actor-0 belongs to an actor of run {other}, not of {OWN_RUN}")):
        Folders(gone, nothing, OWN_RUN)
    assert list(versions_in(gone, other)) == [1]


def test_an_actor_that_knew_only_its_runs_name_clears_what_it_left_once_it_knows_the_id(tmp_path: Path) -> None:
    gone = tmp_path / "actor-0"
    Folders(gone, nothing, RunIdentity(OWN_RUN.name)).write(1, some_tensors())
    long_ago(gone)
    Folders(gone, nothing, OWN_RUN).close()
    assert not gone.exists()


def test_an_actor_that_another_one_kept_out_removes_nothing_of_it_when_it_ends(tmp_path: Path) -> None:
    late = Folders(tmp_path / "actor-0", nothing, OWN_RUN)
    with another_actor(tmp_path / "actor-0"):
        with pytest.raises(WeightsError, match="belongs to another actor"):
            late.write(2, some_tensors())
        late.close()
        assert list(versions_in(tmp_path / "actor-0", OWN_RUN)) == [1]
