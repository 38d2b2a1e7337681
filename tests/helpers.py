"""Small valid nouns for tests."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from asyncrl.__main__ import main
from asyncrl.msgpack_values import MAX_INTEGER_BYTES
from asyncrl.observe.metrics import TRAINED_EPISODES, LoggedEpisode, Sink
from asyncrl.observe.spans import NoSpans
from asyncrl.types import DEMONSTRATED, Finish, Labels, Role, RunIdentity, Step, Task, Ticket, Trajectory, Turn, runs_of

TOO_LARGE = 1 << 8 * MAX_INTEGER_BYTES
"""An integer that no message can carry."""
GENEROUS_S = 240
"""The limit for what a test waits for: below pytest's own limit, and far above what a slow, busy machine needs."""
OWN_RUN = RunIdentity("run", "its id")
NEVER_BEGINS = [sys.executable, "-c", "import os, sys; os.read(int(sys.argv[1]), 1)"]
"""The command of a process of the sandbox that never begins its program, and ends with its caller."""


def status_of(command: str, *words: object) -> int:
    """The exit status of `asyncrl COMMAND WORDS`, which runs in this process. A role writes to the files 1 and 2, which
    the fixture capfd reads."""
    argv, path, streams = sys.argv, [*sys.path], (sys.stdout, sys.stderr)
    try:
        return main([command, *map(str, words)])
    except SystemExit as refused:  # by argparse
        return int(refused.code or 0)
    finally:
        sys.argv, sys.path[:] = argv, path
        sys.stdout, sys.stderr = streams


def make_task(index: int = 0, tools_kwargs: Mapping[str, Any] | None = None, **changes: Any) -> Task:
    if tools_kwargs is not None:
        changes["extra_info"] = {**changes.get("extra_info", {}), "tools_kwargs": tools_kwargs}
    values: dict[str, Any] = {
        "id": f"task-{index}",
        "messages": [{"role": "user", "content": f"{index}+1"}],
        "ground_truth": str(index + 1),
        "data_source": "test",
    }
    return Task(**{**values, **changes})


def make_trajectory(
    ticket: Ticket | None = None,
    version: int = 0,
    length: int = 8,
    versions: NDArray[np.int32] | None = None,
    **changes: Any,
) -> Trajectory:
    """A prompt and an answer of one half each. `versions` are the tokens' own, where they are not all `version`."""
    prompt = length // 2
    mask = np.arange(length) >= prompt
    values: dict[str, Any] = {
        "id": ticket.id if ticket else "t000000001.0.0",
        "task_id": ticket.task.id if ticket else "task-0",
        "group_id": ticket.group_id if ticket else "t000000001",
        "member": ticket.member if ticket else 0,
        "tokens": np.arange(length, dtype=np.int32),
        "logprobs": np.where(mask, -0.5, 0).astype(np.float32),
        "turns": (Turn(0, prompt, Role.PROMPT), Turn(prompt, length, Role.ASSISTANT, "stop")),
        "steps": (Step(prompt, length),),
        "finish": Finish.COMPLETED,
    }
    if versions is None:
        versions = np.where(mask, version, -1).astype(np.int32)
    return Trajectory(**{"version_runs": runs_of(versions), **values, **changes})


def make_demonstration(ticket: Ticket | None = None, length: int = 8, **changes: Any) -> Trajectory:
    """Make the trajectory of a task's demonstration as an actor does: one half is the prompt, the other the answer."""
    versions = np.where(np.arange(length) >= length // 2, DEMONSTRATED, -1).astype(np.int32)
    shown: dict[str, Any] = {"logprobs": np.zeros(length, np.float32), "finish": Finish.DEMONSTRATION}
    return make_trajectory(ticket, length=length, versions=versions, **{**shown, **changes})


def make_played(ticket: Ticket, version: int = 0, **changes: Any) -> Trajectory:
    """Make the trajectory that an actor delivers for a ticket: an episode of a policy version, or a demonstration."""
    if ticket.task.demonstration:
        return make_demonstration(ticket, **changes)
    return make_trajectory(ticket, version, **changes)


def make_labels(trajectory_id: str, reward: float = 1.0) -> Labels:
    return Labels(trajectory_id, reward, reward, "test")


def child_with(mark: str) -> psutil.Process:
    """The child of this process that has `mark` in its arguments. Fails if there is none, or more than one. Tests
    before may have left other children, of which some may have ended."""
    found = []
    for child in psutil.Process().children():
        with suppress(psutil.ZombieProcess, psutil.NoSuchProcess):
            if mark in " ".join(child.cmdline()):
                found.append(child)
    (process,) = found
    return process


def until(condition: Callable[[], Any], seconds: float = GENEROUS_S) -> Any:
    """The first truthy value of `condition`, polled; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        time.sleep(0.01)
    raise AssertionError(f"the condition did not come true within {seconds} s")


def whole_lines(file: Path) -> str:
    """The text of a file once its last line is complete, else an empty text. A process may write a line in parts."""
    text = file.read_text() if file.exists() else ""
    return text if text.endswith("\n") else ""


async def async_until(condition: Callable[[], Any], seconds: float = GENEROUS_S) -> Any:
    """`until` for coroutines: the event loop goes on between two looks at `condition`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := condition():
            return value
        await asyncio.sleep(0.002)
    raise AssertionError(f"the condition did not come true within {seconds} s")


def has_ended(pid: int) -> bool:
    """Return whether a process has ended. A zombie, whose parent has not asked for its status yet, has ended."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def living(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    """Return the processes that have not ended. A zombie has ended, and so has a process whose id another one got."""
    return [each for each in processes if each.is_running() and not has_ended(each.pid)]


class FakeSpans(NoSpans):
    """Keeps what is recorded: name, values, and the track or else the episode."""

    records = True

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.spans: list[tuple[str, dict[str, Any], str]] = []
        self.clocks: list[tuple[str, float]] = []

    def wall(self, at: float) -> float:
        return at

    def add(self, name: str, start: float, end: float, track: str = "", /, **values: Any) -> None:
        assert start <= end
        self.spans.append((name, {**values, "seconds": end - start}, track or values["episode"]))

    def measured_clock(self, peer: str, sent: float, theirs: float, received: float) -> None:
        assert sent <= received
        self.clocks.append((peer, theirs))

    @contextmanager
    def span(self, name: str, track: str = "", /, **values: Any) -> Iterator[dict[str, Any]]:
        start = self.clock()
        try:
            yield values
        finally:
            self.add(name, start, self.clock(), track, **values)

    def of(self, name: str) -> list[dict[str, Any]]:
        """The values of the spans of a name."""
        return [values for each, values, _ in self.spans if each == name]


class FakeMetrics(Sink):
    """A sink that keeps what is logged."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, Any]]] = []
        self.shown: list[tuple[int, list[LoggedEpisode]]] = []
        self.shown_held_out: list[tuple[int, list[LoggedEpisode]]] = []

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        shown = self.shown if table == TRAINED_EPISODES else self.shown_held_out
        shown.append((step, list(episodes)))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        self.rows.append((step, dict(values)))

    def of(self, name: str) -> dict[int, Any]:
        return {step: values[name] for step, values in self.rows if name in values}
