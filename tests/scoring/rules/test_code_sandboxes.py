"""The rule `code` in other sandboxes than the built-in one: their failures and delays are never a program's."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.errors import ConfigError, ScoringError
from asyncrl.sandbox.sandbox import ProgramResult, SandboxError, SandboxLimits
from asyncrl.scoring.rules.code import code, prepare
from tests.helpers import make_task, make_trajectory

TASK = make_task(ground_truth=json.dumps({"inputs": ["1", "2"], "outputs": ["2", "3"]}))
ANSWER = "```python\nprint(int(input()) + 1)\n```"


class Clock:
    """The seconds of the rule, which only sandboxes move on."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("asyncrl.scoring.rules.code.time", SimpleNamespace(monotonic=clock))
    return clock


class Elsewhere:
    """Answers with the program's results in turn, each `seconds` long, after a delay on the clock."""

    def __init__(self, *results: Any, clock: Clock | None = None, delay_s: float = 0.0, seconds: float = 0.1) -> None:
        self._results = iter(results)
        self._clock, self._delay_s = clock or Clock(), delay_s
        self._seconds = seconds
        self.limits: list[float] = []

    async def run(
        self, program: str, limits: SandboxLimits, *, stdin: bytes = b"", errors: bool = True
    ) -> ProgramResult:
        self.limits.append(limits.wall_s)
        self._clock.now += self._delay_s
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        printed, status = result
        return ProgramResult(printed, status, self._seconds)

    async def check(self) -> None:
        raise SandboxError("no program docker")


def scored(sandbox: Elsewhere, left_s: float = 600.0, **options: Any) -> Any:
    return code(TASK, ANSWER, make_trajectory(), deadline=left_s, sandbox=sandbox, **options)


def test_a_program_is_judged_by_what_it_prints_there():
    assert scored(Elsewhere(("2\n", 0), ("3\n", 0)))["score"] == 1
    assert scored(Elsewhere(("2\n", 0), ("4\n", 0)))["score"] == 0
    assert scored(Elsewhere(("2\n", 1)))["score"] == 0
    scores = scored(Elsewhere(("2\n", 0), ("", None)), partial=True)
    assert (scores["score"], scores["out_of_time"]) == (0.5, 0)


def test_a_sandbox_that_fails_gives_no_score():
    with pytest.raises(SandboxError, match="it is gone"):
        scored(Elsewhere(("2\n", 0), SandboxError("it is gone")))


def test_a_sandbox_that_lets_programs_wait_too_long_gives_no_score(clock: Clock):
    with pytest.raises(ScoringError, match=r"ran 1 of 2 tests in .* raise scoring\.timeout_s"):
        scored(Elsewhere(("2\n", 0), ("3\n", 0), clock=clock, delay_s=0.3), left_s=0.3)


def test_a_test_has_no_more_than_the_rest_of_the_time(clock: Clock):
    sandbox = Elsewhere(("2\n", 0), ("3\n", 0), clock=clock, delay_s=2.0, seconds=2.0)
    # Tests have three quarters of the time.
    scored(sandbox, left_s=8.0, wall_s=5.0)
    assert sandbox.limits == [5.0, 4.0]


def test_a_last_test_that_the_time_ended_is_out_of_time(clock: Clock):
    sandbox = Elsewhere(("2\n", 0), ("", None), clock=clock, delay_s=3.0, seconds=3.0)
    assert scored(sandbox, left_s=8.0, wall_s=5.0)["out_of_time"] == 1


@pytest.mark.parametrize(
    "truth",
    [
        {"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]},
        {"inputs": "12", "outputs": "34"},
        {"inputs": ["1"], "outputs": [None]},
        {"inputs": [["1", "2"]], "outputs": ["3"]},
    ],
)
def test_a_ground_truth_of_another_form_is_a_failure_and_not_a_zero(truth: Any):
    task = make_task(ground_truth=json.dumps(truth))
    with pytest.raises(ScoringError, match="is not a set of tests"):
        code(task, ANSWER, make_trajectory(), sandbox=Elsewhere(("2\n", 0)))


def test_programs_that_run_too_long_have_failed(clock: Clock):
    slow = Elsewhere(("", None), ("3\n", 0), clock=clock, delay_s=0.4, seconds=500.0)
    scores = scored(slow, left_s=0.4, partial=True)
    assert (scores["score"], scores["out_of_time"]) == (0, 1)


@pytest.mark.parametrize("seconds", [500.0, -500.0, math.nan, math.inf])
def test_a_sandbox_that_is_wrong_about_the_time_fails_no_program(seconds: float):
    assert scored(Elsewhere(("2\n", 0), ("3\n", 0), seconds=seconds))["score"] == 1


def test_asserts_are_refused_there_since_the_tests_talk_to_the_program():
    task = make_task(ground_truth="assert add(1, 2) == 3")
    with pytest.raises(ScoringError, match=r"need actor\.sandbox\.kind=builtin"):
        code(task, ANSWER, make_trajectory(), sandbox=Elsewhere())


def test_a_sandbox_that_runs_nothing_here_is_refused_at_the_start():
    with pytest.raises(ConfigError, match=r"actor\.sandbox: no program docker"):
        prepare(Elsewhere())
