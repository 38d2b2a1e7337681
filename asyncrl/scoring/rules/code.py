"""The program in the answer passes the ground truth's unit tests, run in the sandbox.

The ground truth is either JSON `{"inputs": [...], "outputs": [...]}` of what the program reads and prints, or Python
that tests what the program defines (`assert add(1, 2) == 3`). Neither the outputs nor the asserts are in the process
that runs the program. `program.py` says which part of the answer is the program.
"""

from __future__ import annotations

import asyncio
import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial as bind

from asyncrl import sandbox
from asyncrl.errors import ScoringError
from asyncrl.scoring.asserts import importing
from asyncrl.scoring.asserts.judge import UNSUITED
from asyncrl.scoring.rules.program import program as program_in
from asyncrl.types import Task, Trajectory

_WITH_INPUT = """\
import io, sys
sys.stdin = io.TextIOWrapper(io.BytesIO({input!r}.encode()), encoding="utf-8")
exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
"""
_WITH_ASSERTS = """\
{importing}
main({code!r}, {tests!r}, {passed!r})
"""
_SHARE = 0.75
"""Of the time that a verification has left, what the tests may take: the rest is for other rules and for ending."""

_START_S = 0.05
"""What starting a test takes at the least."""

Test = tuple[str, Callable[[sandbox.Ran], bool]]
"""A program to run, and whether what became of it is right."""


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
    then have failed, and `out_of_time` is 1.

    Raises ScoringError: the ground truth holds no tests, more than there is time to start, or asserts that hand the
    program what is no data, such as a function.
    """
    left = _SHARE * (deadline - time.monotonic())
    tests = _tests(task, program_in(answer))
    if len(tests) * _START_S > left:
        raise ScoringError(
            f"task {task.id} has {len(tests)} tests: raise scoring.timeout_s, for there is no time for them"
        )
    end = time.monotonic() + left
    passed = asyncio.run(_passed(tests, sandbox.Limits(wall_s, cpu_s, memory_mb), end, partial))
    late = passed < len(tests) and time.monotonic() >= end
    share = passed / len(tests)
    return {"score": share if partial else float(share == 1), "passed": share, "out_of_time": float(late)}


def prepare() -> None:
    """Warn where programs run without namespaces."""
    sandbox.lacking()


async def _passed(tests: Sequence[Test], limits: sandbox.Limits, end: float, go_on: bool) -> int:
    """How many tests pass until `end`, or until one does not, unless it is to `go_on`."""
    passed = 0
    for source, accepts in tests:
        seconds = end - time.monotonic()
        if seconds <= 0:
            break
        right = accepts(await sandbox.run(source, replace(limits, wall_s=min(limits.wall_s, seconds))))
        passed += right
        if not (right or go_on):
            break
    return passed


def _tests(task: Task, program: str) -> Sequence[Test]:
    if not task.ground_truth.strip():
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    if task.ground_truth.lstrip().startswith("{"):
        pairs = _pairs(task)
        return [(_WITH_INPUT.format(code=program, input=given), bind(_prints, wanted)) for given, wanted in pairs]
    try:
        compile(task.ground_truth, "tests.py", "exec")
    except (SyntaxError, ValueError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no set of tests: {error!r}") from error
    passed = secrets.token_hex(16)
    judged = _WITH_ASSERTS.format(importing=importing("judge"), code=program, tests=task.ground_truth, passed=passed)
    return [(judged, bind(_passes, task, passed))]


def _pairs(task: Task) -> list[tuple[str, str]]:
    try:
        tests = json.loads(task.ground_truth)
        pairs = list(zip(map(str, tests["inputs"]), map(str, tests["outputs"]), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no set of tests: {error!r}") from error
    if not pairs:
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    return pairs


def _prints(wanted: str, ran: sandbox.Ran) -> bool:
    return ran.status == 0 and _lines(wanted) == _lines(ran.printed)


def _passes(task: Task, passed: str, ran: sandbox.Ran) -> bool:
    if ran.status == UNSUITED:
        raise ScoringError(
            f"task {task.id} cannot be judged by its asserts, for {ran.printed.strip()}; use inputs and outputs"
        )
    return ran.status == 0 and passed in ran.printed


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
