"""Runs calls of a user's function in parallel processes, and kills the processes if a call takes too long."""

from __future__ import annotations

import multiprocessing
import pickle
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from asyncrl.config.imports import files_in, imported, load_file
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.base import completed

Call = Callable[[], Any]
PROVIDE_VERL = "asyncrl.compat.verl.names.provide_verl"
"""The function that lets a process import verl's names. It is given by its path because `names` imports this file."""
START_TIMEOUT_S = 120.0
"""The time limit for the start of a process with its imports."""


def in_processes(
    calls: Sequence[Call],
    processes: int,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    names: Sequence[str] | None = None,
) -> list[Any]:
    """The results of `calls`. A call may return a coroutine, which is run. All processes end before this returns.

    `names` are the calls' names in error messages, by default `row 0` and so on. Raises ScoringError, which names the
    call: it raised an error, ended its process, or took longer than `timeout_s` seconds.
    """
    if not calls:
        return []
    try:
        first = pickle.dumps(calls[0])
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ScoringError(f"compute_score cannot be sent to another process: {error}") from error
    named = names or [f"row {row}" for row in range(len(calls))]
    workers = [_Worker(first, named, clock() + START_TIMEOUT_S) for _ in range(min(processes, len(calls)))]
    try:
        return _results(calls, {each.pipe: each for each in workers}, timeout_s, clock)
    finally:
        for worker in workers:
            worker.kill()


class _Worker:
    """A process that runs one call after another. Its first message means that it has started."""

    def __init__(self, first: bytes, names: Sequence[str], deadline: float) -> None:
        # A fork of a process with threads, such as torch's, may hang. The fork server has no threads, and imports
        # torch once for all workers.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["__main__", __name__])
        self.pipe, theirs = context.Pipe()
        self.row: int | None = None
        self._names = names
        self.deadline = deadline
        self._process = context.Process(target=_serve, args=(theirs, files_in(first), first), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, row: int, call: Call, deadline: float) -> None:
        self.row, self.deadline = row, deadline
        self.pipe.send(call)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.pipe.close()

    def __str__(self) -> str:
        return "before its first row" if self.row is None else f"for {self._names[self.row]}"


def _results(
    calls: Sequence[Call], busy: dict[Connection, _Worker], timeout_s: float, clock: Callable[[], float]
) -> list[Any]:
    results: list[Any] = [None] * len(calls)
    waiting = iter(enumerate(calls))
    while busy:
        next_deadline = min(worker.deadline for worker in busy.values())
        for pipe in wait(list(busy), max(0.0, next_deadline - clock())):
            assert isinstance(pipe, Connection)
            worker = busy[pipe]
            try:
                succeeded, value = pipe.recv()
            except (EOFError, OSError) as error:
                raise ScoringError(f"compute_score ended its process {worker}") from error
            if not succeeded:
                raise ScoringError(f"compute_score failed {worker}: {value}")
            if worker.row is not None:
                results[worker.row] = value
            row, call = next(waiting, (None, None))
            if row is None or call is None:
                del busy[pipe]
            else:
                worker.begin(row, call, clock() + timeout_s)
        for worker in busy.values():
            if clock() >= worker.deadline:
                limit = START_TIMEOUT_S if worker.row is None else timeout_s
                raise ScoringError(f"compute_score took longer than {limit:g} s {worker}")
    return results


def _serve(pipe: Connection, files: Sequence[str], first: bytes) -> None:
    """The main function of a worker process: answer each call with its result or error.

    Loading `files`, and unpickling the call `first`, imports the modules of the calls, so that imports do not count
    towards a row's time limit.
    """
    imported(PROVIDE_VERL, PROVIDE_VERL)()
    for file in files:
        load_file(file)
    pickle.loads(first)  # noqa: S301 - the caller's own
    pipe.send((True, None))
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, completed(call())))
        except Exception as error:  # noqa: BLE001 - the caller raises it
            pipe.send((False, repr(error)))
