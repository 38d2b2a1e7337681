"""Judging by rule, in processes of their own that are killed when a rule overruns.

A rule is somebody's code: it may loop for ever, hold the interpreter in a regular expression, eat the memory, or crash.
None of that may stop the scorer or become a reward, so only a process will do. The process ends itself when a rule
overruns, and tells on stderr where; this side only makes sure. Memory is watched from here, for a limit inside would
reach the rule as an exception that it may take for a wrong answer.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.errors import ConfigError, ScoringError
from asyncrl.scoring.rule_process import RuleMemoryError, RuleProcess
from asyncrl.scoring.rules.base import Case, Verdict
from asyncrl.wire import Message, task_body, trajectory_message

START_TIMEOUT_S = 120.0
"""For the start of the process and the imports of its rules."""

GRACE_S = 2.0
"""For the process to end itself."""


class Verifier:
    """Judges with the rules that the configuration names, `rule_processes` cases at once; one may take `timeout_s` and
    `rule_memory_mb`. `policy` is the model whose tokenizer verl's reward managers read with.

    Raises ConfigError: a rule cannot be loaded.
    """

    def __init__(self, config: ScoringConfig, policy: ModelConfig | None = None) -> None:
        settings = {
            "rule": config.rule,
            "rules": config.rules,
            "timeout_s": config.timeout_s,
            "rule_memory_mb": config.rule_memory_mb,
            "policy": policy.path if policy else None,
            "trust_remote_code": policy.trust_remote_code if policy else False,
        }
        self._arguments = [json.dumps(settings)]
        self._timeout_s = config.timeout_s
        self._memory_mb = config.rule_memory_mb
        self._lock = threading.Lock()
        self._running: set[RuleProcess] = set()
        self._closed = False
        # The first process starts now, so that what cannot be loaded is told; the others with the first work for them.
        self._idle: SimpleQueue[RuleProcess | None] = SimpleQueue()
        self._idle.put(self._start())
        for _ in range(config.rule_processes - 1):
            self._idle.put(None)
        self._threads = ThreadPoolExecutor(config.rule_processes, "rules")

    def submit(self, case: Case) -> Future[Verdict]:
        """The verdict on one episode, when it is there; its `result` raises as `verify` does, and CancelledError where
        the verifier is closed before. Raises ScoringError: it is closed."""
        if self._closed:
            raise ScoringError("the verifier was closed")
        return self._threads.submit(self.verify, case)

    def verify(self, case: Case) -> Verdict:
        """The verdict on one episode. Raises ScoringError: a rule failed, overran, or took its process down."""
        process = self._idle.get()
        try:
            process = process or self._start()
            reply = self._ask(process, case)
        except ScoringError:
            if process is not None:
                self._end(process)
                process = None
            raise
        finally:
            self._idle.put(process)
        if reply.kind == "failed":
            raise ScoringError(str(reply.body["reason"]))
        return Verdict(reply.body["outcome"], reply.body["total"], reply.body["scores"])

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        with self._lock:
            self._closed = True
            for process in self._running:
                process.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for process in list(self._running):
            self._end(process)

    def _ask(self, process: RuleProcess, case: Case) -> Message:
        message = trajectory_message(case.trajectory)
        texts = {"answer": case.answer, "full_answer": case.full_answer, "response": case.response}
        body = {**message.body, "row": task_body(case.task), **texts}
        started = time.monotonic()
        try:
            process.send(Message("verify", body=body, arrays=message.arrays))
            return process.receive(self._timeout_s + GRACE_S, self._memory_mb << 20)
        except RuleMemoryError as error:
            raise ScoringError(f"the rule took more than scoring.rule_memory_mb={self._memory_mb}") from error
        except (EOFError, OSError) as error:
            if time.monotonic() - started >= self._timeout_s:
                raise ScoringError(f"the rule took longer than scoring.timeout_s={self._timeout_s:g}") from error
            raise ScoringError("the rule took its process down") from error

    def _start(self) -> RuleProcess:
        with self._lock:
            if self._closed:
                raise ScoringError("the verifier was closed")
            process = RuleProcess(self._arguments)
            self._running.add(process)
        try:
            reply = process.receive(START_TIMEOUT_S)
        except (EOFError, OSError) as error:
            self._end(process)
            raise ConfigError("the process that runs the rules did not start; its output says why") from error
        if reply.kind == "failed":
            self._end(process)
            raise ConfigError(str(reply.body["reason"]))
        return process

    def _end(self, process: RuleProcess) -> None:
        with self._lock:
            self._running.discard(process)
        process.kill()
        process.close()
