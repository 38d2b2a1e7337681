"""The program in the answer passes the ground truth's unit tests, run in the sandbox.

The ground truth is either JSON `{"inputs": [...], "outputs": [...]}` of what the program reads and prints, or Python
that tests what the program defines (`assert add(1, 2) == 3`). Neither the outputs nor the asserts are in the sandbox
that runs the program. The program is a fenced block with what it uses of earlier ones, or the whole answer: see
`program`.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial as bind

from asyncrl.errors import ScoringError
from asyncrl.machine import sandbox
from asyncrl.scoring.asserts import script
from asyncrl.scoring.asserts.judge import ENDED, FAILED, PASSED, UNCLEAR, UNSUITED
from asyncrl.scoring.rules.program import program as program_in
from asyncrl.types import Task, Trajectory

_SHARE = 0.75
"""Of the time that a verification has left, what the tests may take: the rest is for other rules and for ending."""

_START_S = 0.05
"""What starting a test takes at the least."""

Test = Callable[[sandbox.Limits], Awaitable[str]]
"""PASSED, FAILED or UNCLEAR: whether the program passes, within the limits."""


def code(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    wall_s: float = 4.0,
    cpu_s: float = 4.0,
    memory_mb: int = 1024,
    partial: bool = False,
    deadline: float = math.inf,
) -> Mapping[str, float]:
    """`score` is 1 where all tests pass, else 0, or with `partial` the share that does; `passed` is that share. The
    limits are those of one test. All tests have three quarters of the time until `deadline`; those that are not done by
    then have failed, and `out_of_time` is 1. `unclear` is 1 where the tests failed since they hand one of the program's
    objects what is no data: by their own fault, or because it answered with an object where data was due.

    Raises ScoringError: the ground truth holds no tests, more than there is time to start, or asserts that cannot judge
    any program, as those that hand it what is no data. Raises SandboxError: a program could not be run.
    """
    left = _SHARE * (deadline - time.monotonic())
    tests = _tests(task, program_in(answer))
    if len(tests) * _START_S > left:
        raise ScoringError(
            f"task {task.id} has {len(tests)} tests: raise scoring.timeout_s, for there is no time for them"
        )
    end = time.monotonic() + left
    verdicts = asyncio.run(_verdicts(tests, sandbox.Limits(wall_s, cpu_s, memory_mb), end, partial))
    share = verdicts.count(PASSED) / len(tests)
    return {
        "score": share if partial else float(share == 1),
        "passed": share,
        "out_of_time": float(share < 1 and time.monotonic() >= end),
        "unclear": float(UNCLEAR in verdicts),
    }


def prepare() -> None:
    """Warn where programs run without namespaces."""
    sandbox.lacking()


async def _verdicts(tests: Sequence[Test], limits: sandbox.Limits, end: float, go_on: bool) -> list[str]:
    """Those of the tests until `end`, or until one does not pass, unless it is to `go_on`."""
    verdicts: list[str] = []
    for test in tests:
        seconds = end - time.monotonic()
        if seconds <= 0:
            break
        verdicts.append(await test(replace(limits, wall_s=min(limits.wall_s, seconds))))
        if verdicts[-1] != PASSED and not go_on:
            break
    return verdicts


def _tests(task: Task, program: str) -> Sequence[Test]:
    if not task.ground_truth.strip():
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    if task.ground_truth.lstrip().startswith("{"):
        pairs = _pairs(task)
        return [bind(_prints, program, given, wanted) for given, wanted in pairs]
    try:
        compile(task.ground_truth, "tests.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no set of tests: {error!r}") from error
    return [bind(_holds, task, program)]


def _pairs(task: Task) -> list[tuple[str, str]]:
    try:
        tests = json.loads(task.ground_truth)
        pairs = list(zip(map(str, tests["inputs"]), map(str, tests["outputs"]), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no set of tests: {error!r}") from error
    if not pairs:
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    return pairs


async def _prints(program: str, given: str, wanted: str, limits: sandbox.Limits) -> str:
    ran = await sandbox.run(program, limits, stdin=given.encode(errors="replace"), errors=False)
    return PASSED if ran.status == 0 and _lines(wanted) == _lines(ran.printed) else FAILED


async def _holds(task: Task, program: str, limits: sandbox.Limits) -> str:
    """Whether the asserts of `task` hold of the program, each in a sandbox of its own."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = asyncio.create_task(
            sandbox.run(script("program", theirs.fileno(), program), limits, fds=[theirs.fileno()])
        )
        # The judge waits for answers until the connection ends.
        running.add_done_callback(lambda _: theirs.shutdown(socket.SHUT_RDWR))
        try:
            judged = await sandbox.run(script("judge", ours.fileno(), task.ground_truth), limits, fds=[ours.fileno()])
            word, _, reason = judged.printed.partition(" ")
            if word == ENDED:
                # It raises where that is the sandbox's fault.
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])
    if word == UNSUITED:
        raise ScoringError(f"task {task.id} cannot be judged by its asserts, for {reason}; use inputs and outputs")
    if judged.status == 0 and word in (PASSED, FAILED, ENDED, UNCLEAR):
        return FAILED if word == ENDED else word
    if judged.status is None or judged.killed:
        # Whatever the program has answered took the tests too long, or too much memory.
        return FAILED
    said = judged.printed.strip()[-500:]
    raise ScoringError(f"the tests of task {task.id} ended with status {judged.status} and no verdict: {said}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
