"""The program in the answer passes the ground truth's unit tests, run in the sandbox.

The ground truth is either Python that tests what the program defines (`assert add(1, 2) == 3`), or JSON
`{"inputs": [...], "outputs": [...]}` of what the program reads and prints. The program is the answer's last fenced
block, or the whole answer.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from functools import partial as bind

from asyncrl import sandbox
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.text import last_block
from asyncrl.types import Task, Trajectory

_WITH_INPUT = """\
import io, sys
sys.stdin = io.TextIOWrapper(io.BytesIO({input!r}.encode()), encoding="utf-8")
exec(compile({code!r}, "program.py", "exec"), {{"__name__": "__main__"}})
"""
_WITH_TESTS = """\
names = {{"__name__": "program"}}
exec(compile({code!r}, "program.py", "exec"), names)
exec(compile({tests!r}, "tests.py", "exec"), names)
print({passed!r})
"""


def code(
    task: Task,
    answer: str,
    trajectory: Trajectory,
    *,
    wall_s: float = 4.0,
    cpu_s: float = 4.0,
    memory_mb: int = 1024,
    partial: bool = False,
) -> Mapping[str, float]:
    """`score` is 1 where all tests pass, else 0, or with `partial` the share that does; `passed` is that share. The
    limits are those of one test: all of them must end within `scoring.timeout_s`.

    Raises ScoringError: the ground truth holds no tests.
    """
    limits = sandbox.Limits(wall_s, cpu_s, memory_mb)
    tests = list(_tests(task, last_block(answer)))
    results: list[bool] = []
    for program, accepts in tests:
        ran = asyncio.run(sandbox.run(program, limits))
        results.append(ran.status == 0 and accepts(ran.printed))
        if not results[-1] and not partial:
            break
    share = sum(results) / len(tests)
    return {"score": share if partial else float(share == 1), "passed": share}


def _tests(task: Task, program: str) -> Iterator[tuple[str, Callable[[str], bool]]]:
    """Each test as a program to run, and whether what it prints is right."""
    if not task.ground_truth.strip():
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    if task.ground_truth.lstrip().startswith("{"):
        for given, wanted in _pairs(task):
            yield _WITH_INPUT.format(code=program, input=given), bind(_prints, wanted)
        return
    # What the program cannot guess: one that ends early has not passed.
    passed = secrets.token_hex(16)
    yield _WITH_TESTS.format(code=program, tests=task.ground_truth, passed=passed), lambda text: passed in text


def _pairs(task: Task) -> list[tuple[str, str]]:
    try:
        tests = json.loads(task.ground_truth)
        pairs = list(zip(map(str, tests["inputs"]), map(str, tests["outputs"]), strict=True))
    except (ValueError, TypeError, KeyError) as error:
        raise ScoringError(f"the ground truth of task {task.id} is no set of tests: {error!r}") from error
    if not pairs:
        raise ScoringError(f"the ground truth of task {task.id} holds no tests")
    return pairs


def _prints(wanted: str, printed: str) -> bool:
    return _lines(wanted) == _lines(printed)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
