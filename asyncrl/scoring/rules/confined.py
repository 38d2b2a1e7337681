"""Compares answers with ground truths in a separate process, under limits on processor time and memory.

A comparison with an answer such as `9^{9^{9^9}}` would never end, or take all memory. Such an answer scores zero. But
if the ground truth takes too long, the rule has failed. The time limit counts processor time, so that a right answer
stays right on a busy machine.

A limit in Python would raise an exception, which a library could ignore. So the kernel enforces the limits. A forked
process serves many answers, until an answer overruns a limit.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.errors import ScoringError

logger = logging.getLogger(__name__)

ANSWER_MEMORY = 512 << 20
"""Bytes that parsing and comparing an answer may take."""

_TRUTH_S = 60.0
_TRUTH_SHARE, _ANSWER_SHARE = 0.75, 0.25
"""The maximum processor time for the ground truth and for the answer, as shares of the time until the deadline."""

_KEPT = 32
"""The maximum number of processes that are kept for further answers. Without this limit, a rule that makes new
functions for each answer would leave a process for each answer."""
_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
"""The signals that end a process in which an expression has used up the stack or the memory."""

Prepare = Callable[[str], Any]
Compare = Callable[[Any, str], float]


Confined = Callable[[Prepare, Compare, str, str, float], Mapping[str, float]]
"""`Confinement.score` for a given deadline. Its arguments are prepare, compare, truth, answer and cpu_s."""


class Confinement:
    """The processes of one rule, one for each of the last pairs of `prepare` and `compare`."""

    def __init__(self) -> None:
        self._processes: dict[tuple[Prepare, Compare], _Process] = {}

    def score(
        self, deadline: float, prepare: Prepare, compare: Compare, truth: str, answer: str, cpu_s: float
    ) -> Mapping[str, float]:
        """Return a mapping in which `score` is `compare(prepare(truth), answer)`. It is 0 if the comparison
        takes over `cpu_s` seconds of processor time (then `out_of_time` is 1) or over ANSWER_MEMORY bytes (then
        `out_of_memory` is 1). A `cpu_s` above a quarter of the time until `deadline` is reduced to this quarter.

        Raises ScoringError: the ground truth takes too long, `prepare` or `compare` raised, or the process ended for
        another reason.
        """
        left = max(deadline - time.monotonic(), 0.0)
        limits = (max(min(_TRUTH_S, _TRUTH_SHARE * left), 0.05), max(min(cpu_s, _ANSWER_SHARE * left), 0.05))
        process = self._processes.pop((prepare, compare), None) or _Process(prepare, compare)
        scores = process.score(truth, answer, *limits)
        if process.alive:
            self._processes[prepare, compare] = process
        if len(self._processes) > _KEPT:
            self._processes.pop(next(iter(self._processes))).close()
        return scores


class _Process:
    """The parent's side of a forked process, which ends when the pipe is closed."""

    def __init__(self, prepare: Prepare, compare: Compare) -> None:
        self.alive = True
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        self._process = context.Process(target=_serve, args=(theirs, prepare, compare), daemon=True)
        self._process.start()
        theirs.close()

    def score(self, truth: str, answer: str, truth_s: float, answer_s: float) -> Mapping[str, float]:
        prepared = False
        try:
            self._pipe.send_bytes(json.dumps([truth, answer, truth_s, answer_s]).encode())
            while True:
                reply = json.loads(self._pipe.recv_bytes())
                if "failed" in reply:
                    raise ScoringError(reply["failed"])
                if "score" in reply:
                    return _scores(**reply)
                prepared = True
        except (EOFError, OSError) as error:
            self.close()
            status = self._process.exitcode or 0
            if prepared and status == -signal.SIGPROF:
                return _scores(0.0, out_of_time=True)
            if prepared and -status in _CRASHES:
                return _scores(0.0, out_of_memory=True)
            if status == -signal.SIGPROF:
                raise ScoringError(f"the ground truth {truth!r:.100} took over {truth_s:g} s to read") from error
            raise ScoringError(f"the process that compares answers ended with status {status}") from error

    def close(self) -> None:
        self.alive = False
        self._pipe.close()
        self._process.kill()
        self._process.join()


def limit_memory(size: int) -> None:
    """Limits the address space of this process, and of each process that it starts, to `size` bytes more than this
    process uses now."""
    mapped = Path("/proc/self/statm")
    if mapped.exists():
        size += int(mapped.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _scores(score: float, *, out_of_time: bool = False, out_of_memory: bool = False) -> Mapping[str, float]:
    return {"score": score, "out_of_time": float(out_of_time), "out_of_memory": float(out_of_memory)}


def _serve(pipe: Connection, prepare: Prepare, compare: Compare) -> NoReturn:
    """Runs the forked process. It closes all inherited files but the pipe, so that the pipe closes with the parent."""
    try:
        os.closerange(3, pipe.fileno())
        os.closerange(pipe.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        prepared = lru_cache(64)(prepare)
        while True:
            _answer(pipe, prepared, compare, *json.loads(pipe.recv_bytes()))
    finally:
        os._exit(0)


def _answer(
    pipe: Connection, prepare: Prepare, compare: Compare, truth: str, answer: str, truth_s: float, answer_s: float
) -> None:
    def send(**reply: Any) -> None:
        pipe.send_bytes(json.dumps(reply).encode())

    try:
        with _limited(truth_s):
            known = prepare(truth)
        send(prepared=True)
        score, out_of_memory = 0.0, False
        with _limited(answer_s, ANSWER_MEMORY):
            try:
                score = float(compare(known, answer))
            except RecursionError:
                pass
            except MemoryError:
                out_of_memory = True
    except ScoringError as error:
        send(failed=str(error))
    except Exception as error:
        logger.exception("the rule failed")
        send(failed=f"the rule raised {type(error).__name__}: {error}")
    else:
        send(score=score, out_of_memory=out_of_memory)


@contextmanager
def _limited(seconds: float, memory: int | None = None) -> Iterator[None]:
    """Ends this process if the `with` block takes `seconds` of processor time, and lets the block use at most `memory`
    bytes more."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    if memory is not None:
        limit_memory(memory)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        resource.setrlimit(resource.RLIMIT_AS, before)
