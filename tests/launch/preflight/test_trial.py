"""The process in which a start tries the user's own code, which may end it, crash it or block it."""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path

import pytest

from asyncrl.config.changes import values_of
from asyncrl.config.schema import TrainConfig
from asyncrl.data.reading import TaskFile
from asyncrl.errors import ConfigError, StoppedError
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.launch.preflight.trial import TrialProcess
from asyncrl.types import Task
from asyncrl.wire import Message
from tests.helpers import GENEROUS_S, has_ended, until
from tests.launch.preflight.in_process import InThisProcess
from tests.launch.preflight.test_preflight import config_of

MODULE = """
import asyncio
import ctypes
import os
import time
from pathlib import Path

from asyncrl.tools import Tool


class Moody(Tool):
    schema = {"name": "moody", "description": "it", "parameters": {"type": "object", "properties": {}}}

    async def create(self, fate="", file=""):
        self.fate, self.file = fate, file

    async def execute(self, arguments):
        if self.file:
            Path(self.file).write_text(str(os.getpid()))
        if self.fate == "end":
            os._exit(3)
        if self.fate == "crash":
            ctypes.string_at(0)
        if self.fate == "block":
            while True:
                time.sleep(1)
        if self.fate == "leave":
            raise SystemExit(4)
        return "well"


def ends(task, answer, trajectory):
    os._exit(0)
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> TrainConfig:
    (tmp_path / "moody_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "moody_code", raising=False)
    found = config_of(tmp_path, "hermes3", ["user"], ["moody_code.Moody"])
    found.actor.tool_timeout_s, found.actor.tool_retries = GENEROUS_S, 0
    return found


def task_of(config: TrainConfig, **kwargs: str) -> Task:
    (task,) = TaskFile(config.data.train).by_source().values()
    task.extra_info["tools_kwargs"] = {"moody": kwargs}  # type: ignore[index]
    return task


@pytest.mark.heavy
def test_code_that_ends_or_crashes_the_process_is_refused_with_its_line_and_the_next_episode_is_played(
    config: TrainConfig,
) -> None:
    with closing(TrialProcess(values_of(config), limit_s=GENEROUS_S)) as trial:
        assert trial.play("your code", task_of(config), "row 0") is not None
        with pytest.raises(
            ConfigError,
            match=r"with row 0, your own code ended its process with status 3 \(.*moody_code\.py, line 21\); "
            r"the tool moody \(.*moody_code\.py, line 11\) was called last",
        ):
            trial.play("your code", task_of(config, fate="end"), "row 0")
        with pytest.raises(ConfigError, match=r"ended its process by SIGSEGV \(.*moody_code\.py, line 23\); the tool"):
            trial.play("your code", task_of(config, fate="crash"), "row 0")
        with pytest.raises(ConfigError, match=r"tool moody.* failed .*SystemExit"):
            trial.play("your code", task_of(config, fate="leave"), "row 0")
        assert trial.play("your code", task_of(config), "row 0") is not None


@pytest.mark.slow
def test_a_rule_that_ends_its_process_does_not_start(config: TrainConfig) -> None:
    config.actor.tools, config.scoring.rule = [], "moody_code.ends"
    said = r"ended its process with status 0 \(.*line 33\); scoring\.rule: moody_code\.ends \(.*line 32\) was"
    with pytest.raises(ConfigError, match=said):
        preflight(config)


@pytest.mark.heavy
def test_code_that_blocks_is_ended_after_the_limit_and_its_line_is_named(
    config: TrainConfig, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(TrialProcess(values_of(config), limit_s=5.0)) as trial:
        until(lambda: trial.play("your code", task_of(config), "row 0"))  # On a busy machine the first is slow, too.
        caplog.clear()
        assert trial.play("your code", task_of(config, fate="block"), "row 0") is None
    [said] = (each.getMessage() for each in caplog.records if each.name == "asyncrl.train")
    assert "with row 0, the episode that tries your own code took over 5 s, so it is left out" in said
    assert "the tool moody (" in said
    assert "moody_code.py, line 26 and may be slow" in said


def test_a_trial_has_no_file_that_a_killed_start_could_leave(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = tmp_path / "temporary"
    files.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(files))
    with closing(TrialProcess(values_of(config), open_pool=InThisProcess)) as trial:
        assert trial.play("your code", task_of(config), "row 0") is not None
        assert not list(files.iterdir())


@pytest.mark.slow
def test_a_stop_ends_code_that_blocks_at_once(config: TrainConfig, tmp_path: Path) -> None:
    stop, pid = threading.Event(), tmp_path / "pid"

    def stop_once_it_blocks() -> None:
        until(lambda: pid.exists() and pid.read_text() != "")
        stop.set()

    stopping = threading.Thread(target=stop_once_it_blocks)
    with closing(TrialProcess(values_of(config), stop, limit_s=GENEROUS_S)) as trial:
        stopping.start()
        with pytest.raises(StoppedError, match="nothing was started"):
            trial.play("your code", task_of(config, fate="block", file=str(pid)), "row 0")
    stopping.join()
    assert has_ended(int(pid.read_text()))


class Slow:
    """A process that is too slow for its first request, at the line `line`."""

    def __init__(self, line: str) -> None:
        self.line = line
        self.requests = 0

    def submit(self, messages: Sequence[Message], read: Callable[[Message], Message]) -> Future[Message]:
        self.requests += 1
        future: Future[Message] = Future()
        future.set_result(Message("slow", 0, {"line": self.line}) if self.requests == 1 else Message("done"))
        return future

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("line", "requests", "warnings"), [("", 2, 0), ("mine.py, line 3", 1, 1)])
def test_a_request_is_repeated_once_if_no_line_of_the_users_code_was_slow(
    config: TrainConfig, caplog: pytest.LogCaptureFixture, line: str, requests: int, warnings: int
) -> None:
    pool = Slow(line)
    with closing(TrialProcess(values_of(config), open_pool=lambda settings: pool)) as trial:
        trial.create("your code", task_of(config), "row 0")
    assert (pool.requests, len(caplog.records)) == (requests, warnings)
