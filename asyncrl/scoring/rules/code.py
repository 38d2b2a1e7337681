"""The program in the answer passes the ground truth's unit tests, run in the sandbox.

The ground truth is either JSON `{"inputs": [...], "outputs": [...]}` with the texts that the program reads and prints,
or Python that tests the program's definitions (`assert add(1, 2) == 3`). The sandbox that runs the program contains
neither the outputs nor the asserts. program.py finds the program in the answer.
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
from pathlib import Path

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.sandbox.sandbox import NotBegunError, SandboxError, SandboxLimits, run
from asyncrl.sandbox.sandboxes import THIS_MACHINE, BuiltInSandbox, Sandbox, check_sandbox
from asyncrl.scoring.asserts.judge import ENDED, FAILED, PASSED, UNCLEAR, UNSUITED
from asyncrl.scoring.asserts.values import BEGUN
from asyncrl.scoring.rules.program import program as program_in
from asyncrl.types import Task, Trajectory

_SHARE = 0.75
"""The share of the remaining time that the tests may take. The rest is for other rules and for stopping programs."""

_START_S = 0.05
"""The minimum seconds that the start of one test takes."""

_LEAST_MB = 32
"""The smallest memory of a test. Python alone takes about 16 MB, and asserts about 24 MB."""

_ROOT = Path(__file__).parents[3]

Test = Callable[[SandboxLimits], Awaitable[tuple[str, float]]]
"""Runs the program within the limits. Returns PASSED, FAILED or UNCLEAR, and the seconds that the program ran."""


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
    sandbox: Sandbox = THIS_MACHINE,
) -> Mapping[str, float]:
    """`passed` is the share of tests that pass. With `partial`, `score` is this share; without, it is 1 if all
    tests pass, else 0.

    The limits hold for one test. All tests together have three quarters of the time until `deadline`; tests that are
    not done after this time have failed, and `out_of_time` is 1. `unclear` is 1 if the asserts failed because they gave
    an object of the program something other than data, such as a function (`result.sort(key=len)`). Either the asserts
    can judge no program, or this program returned an object of its own where they expect data.

    In a sandbox that is not the built-in one, a program may wait for other programs or for a container. So only the
    time during which programs ran counts towards these three quarters. If the three quarters pass on the clock before
    the programs have run for that long, the sandbox was too slow, and ScoringError is raised.

    Raises ScoringError: `memory_mb` is too small for any program; the ground truth has no tests, or too many to start
    in the available time; its asserts cannot judge any program, for example because they pass it a function, or cannot
    begin within the limits; or the sandbox supports no asserts. Raises SandboxError: a program could not be run.
    """
    if memory_mb < _LEAST_MB:
        raise ScoringError(
            f"memory_mb={memory_mb} of the rule code is too small for a program that does nothing: use at least "
            f"{_LEAST_MB}"
        )
    left = _SHARE * (deadline - time.monotonic())
    tests = _tests(task, program_in(answer), sandbox)
    if len(tests) * _START_S > left:
        raise ScoringError(
            f"task {task.id} has {len(tests)} tests, more than can start in time: raise scoring.timeout_s"
        )
    end = time.monotonic() + left
    judge = _verdicts if isinstance(sandbox, BuiltInSandbox) else _patient_verdicts
    verdicts, in_time = asyncio.run(judge(tests, SandboxLimits(wall_s, cpu_s, memory_mb), end, partial))
    share = verdicts.count(PASSED) / len(tests)
    return {
        "score": share if partial else float(share == 1),
        "passed": share,
        "out_of_time": float(share < 1 and not in_time),
        "unclear": float(UNCLEAR in verdicts),
    }


def prepare(sandbox: Sandbox) -> None:
    """Warn if programs run without Linux namespaces, which would isolate them.

    Raises ConfigError: the sandbox cannot run programs here.
    """
    try:
        check_sandbox(sandbox)
    except SandboxError as error:
        raise ConfigError(f"actor.sandbox: {error}") from error


async def _verdicts(tests: Sequence[Test], limits: SandboxLimits, end: float, go_on: bool) -> tuple[list[str], bool]:
    """The verdicts of the tests that ran before `end`, and True if they ended before `end`. Without `go_on`, the first
    test that does not pass is the last one run.

    Raises ScoringError: the time ended before the first test.
    """
    verdicts: list[str] = []
    for test in tests:
        seconds = end - time.monotonic()
        if seconds <= 0:
            if not verdicts:
                # The program is not at fault.
                raise ScoringError(
                    "no test could begin in time: raise scoring.timeout_s, or run fewer programs at once"
                )
            break
        try:
            verdict, _ = await test(replace(limits, wall_s=min(limits.wall_s, seconds)))
        except NotBegunError:
            if not verdicts or seconds >= limits.wall_s:
                raise
            # The tests before this one left it too little time.
            break
        verdicts.append(verdict)
        if verdict != PASSED and not go_on:
            break
    return verdicts, time.monotonic() < end


async def _patient_verdicts(
    tests: Sequence[Test], limits: SandboxLimits, end: float, go_on: bool
) -> tuple[list[str], bool]:
    """Like `_verdicts`, but only the time during which programs run counts.

    Raises ScoringError: the sandbox used up the time.
    """
    verdicts: list[str] = []
    began = time.monotonic()
    left = end - began
    for test in tests:
        if left <= 0:
            return verdicts, False
        if time.monotonic() >= end:
            raise ScoringError(
                f"the sandbox ran {len(verdicts)} of {len(tests)} tests in {end - began:.1f} s, of which programs took "
                f"{end - began - left:.1f} s: raise scoring.timeout_s, or let the sandbox run more programs at once"
            )
        verdict, seconds = await test(replace(limits, wall_s=min(limits.wall_s, left)))
        verdicts.append(verdict)
        left -= seconds
        if verdict != PASSED and not go_on:
            break
    # The last test may have had less than its own limit.
    return verdicts, left > 0


def _tests(task: Task, program: str, sandbox: Sandbox) -> Sequence[Test]:
    truth = task.truth_text.strip()
    try:
        if truth.startswith("{"):
            tests = json.loads(truth)
            if tests.get("fn_name"):
                raise ValueError("it tests the function fn_name: use asserts")
            pairs = list(zip(_texts(tests, "inputs"), _texts(tests, "outputs"), strict=True))
            found = [bind(_prints, sandbox, program, given, wanted) for given, wanted in pairs]
        else:
            if truth and not isinstance(sandbox, BuiltInSandbox):
                raise ScoringError(
                    f"task {task.id} has asserts, which need actor.sandbox.kind=builtin: use inputs and outputs"
                )
            compile(task.truth_text, "tests.py", "exec")
            found = [bind(_holds, task, program)] if truth else []
    except (SyntaxError, ValueError, TypeError, KeyError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is not a set of tests: {error!r}") from error
    if not found:
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    return found


def _texts(tests: Mapping[str, object], name: str) -> list[str]:
    """The inputs or outputs of the tests. Raises ValueError: they are not a list of texts or numbers."""
    given = tests[name]
    if not isinstance(given, list) or not all(isinstance(each, str | int | float) for each in given):
        raise ValueError(f"{name} must be a list of texts")
    return list(map(str, given))


def _script(side: str, *arguments: object) -> str:
    """Python that calls `main` of asserts/`side`.py in a sandbox, where asyncrl is not on the path."""
    path = f"sys.path.insert(0, {str(_ROOT)!r})"
    return f"import sys; {path}; from asyncrl.scoring.asserts.{side} import main; del sys.path[0]; main(*{arguments!r})"


async def _prints(sandbox: Sandbox, program: str, given: str, wanted: str, limits: SandboxLimits) -> tuple[str, float]:
    began = time.monotonic()
    ran = await sandbox.run(program, limits, stdin=given.encode(errors="replace"), errors=False)
    waited = time.monotonic() - began
    # A sandbox server may report any time, but the program ran no longer than this process waited for it.
    seconds = max(0.0, min(waited, limits.wall_s if ran.seconds is None else ran.seconds))
    return PASSED if ran.status == 0 and _lines(wanted) == _lines(ran.printed) else FAILED, seconds


async def _holds(task: Task, program: str, limits: SandboxLimits) -> tuple[str, float]:
    began = time.monotonic()
    return await _judge(task, program, limits), time.monotonic() - began


async def _judge(task: Task, program: str, limits: SandboxLimits) -> str:
    """The verdict of the task's asserts. The asserts run in one sandbox, the program in another."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        running = asyncio.create_task(run(_script("program", theirs.fileno(), program), limits, fds=[theirs.fileno()]))
        # Once the program has ended, shut its side of the connection. Otherwise the judge would wait for its answers.
        running.add_done_callback(lambda _: theirs.shutdown(socket.SHUT_RDWR))
        try:
            judged = await run(_script("judge", ours.fileno(), task.truth_text), limits, fds=[ours.fileno()])
            begun, _, verdict = judged.printed.partition(" ")
            word, _, reason = verdict.partition(" ")
            if word == ENDED or (judged.status == 0 and not judged.printed):
                # If the program's sandbox failed, its error is raised here.
                await running
        finally:
            running.cancel()
            await asyncio.wait([running])
    if word == UNSUITED:
        raise ScoringError(f"task {task.id} cannot be judged by its asserts: {reason}; use inputs and outputs")
    if judged.status == 0 and word in (PASSED, FAILED, ENDED, UNCLEAR):
        return FAILED if word == ENDED else word
    if begun != BEGUN and (judged.status is None or judged.killed or not judged.printed):
        # The program is not at fault: it has not run, or was not called.
        raise ScoringError(
            f"the asserts of task {task.id} or the program could not begin within {limits.wall_s:.3g} s and "
            f"{limits.memory_mb} MB: raise wall_s or memory_mb of the rule, or scoring.timeout_s, or run fewer "
            "programs at once"
        )
    if judged.status is None or judged.killed:
        # The program's answers made the tests take too long, or too much memory.
        return FAILED
    raise ScoringError(
        f"the tests of task {task.id} ended with status {judged.status} and no verdict: "
        f"{judged.printed.removeprefix(BEGUN).strip()[-500:]}"
    )


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
