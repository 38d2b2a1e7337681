"""Scores by rule in processes of their own, which are killed when a rule overruns its limits: both sides of the pipe.

A rule is user code: it may loop for ever, hold the interpreter in a regular expression, use up the memory, or crash.
None of that may stop the scorer or become a reward. The process ends itself when a rule takes too long, and writes on
stderr where the rule was; this side kills it if it does not. Memory is watched from here, because a limit inside the
process would reach the rule as an exception, which the rule may take for a wrong answer.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from typing import Any

import psutil

from asyncrl import wire
from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.errors import AsyncrlError, ConfigError, ScoringError, WireError
from asyncrl.network.throttle import ErrorLogger
from asyncrl.scoring.rules.base import RuleInput, RuleScores
from asyncrl.scoring.rules.confined import limit_memory
from asyncrl.scoring.rules.registry import RuleSet, load_rules
from asyncrl.text import reason_of
from asyncrl.wire import Message

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For the start of the process and the imports of its rules."""

GRACE_S = 2.0
"""For the process to end itself."""

_BACKSTOP = 8
"""A multiple of the memory limit. The parent kills the process long before, unless it is gone or too slow."""

_WATCH_S = 0.1
"""Between two measurements of memory. A rule that returns sooner is never measured."""


class Verifier:
    """Scores with the configured rules, `rule_processes` episodes at once, within `timeout_s` and `rule_memory_mb`
    each. verl's reward managers use the tokenizer of `policy`.

    Raises ConfigError: a rule cannot be loaded.
    """

    def __init__(self, config: ScoringConfig, policy: ModelConfig | None = None) -> None:
        self._settings = {
            "rule": config.rule,
            "rules": config.rules,
            "timeout_s": config.timeout_s,
            "rule_memory_mb": config.rule_memory_mb,
            "policy": policy.path if policy else None,
            "trust_remote_code": policy.trust_remote_code if policy else False,
        }
        self._config = config
        self._lock = threading.Lock()
        self._running: set[_RuleProcess] = set()
        self._closed = False
        self._threads = ThreadPoolExecutor(config.rule_processes, "rules")
        # One process starts now, to report rules that cannot be loaded. The others start when they are needed.
        self._idle = [self._start()]

    def submit(self, given: RuleInput) -> Future[RuleScores]:
        """Scores in the background. The future raises ScoringError if a rule failed, overran a limit, or ended its
        process, and CancelledError if the verifier is closed before. Raises ScoringError: the verifier is closed."""
        if self._closed:
            raise ScoringError("the verifier was closed")
        return self._threads.submit(self._score, given)

    def score(self, given: RuleInput) -> RuleScores:
        """The scores of one episode. Raises as the future of `submit` does."""
        return self.submit(given).result()

    def _score(self, given: RuleInput) -> RuleScores:
        try:
            process = self._idle.pop()
        except IndexError:
            process = self._start()
        try:
            reply = self._request(process, given)
        except Exception:
            self._end(process)
            raise
        self._idle.append(process)
        if reply.kind == "failed":
            raise ScoringError(str(reply.body["reason"]))
        return RuleScores(reply.body["outcome"], reply.body["total"], reply.body["scores"], reply.body["vote"])

    def close(self) -> None:
        """Ends the processes, even busy ones."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in list(self._running):
            self._end(process)

    def _request(self, process: _RuleProcess, given: RuleInput) -> Message:
        message = wire.trajectory_message(given.trajectory)
        texts = {"answer": given.answer, "full_answer": given.full_answer, "response": given.response}
        body = {**message.body, "row": wire.task_body(given.task), **texts}
        started = time.monotonic()
        try:
            process.send(Message("verify", 0, body, message.arrays))
            return process.receive(self._config.timeout_s + GRACE_S, self._config.rule_memory_mb)
        except (EOFError, OSError) as error:
            if time.monotonic() - started >= self._config.timeout_s:
                raise ScoringError(f"the rule took longer than scoring.timeout_s={self._config.timeout_s:g}") from error
            raise ScoringError("the rule took its process down") from error

    def _start(self) -> _RuleProcess:
        with self._lock:
            if self._closed:
                raise ScoringError("the verifier was closed")
            process = _RuleProcess(self._settings)
            self._running.add(process)
        try:
            reply = process.receive(START_TIMEOUT_S)
            if reply.kind == "failed":
                raise ConfigError(str(reply.body["reason"]))
        except (EOFError, OSError) as error:
            self._end(process)
            raise ConfigError("the process that runs the rules did not start; its output says why") from error
        except ConfigError:
            self._end(process)
            raise
        return process

    def _end(self, process: _RuleProcess) -> None:
        with self._lock:
            self._running.discard(process)
        process.kill()
        process.close()


class _RuleProcess:
    """A running process of `serve`. Messages pass a pipe in the wire format.

    The process leads a session of its own, so that everything that a rule started is killed with it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._pipe, theirs = Pipe()
        fd = theirs.fileno()
        # The process imports the same modules as this one.
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        command = [sys.executable, "-m", "asyncrl.scoring.verifier", str(fd), json.dumps(settings)]
        self._process = subprocess.Popen(command, pass_fds=[fd], env=environment, start_new_session=True)
        self._memory_before = 0
        theirs.close()

    def send(self, message: Message) -> None:
        """Raises OSError: the process has ended; WireError: the message cannot be encoded."""
        self._memory_before = self._memory_before or self._memory()
        self._pipe.send_bytes(wire.join(wire.encode(message, wire.MAX_LARGE_HEADER_BYTES)))

    def receive(self, timeout_s: float, memory_mb: int | None = None) -> Message:
        """The next message. Raises TimeoutError, EOFError or OSError if the process has ended, and ScoringError if it
        and its descendants take over `memory_mb` more than before the first request."""
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll(max(0.0, min(_WATCH_S, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise TimeoutError
            if memory_mb is not None and self._memory() - self._memory_before > memory_mb << 20:
                raise ScoringError(f"the rule took more than scoring.rule_memory_mb={memory_mb}")
        return wire.decode(wire.split(self._pipe.recv_bytes()))

    def kill(self) -> None:
        """Ends the process and all its descendants."""
        for process in self._tree():
            with suppress(psutil.Error):
                process.kill()
        # The system does not give the id to another process until this one is waited for.
        if self._process.returncode is None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        self._pipe.close()

    def _memory(self) -> int:
        return sum(map(_resident, self._tree()))

    def _tree(self) -> list[psutil.Process]:
        with suppress(psutil.Error):
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        return []


def _resident(process: psutil.Process) -> int:
    """Bytes. Memory that processes share, as after a fork, is divided among them if the system can tell."""
    with suppress(psutil.NoSuchProcess):
        try:
            memory = process.memory_full_info()
        except psutil.AccessDenied:
            return int(process.memory_info().rss)
        return int(getattr(memory, "pss", memory.uss))
    return 0


def serve(fd: int, settings: Mapping[str, Any]) -> None:
    """The process: answers each episode from the pipe `fd` with scores, and ends with the pipe and its session."""
    # Processes that a rule starts must not hold the pipe open.
    os.set_inheritable(fd, False)
    try:
        with Connection(fd) as pipe, suppress(EOFError):
            _serve(pipe, settings)
    except Exception:
        logger.exception("the process that runs the rules has failed")
    finally:
        os.killpg(0, signal.SIGKILL)


def _serve(pipe: Connection, settings: Mapping[str, Any]) -> None:
    """Raises EOFError: the pipe has ended."""
    try:
        rules = _load(settings)
    except AsyncrlError as error:
        _send(pipe, _failed(str(error)))
        return
    limit_memory(_BACKSTOP * settings["rule_memory_mb"] << 20)
    _send(pipe, Message("ready"))
    error_logger = ErrorLogger(logger)
    while True:
        request = pipe.recv_bytes()
        faulthandler.dump_traceback_later(settings["timeout_s"], exit=True)
        reply = _score(rules, request, time.monotonic() + settings["timeout_s"], error_logger)
        faulthandler.cancel_dump_traceback_later()
        _send(pipe, reply)


def _load(settings: Mapping[str, Any]) -> RuleSet:
    def tokenizer() -> Any:
        if settings["policy"] is None:
            raise ConfigError("a verl reward manager needs model.path, whose tokenizer it is made with")
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(settings["policy"], trust_remote_code=settings["trust_remote_code"])
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path={settings['policy']} has no tokenizer: {error}") from error

    return load_rules(ScoringConfig(rule=settings["rule"], rules=settings["rules"]), tokenizer)


def _score(rules: RuleSet, request: wire.Buffer, deadline: float, error_logger: ErrorLogger) -> Message:
    message = wire.decode(wire.split(request), wire.MAX_LARGE_HEADER_BYTES)
    texts = {name: message.body[name] for name in ("answer", "full_answer", "response")}
    given = RuleInput(wire.read_task(message.body["row"]), wire.read_trajectory(message), deadline=deadline, **texts)
    try:
        found = rules.score(given)
    except ScoringError as error:
        return _failed(str(error))
    except Exception as error:
        reason = f"the rule raised {reason_of(error)}"
        error_logger.exception(f"trajectory {given.trajectory.id}: {reason}", error)
        return _failed(reason)
    scores = {"outcome": found.outcome, "total": found.total, "scores": dict(found.scores), "vote": found.vote}
    return Message("scores", 0, scores)


def _failed(reason: str) -> Message:
    return Message("failed", 0, {"reason": reason})


def _send(pipe: Connection, message: Message) -> None:
    try:
        frames = wire.encode(message)
    except WireError as error:
        frames = wire.encode(_failed(f"the rule's scores cannot be sent: {error}"))
    pipe.send_bytes(wire.join(frames))


if __name__ == "__main__":
    serve(int(sys.argv[1]), json.loads(sys.argv[2]))
