"""Programs against unit tests, in the real sandbox."""

import asyncio
import json
import time

import pytest

from asyncrl.errors import ScoringError
from asyncrl.sandbox import sandbox
from asyncrl.sandbox.sandbox import NotBegunError, ProgramResult, SandboxError
from asyncrl.sandbox.sandboxes import BuiltInSandbox
from asyncrl.scoring.rules.code import code
from tests.helpers import GENEROUS_S, NEVER_BEGINS
from tests.scoring.fakes import answered

pytestmark = pytest.mark.slow

ASSERTS = "assert add(1, 2) == 3\nassert add(-1, 1) == 0"
PAIRS = json.dumps({"inputs": ["1 2\n", "5 5\n"], "outputs": ["3", "10\n"]})
RIGHT = "Sure:\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."


def judge(answer, truth, **options):
    task, trajectory = answered(answer, truth=truth)
    limits = {"wall_s": GENEROUS_S, "cpu_s": GENEROUS_S, **options}
    return code(task=task, answer=answer, trajectory=trajectory, **limits)


def test_a_program_that_passes_its_tests_is_right():
    assert judge(RIGHT, ASSERTS) == {"score": 1.0, "passed": 1.0, "out_of_time": 0.0, "unclear": 0.0}
    assert judge("def add(a, b): return b + a", ASSERTS)["score"] == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b): return a - b",
        "def add(a, b:",
        "",
        "import sys; sys.exit(0)",
        "import os\nprint('passed', flush=True)\nos._exit(0)",
        "def add(a, b):\n    while True: pass",
        "x = bytearray(1 << 40)",
    ],
    ids=["wrong", "syntax", "nothing", "exit", "hard exit", "endless", "memory"],
)
def test_a_program_that_does_not_is_wrong(program):
    assert judge(program, ASSERTS, cpu_s=1)["score"] == 0.0


def test_programs_may_read_and_print():
    assert judge("a, b = map(int, input().split())\nprint(a + b)", PAIRS)["score"] == 1.0
    assert judge("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", PAIRS)["score"] == 1.0
    assert (
        judge("import sys\nprint(sum(map(int, input().split())))\nprint('seen', file=sys.stderr)", PAIRS)["score"] == 1
    )
    assert judge("print(3)", PAIRS) == {"score": 0.0, "passed": 0.5, "out_of_time": 0.0, "unclear": 0.0}
    assert judge("if __name__ == '__main__': print(10)", PAIRS, partial=True) == {
        "score": 0.5,
        "passed": 0.5,
        "out_of_time": 0.0,
        "unclear": 0.0,
    }


def test_a_program_that_no_file_can_hold_is_wrong():
    assert judge("print('\ud800')", PAIRS)["score"] == 0.0


class Slow(BuiltInSandbox):
    """A sandbox whose first program begins, and takes all of its time. The others cannot begin in theirs."""

    ran = 0

    async def run(self, program, limits, *, stdin=b"", errors=True):
        self.ran += 1
        if self.ran == 1:
            await asyncio.sleep(limits.wall_s - 0.1)
            return ProgramResult("3", 0)
        await asyncio.sleep(limits.wall_s + 0.01)
        raise NotBegunError("a program could not begin")


def test_tests_whose_time_the_tests_before_took_are_out_of_time():
    verdict = judge("print(3)", PAIRS, partial=True, sandbox=Slow(), deadline=time.monotonic() + 1.0)
    assert verdict == {"score": 0.5, "passed": 0.5, "out_of_time": 1.0, "unclear": 0.0}


class Overrunning(BuiltInSandbox):
    """A sandbox whose programs begin, and do not end in their time."""

    async def run(self, program, limits, *, stdin=b"", errors=True):
        await asyncio.sleep(limits.wall_s + 0.01)
        return ProgramResult("", None)


def test_a_program_that_overruns_costs_its_score_and_not_the_verification():
    verdict = judge("print(3)", PAIRS, partial=True, sandbox=Overrunning(), deadline=time.monotonic() + 1.0)
    assert verdict == {"score": 0.0, "passed": 0.0, "out_of_time": 1.0, "unclear": 0.0}


class Failing(BuiltInSandbox):
    """A sandbox whose first program passes, and in which no other can be run."""

    ran = 0

    async def run(self, program, limits, *, stdin=b"", errors=True):
        self.ran += 1
        if self.ran > 1:
            raise SandboxError("no processes are left")
        return ProgramResult("3", 0)


def test_a_sandbox_that_fails_after_a_test_is_a_failure_and_not_a_score():
    with pytest.raises(SandboxError, match="no processes are left"):
        judge("print(3)", PAIRS, partial=True, sandbox=Failing())


def test_a_program_that_could_not_begin_has_no_score(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "child_command", lambda _: NEVER_BEGINS)
    with pytest.raises(SandboxError, match=r"could not begin within its 0\.001 s"):
        judge("print(3)", PAIRS, wall_s=0.001)


def test_more_tests_than_there_is_time_to_start_are_a_failure_whatever_the_program():
    many = json.dumps({"inputs": ["1"] * 100, "outputs": ["1"] * 100})
    with pytest.raises(ScoringError, match=r"has 100 tests, more than can start in time: raise scoring\.timeout_s"):
        judge("print(2)", many, deadline=time.monotonic() + 2.0)
