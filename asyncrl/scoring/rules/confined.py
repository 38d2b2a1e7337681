"""What an answer can make endless runs in a process of its own, under limits that are the answer's alone.

An answer such as `9^{9^{9^9}}` keeps a comparison busy for ever, or takes all memory. That is the answer's fault and
worth nothing, where an overrun of the whole verification is a failure. Limits are of processor time, so that a busy
machine makes no right answer wrong; the kernel enforces them, so that no library can swallow them. The process is
forked once and serves many answers; only one that overruns costs another fork.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NoReturn

from asyncrl.errors import ScoringError

logger = logging.getLogger(__name__)

ANSWER_MEMORY = 512 << 20
"""Bytes that an answer's parsing and comparing may take."""

_TRUTH_S = 60.0
_TRUTH_SHARE, _ANSWER_SHARE = 0.75, 0.25
"""Of the time until the deadline: what the ground truth and the answer may take of the processor, at most."""

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGILL)
"""How a process ends whose stack or memory an expression has used up."""

Prepare = Callable[[str], Any]
Compare = Callable[[Any, str], float]


class Confinement:
    """The processes of one rule, one for each pair of functions that it judges with."""

    def __init__(self) -> None:
        self._workers: dict[tuple[Prepare, Compare], _Worker] = {}

    def judge(
        self, prepare: Prepare, compare: Compare, truth: str, answer: str, cpu_s: float, deadline: float
    ) -> Mapping[str, float]:
        """`score` is `compare(prepare(truth), answer)`, or 0 where the comparison takes over `cpu_s` seconds of
        processor time (`out_of_time` is 1) or over ANSWER_MEMORY bytes (`out_of_memory` is 1). A quarter of the time
        until `deadline` is the most that `cpu_s` can be.

        Raises ScoringError: the ground truth takes too long, one of the functions raised, or something else ended the
        process.
        """
        left = max(deadline - time.monotonic(), 0.0)
        limits = (max(min(_TRUTH_S, _TRUTH_SHARE * left), 0.05), max(min(cpu_s, _ANSWER_SHARE * left), 0.05))
        worker = self._workers.pop((prepare, compare), None) or _Worker(prepare, compare)
        verdict = worker.ask(truth, answer, *limits)
        if worker.alive:
            self._workers[prepare, compare] = worker
        return verdict


class _Worker:
    """This side of a forked process: texts go in, verdicts come out."""

    def __init__(self, prepare: Prepare, compare: Compare) -> None:
        self.alive = True
        self._pipe, theirs = Pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        self._pid = os.fork()
        if not self._pid:
            _serve(theirs, prepare, compare)
        theirs.close()
        self._end = weakref.finalize(self, _end, self._pipe, self._pid)

    def ask(self, truth: str, answer: str, truth_s: float, answer_s: float) -> Mapping[str, float]:
        prepared = False
        try:
            self._pipe.send_bytes(json.dumps([truth, answer, truth_s, answer_s]).encode())
            while True:
                reply = json.loads(self._pipe.recv_bytes())
                if "failed" in reply:
                    raise ScoringError(reply["failed"])
                if "score" in reply:
                    return _verdict(reply["score"], out_of_memory=reply["out_of_memory"])
                prepared = True
        except (EOFError, OSError) as error:
            self.alive = False
            how = self._end() or 0
            if prepared and how == -signal.SIGPROF:
                return _verdict(0.0, out_of_time=True)
            if prepared and -how in _CRASHES:
                return _verdict(0.0, out_of_memory=True)
            if how == -signal.SIGPROF:
                raise ScoringError(f"the ground truth {truth!r:.100} took over {truth_s:g} s to read") from error
            raise ScoringError(f"the process that compares answers ended with status {how}") from error


def limit_memory(size: int) -> None:
    """Lets this process, and those that it starts, map `size` bytes beyond what it has mapped now."""
    mapped = Path("/proc/self/statm")
    if mapped.exists():
        size += int(mapped.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def _verdict(score: float, *, out_of_time: bool = False, out_of_memory: bool = False) -> Mapping[str, float]:
    return {"score": score, "out_of_time": float(out_of_time), "out_of_memory": float(out_of_memory)}


def _end(pipe: Connection, pid: int) -> int:
    """How the process has ended, which it does here at the latest: its exit status, or minus the signal's number."""
    pipe.close()
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return 0


def _serve(pipe: Connection, prepare: Prepare, compare: Compare) -> NoReturn:
    """The forked process: it ends with the pipe, and holds nothing else open that it got with the fork."""
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
    try:
        with _processor_time(truth_s):
            known = prepare(truth)
        _send(pipe, prepared=True)
        with _processor_time(answer_s), _memory(ANSWER_MEMORY):
            score, greedy = _score(compare, known, answer)
    except ScoringError as error:
        _send(pipe, failed=str(error))
    except Exception as error:
        logger.exception("the rule failed")
        _send(pipe, failed=f"the rule raised {type(error).__name__}: {error}")
    else:
        _send(pipe, score=score, out_of_memory=greedy)


def _score(compare: Compare, known: Any, answer: str) -> tuple[float, bool]:
    try:
        return float(compare(known, answer)), False
    except RecursionError:
        return 0.0, False
    except MemoryError:
        return 0.0, True


@contextmanager
def _processor_time(seconds: float) -> Iterator[None]:
    """Ends this process after so much processor time."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@contextmanager
def _memory(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    limit_memory(size)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _send(pipe: Connection, **reply: Any) -> None:
    pipe.send_bytes(json.dumps(reply).encode())
