"""Programs against unit tests, in the real sandbox."""

import json
import time

import pytest

from asyncrl.errors import ScoringError
from asyncrl.scoring.rules.code import code
from tests.helpers import GENEROUS_S
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


def test_a_program_that_overruns_costs_its_score_and_not_the_verification():
    verdict = judge("while True: pass", PAIRS, partial=True, deadline=time.monotonic() + 3.0)
    assert verdict == {"score": 0.0, "passed": 0.0, "out_of_time": 1.0, "unclear": 0.0}


def test_more_tests_than_there_is_time_to_start_are_a_failure_whatever_the_program():
    many = json.dumps({"inputs": ["1"] * 100, "outputs": ["1"] * 100})
    with pytest.raises(ScoringError, match=r"has 100 tests, more than can start in time: raise scoring\.timeout_s"):
        judge("print(2)", many, deadline=time.monotonic() + 2.0)
