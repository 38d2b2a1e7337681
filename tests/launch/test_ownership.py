"""A run folder has one owner at a time, which others may ask to stop."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from asyncrl.config.compose import read
from asyncrl.config.schema import ModelConfig, RunConfig, TrainConfig
from asyncrl.errors import ConfigError, StoreError
from asyncrl.launch.addresses import RunAddresses
from asyncrl.launch.claim import claim
from asyncrl.launch.ownership import NotRunningError, OwnerWatch, StopRequests, exclusively, stop
from asyncrl.launch.resume import words_of
from asyncrl.machine.owner import OWNER_FILE, owner_of
from asyncrl.runs.finding import run_with_store
from tests.helpers import until

OWNS = """
import pathlib, sys, time
from asyncrl.launch.ownership import StopRequests, exclusively
folder = pathlib.Path(sys.argv[1])
with exclusively(folder):
    requests = StopRequests(folder)
    (folder / "owned").touch()
    while not requests.arrived(): time.sleep(0.05)
    (folder / "ended").touch()
"""


@pytest.fixture
def owner(tmp_path: Path) -> subprocess.Popen[bytes]:
    """A process that owns the folder until it is asked to stop."""
    process = subprocess.Popen([sys.executable, "-c", OWNS, str(tmp_path)])
    until((tmp_path / "owned").exists)
    return process


def test_a_run_folder_has_one_owner_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "sleep", waits.append)
    with exclusively(tmp_path), pytest.raises(ConfigError, match="is being run by another"), exclusively(tmp_path):
        pass
    assert sum(waits) < 0.5, "nobody waits long for an owner"
    assert owner_of(tmp_path) is None


@pytest.mark.slow
def test_a_request_of_another_process_is_taken_and_waits_for_the_end(
    owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    shown: list[str] = []
    found = owner_of(tmp_path)
    assert found is not None
    assert (found.host, found.pid) == (socket.gethostname(), owner.pid)
    stop(tmp_path, shown.append)
    assert (tmp_path / "ended").exists()
    assert owner.wait() == 0
    assert f"asked process {owner.pid} on {socket.gethostname()} to stop" in shown[0]
    assert {path.name for path in tmp_path.iterdir()} == {"supervised", "owned", "ended"}
    with pytest.raises(NotRunningError, match="no `asyncrl train` runs"):
        stop(tmp_path, shown.append)


def test_an_owner_that_was_killed_owns_nothing_and_leaves_no_request(
    owner: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    owner.send_signal(signal.SIGSTOP)

    def kill(_: str) -> None:
        owner.kill()
        owner.wait()

    with pytest.raises(NotRunningError, match="ended before it stopped"):
        stop(tmp_path, kill)
    assert owner_of(tmp_path) is None
    assert not (tmp_path / "stop").exists()


@pytest.mark.slow
def test_the_owner_on_another_host_is_known_by_the_shared_folder_alone(tmp_path: Path) -> None:
    (tmp_path / "supervised").write_text(json.dumps({"host": "elsewhere", "pid": 7}))
    requests, shown, asked = StopRequests(tmp_path), list[str](), threading.Event()

    def ends() -> None:
        until(lambda: len(shown) == 2 and requests.arrived())
        asked.set()
        # This is the order of an owner that ends well. An owner that leaves first has ended before it stopped.
        (tmp_path / "stopping").unlink()
        (tmp_path / "supervised").write_text("")

    thread = threading.Thread(target=ends)
    thread.start()
    times = iter([0.0])
    try:
        stop(tmp_path, shown.append, lambda: next(times, 1000.0))
    finally:
        thread.join()
    assert asked.is_set()
    assert "process 7 on elsewhere has not reacted for 90 s" in shown[1]


def test_a_name_of_an_owner_that_cannot_be_read_is_an_error_and_no_owner(tmp_path: Path) -> None:
    (tmp_path / "supervised").mkdir()
    with pytest.raises(OSError, match="supervised"):
        owner_of(tmp_path)


def test_a_request_from_before_the_start_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    times = iter(range(100))
    with exclusively(tmp_path):
        requests = StopRequests(tmp_path, lambda: next(times))
        assert not requests.arrived()
        (tmp_path / "stop").touch()
        assert requests.arrived()


@pytest.mark.slow
def test_a_run_goes_on_with_what_its_folder_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir, tasks = tmp_path / "it's mine" / "first", tmp_path / "tasks.parquet"
    tasks.touch()
    run_dir.mkdir(parents=True)
    config = TrainConfig(model=ModelConfig(path="m"))
    config.data.train, config.learner.steps, config.run.dir, config.run.name = [str(tasks)], 7, "elsewhere", "other"
    claim(config, run_dir)
    monkeypatch.chdir(run_dir)
    for name, folder in ((str(run_dir), run_dir.parent), (".", run_dir.parent)):
        resumed = read([*words_of(name), "learner.steps=9"])
        assert (resumed.run.dir, resumed.run.name) == (str(folder), "first")
        assert (resumed.learner.steps, resumed.data.train) == (9, [str(tasks)])
    addresses = RunAddresses.of(config)
    given = addresses.values()
    config.network.replay_host, config.network.replay_port = "10.0.0.1", 41_000
    config.cluster.actors, config.actor.concurrency = 2, 2048
    replace(addresses, run=RunConfig("first", str(run_dir.parent))).record_left_open(
        given | {"network.replay_port": 0}, {"cluster.actors": None, "actor.concurrency": 4096}
    )
    claim(config, run_dir)
    resumed = read([*words_of(str(run_dir)), "network.weights_port=7", "cluster.actors=1"])
    network = resumed.network
    assert (network.replay_host, network.replay_port, network.weights_port) == (None, 0, 7)
    # The episodes that the launcher had divided among two actors are one actor's again.
    assert (resumed.cluster.actors, resumed.actor.concurrency) == (1, 4096)
    assert read([*words_of(str(run_dir)), "network.replay_port=6"]).network.replay_port == 6
    with pytest.raises(ConfigError, match="nothing is not a run"):
        words_of("nothing")


def test_another_host_of_the_learner_knows_when_the_first_one_has_left_the_run_and_when_it_was_only_killed(
    tmp_path: Path,
) -> None:
    now = 0.0
    watch = OwnerWatch(tmp_path, lambda: now)

    def later(seconds: float) -> bool:
        nonlocal now
        now += seconds
        return watch.has_left()

    assert not any(later(10.0) for _ in range(3)), "nobody was there yet"
    (tmp_path / "config.yaml").touch()
    with exclusively(tmp_path):
        assert not any(later(10.0) for _ in range(3))
        name = (tmp_path / OWNER_FILE).read_text()
    assert not later(2.0)
    (tmp_path / OWNER_FILE).write_text(name)
    assert not any(later(10.0) for _ in range(3)), "who was killed will be back"
    (tmp_path / OWNER_FILE).write_text("")
    assert later(10.0)


def test_a_run_whose_replay_has_no_store_yet_starts(tmp_path: Path) -> None:
    with exclusively(tmp_path), pytest.raises(StoreError, match="is starting: its replay has no store yet"):
        run_with_store(str(tmp_path))
    tmp_path.mkdir(exist_ok=True)
    with pytest.raises(ConfigError, match="is not a run: name the folder of a run"):
        run_with_store(str(tmp_path))


def test_a_start_that_is_refused_leaves_no_folder_that_it_made_and_those_of_others(tmp_path: Path) -> None:
    for name in ("one", "two"):
        with pytest.raises(ConfigError, match="refused"), exclusively(tmp_path / "runs" / name):
            raise ConfigError("refused")
        assert list(tmp_path.iterdir()) == []
    with exclusively(tmp_path / "runs" / "one"), exclusively(tmp_path / "runs" / "two"):
        (tmp_path / "runs" / "two" / "logs").mkdir()
    assert [each.name for each in (tmp_path / "runs").iterdir()] == ["two"]
    with exclusively(tmp_path / "runs" / "one"):
        pass
    assert (tmp_path / "runs" / "two" / "logs").exists()


def test_a_start_while_an_owner_removes_the_folder_is_the_only_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, lock = ExitStack(), fcntl.flock
    first.enter_context(exclusively(tmp_path / "run"))

    def late(file: TextIO, how: int) -> None:
        first.close()  # It has started nothing, and removes the folder.
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", late)
    with exclusively(tmp_path / "run"):
        assert (tmp_path / "run").exists()
        with pytest.raises(ConfigError, match="is being run"), exclusively(tmp_path / "run"):
            pass


def test_a_folder_that_cannot_be_written_or_locked_is_named_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file/run cannot be run: .*Not a directory.* set run\.dir"):
        exclusively(tmp_path / "file" / "run").__enter__()

    def refuses(file: TextIO, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuses)
    with pytest.raises(ConfigError, match="No locks available"):
        exclusively(tmp_path / "run").__enter__()


def test_who_looks_for_the_owner_does_not_keep_a_run_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / OWNER_FILE).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        waits = iter(range(100))
        # While the start waits for it, which is for longer than for an owner.
        monkeypatch.setattr(time, "sleep", lambda _: looking.close() if next(waits) == 50 else None)
        with exclusively(tmp_path):
            assert owner_of(tmp_path) is not None


def test_a_start_that_somebody_looks_at_for_long_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: None)
    with (tmp_path / OWNER_FILE).open("w") as looking:
        fcntl.flock(looking, fcntl.LOCK_SH)
        with pytest.raises(ConfigError, match="another process reads it and does not finish"), exclusively(tmp_path):
            pass
