"""Runs the user's own code in a child process before a run starts, since such code may block or end its process. This
file starts the child process and sends requests to it; `trying.py` is its program."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeVar

from asyncrl import wire
from asyncrl.errors import ConfigError, ScoringError, StoppedError, WireError
from asyncrl.scoring.judges import EndedError, JudgePool, Limits, SlowStartError
from asyncrl.types import Task, Trajectory
from asyncrl.wire import Message

log = logging.getLogger("asyncrl.train")

T = TypeVar("T")

TRIAL_S = 10.0
"""The seconds that the user's code may take at each request."""
MARGIN_S = 1.0
"""The process is ended this long after the limit. Code that can be interrupted is interrupted at the limit."""
LOOK_S = 0.1
"""The pause between two looks at the event that stops the start."""
PROGRAM = "asyncrl.launch.preflight.trying"
MOST_BYTES = 1 << 16
"""The maximum number of bytes that are read from a note."""
WORDS = "I do not know."
"""An answer that a rule should score as wrong."""


class Pool(Protocol):
    """The methods of JudgePool that a trial needs."""

    def submit(self, messages: Sequence[Message], read: Callable[[Message], Message]) -> Future[Message]: ...

    def close(self) -> None: ...


def open_trial_pool(settings: Mapping[str, Any]) -> Pool:
    """The process that tries the user's code. It starts with the first request."""
    # A message with the line that ran is enough for the person who waits for the start.
    limits = Limits("your own code", settings["timeout_s"], "the limit", None, stacks_level=logging.DEBUG)
    return JudgePool(PROGRAM, settings, 1, limits, starts_later=True, files=[settings["running"]])


class Note:
    """A short text in the open file `file`, which the process and its child share. The file has no name, so that it
    does not stay on the disk, however these processes end."""

    def __init__(self, file: int) -> None:
        self.file = file

    def write(self, text: str) -> None:
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, text.encode(errors="replace"), 0)

    def read(self) -> str:
        return os.pread(self.file, MOST_BYTES, 0).decode(errors="replace")


class TrialProcess:
    """Has a child process run the user's code. `values` are all values of the configuration, and each request may take
    `limit_s`. Setting `stop` ends a request."""

    def __init__(
        self,
        values: Mapping[str, Any],
        stop: threading.Event | None = None,
        open_pool: Callable[[Mapping[str, Any]], Pool] = open_trial_pool,
        limit_s: float = TRIAL_S,
    ) -> None:
        self._held = ExitStack()
        file = self._held.enter_context(TemporaryFile())  # noqa: SIM115 - the stack closes it
        self._running = Note(file.fileno())
        limits = {"limit_s": limit_s, "timeout_s": limit_s + MARGIN_S}
        self._pool = open_pool({"values": values, "running": self._running.file, **limits})
        self._held.callback(self._pool.close)
        self._stop, self._limit_s = stop, limit_s

    def begin(self) -> None:
        """Start the process in the background, so that a later request need not wait for its imports."""
        self._pool.submit([Message("start")], _itself)

    def create(self, what: str, task: Task, place: str) -> None:
        """Create the tools or the environment `what` of the task in the row `place`. Raises ConfigError: it failed;
        StoppedError."""
        self._asked("create", what, task, place)

    def start_user(self, what: str, task: Task, place: str) -> None:
        """Start the simulated user of the task. Raises: see `create`."""
        self._asked("user", what, task, place)

    def play(self, what: str, task: Task, place: str) -> Trajectory | None:
        """Play an episode of the task. None if it took too long, or if other checks give the reason of its failure.
        Raises: see `create`."""
        reply = self._asked("play", what, task, place)
        try:
            return None if reply is None else wire.read_trajectory(reply)
        except WireError as error:
            raise ConfigError(f"with {place}, your own code's process sent no episode: {error}") from error

    def _asked(self, kind: str, what: str, task: Task, place: str) -> Message | None:
        try:
            return self.score(kind, what, task, place)
        except ScoringError as error:
            raise ConfigError(str(error)) from error

    def score(
        self, kind: str, what: str, task: Task, place: str, trajectory: Trajectory | None = None, **more: Any
    ) -> Message | None:
        """Score the episode by the user's code of this `kind`. Messages for the user call this code `what`. None: see
        `play`.

        Raises ScoringError: the code failed; ConfigError: it ended its process; StoppedError: `stop` was set.
        """
        body = {"row": wire.task_body(task), "place": place, **more}
        message = Message(kind, 0, body)
        if trajectory is not None:
            sent = wire.trajectory_message(trajectory)
            message = Message(kind, 0, {**sent.body, **body}, sent.arrays)
        reply, line = self._answer(message, what, place)
        if reply is None and not line:
            # No line of the user's code ran, so imports may have taken the time. A second attempt already has these
            # imports.
            reply, line = self._answer(message, what, place)
        if reply is None:
            warn_of_slow_code(place, self._limit_s, self._running.read(), line)
            return None
        if reply.kind == "left_out":
            log.debug("no episode of %s was tried before the start: %s", place, reply.body["reason"])
            return None
        return reply

    def _answer(self, message: Message, what: str, place: str) -> tuple[Message | None, str]:
        """The answer to a request, and an empty text. If the answer took too long: None, and the line of the user's
        code that ran, or an empty text if none ran.

        Raises: see `score`.
        """
        self._running.write(what)
        try:
            reply = answered(self._pool.submit([message], _itself), self._stop)
        except SlowStartError as error:
            log.warning("with %s, your own code is not tried before the start: %s", place, error)
            return Message("left_out", 0, {"reason": str(error)}), ""
        except EndedError as error:
            if error.overran:
                return None, error.line
            raise ConfigError(f"with {place}, {error}; {self._running.read()} was called last: mend it") from error
        return (None, str(reply.body["line"])) if reply.kind == "slow" else (reply, "")

    def close(self) -> None:
        """End the process."""
        self._held.close()


def warn_of_slow_code(place: str, limit_s: float, running: str, line: str) -> None:
    """Log that the code `running` took too long, and the line of the user's code at which it was, if one ran."""
    where = (
        f", was at {line} and may be slow" if line else ", but no line of your own code ran: the machine may be busy"
    )
    log.warning(
        "with %s, the episode that tries your own code took over %g s, so it is left out of the checks; %s was called "
        "last%s",
        *(place, limit_s, running, where),
    )


def answered(future: Future[T], stop: threading.Event | None) -> T:
    """The result of `future`. Raises StoppedError: `stop` was set before. Passes on the future's error."""
    while not wait([future], LOOK_S).done:
        if stop is not None and stop.is_set():
            raise StoppedError("stopped during the checks before the start; nothing was started")
    return future.result()


def _itself(message: Message) -> Message:
    return message
