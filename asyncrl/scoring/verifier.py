"""Judging by rule, in a process of its own that is killed when a rule overruns.

A rule is somebody's code: it may loop for ever, hold the interpreter in a regular expression, or crash. None of that
may stop the scorer or become a reward, so only a process will do. The process ends itself when a rule overruns, and
tells on stderr where; this side only makes sure. Messages pass a pipe in the wire format.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Pipe

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rules.base import Verdict
from asyncrl.types import Task, Trajectory
from asyncrl.wire import Message, decode, encode, join, split, task_body, trajectory_message

START_TIMEOUT_S = 120.0
"""For the start of the process and the imports of its rules."""

GRACE_S = 2.0
"""For the process to end itself."""


class Verifier:
    """Judges with the rules that the configuration names; one verification may take `timeout_s`.

    Raises ConfigError: a rule cannot be loaded.
    """

    def __init__(self, rule: str, rules: Mapping[str, str], timeout_s: float) -> None:
        self._arguments = [str(timeout_s), rule, json.dumps(dict(rules))]
        self._timeout_s = timeout_s
        self._process: _RuleProcess | None = self._start()

    def verify(self, task: Task, answer: str, trajectory: Trajectory) -> Verdict:
        """The verdict on one episode. Raises ScoringError: the rule failed, overran, or took its process down."""
        message = trajectory_message(trajectory)
        body = {**message.body, "row": task_body(task), "answer": answer}
        self._process = self._process or self._start()
        started = time.monotonic()
        try:
            self._process.send(Message("verify", body=body, arrays=message.arrays))
            reply = self._process.receive(self._timeout_s + GRACE_S)
        except (EOFError, OSError) as error:
            self.close()
            if time.monotonic() - started >= self._timeout_s:
                raise ScoringError(f"the rule took longer than scoring.timeout_s={self._timeout_s:g}") from error
            raise ScoringError("the rule took its process down") from error
        if reply.kind == "failed":
            raise ScoringError(str(reply.body["reason"]))
        return Verdict(reply.body["outcome"], reply.body["extra"])

    def close(self) -> None:
        """End the process, whatever it is doing."""
        if self._process is not None:
            self._process.kill()
            self._process = None

    def _start(self) -> _RuleProcess:
        process = _RuleProcess(self._arguments)
        try:
            reply = process.receive(START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            process.kill()
            raise ConfigError("the process that runs the rules did not start; its output says why") from error
        if reply.kind == "failed":
            process.kill()
            raise ConfigError(str(reply.body["reason"]))
        return process


class _RuleProcess:
    """A running `verifier_process` and the pipe to it."""

    def __init__(self, arguments: list[str]) -> None:
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        # What can be imported here can be imported there.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "asyncrl.scoring.verifier_process", str(fd), *arguments]
        self._process = subprocess.Popen(command, pass_fds=[fd], env=environment)
        theirs.close()

    def send(self, message: Message) -> None:
        self._pipe.send_bytes(join(encode(message)))

    def receive(self, timeout_s: float) -> Message:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError
        return decode(split(self._pipe.recv_bytes()))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._pipe.close()
