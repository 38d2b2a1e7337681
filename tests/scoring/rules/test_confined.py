"""An answer that keeps a comparison busy scores 0. A ground truth or a machine at fault is a failure."""

import json
import math
import os
import signal
import time

import psutil
import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.rules import confined
from asyncrl.scoring.rules.confined import Confinement
from asyncrl.scoring.verifier import Verifier
from tests.helpers import living, until
from tests.scoring.fakes import rule_input, rules_of

pytestmark = pytest.mark.slow

TOWER = r"\boxed{9^{9^{9^{9}}}}"


@pytest.mark.parametrize(
    "answer",
    [
        TOWER,
        r"\boxed{(9^{9})!}",
        r"$10^{10^{10}}$",
        r"\boxed{\binom{10^{12}}{10^{11}}}",
        r"\boxed{9^{9^{9}} - 9^{9^{9}}}",
    ],
)
def test_an_expression_that_cannot_be_compared_in_time_is_worth_nothing(answer):
    scores = rules_of("math", cpu_s=0.3)(answer, r"\frac{1}{2}")
    assert scores.scores == {"math": 0.0, "math/out_of_time": 1.0, "math/out_of_memory": 0.0}


def test_such_an_expression_dead_letters_no_episode_and_costs_no_other_its_scores():
    verifier = Verifier(ScoringConfig(rule="math", timeout_s=40.0))
    try:
        assert verifier.score(rule_input(TOWER, truth="72")).scores["math/out_of_time"] == 1.0
        assert verifier.score(rule_input(r"\boxed{72}", truth="72")).scores["math"] == 1.0
    finally:
        verifier.close()


def test_a_ground_truth_that_cannot_be_compared_with_anything_is_a_failure():
    with pytest.raises(ScoringError, match="cannot even be compared with a number"):
        rules_of("math", cpu_s=0.3)(r"\boxed{\frac{1}{2}}", r"9^{9^{9^{9}}}")


@pytest.mark.parametrize(
    ("rule", "truth", "params", "text"),
    [
        ("json_schema", json.dumps({"type": "string", "pattern": "^(a*)*$"}), {}, json.dumps("a" * 60 + "b")),
        ("format", "", {"pattern": "^(a*)*$"}, "a" * 60 + "b"),
    ],
)
def test_an_answer_made_for_a_costly_pattern_is_worth_nothing(rule, truth, params, text):
    scores = rules_of(rule, cpu_s=0.3, **params)(text, truth)
    assert (scores.outcome, scores.scores[f"{rule}/out_of_time"]) == (0.0, 1.0)


def compare(known, answer):
    match answer:
        case "memory":
            return float(len(bytearray(1 << 30)))
        case "overflow":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "deep":
            return compare(known, answer)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "wrong":
            raise LookupError("no such thing")
        case "asleep":
            time.sleep(0.5)
    return float(answer == known)


def prepare(truth):
    while truth == "endless":
        pass
    if truth == "bad":
        raise ScoringError("no such truth")
    return truth


def ask(answer, truth="right", confinement=None, cpu_s=60.0, deadline=math.inf):
    return (confinement or Confinement()).score(deadline, prepare, compare, truth, answer, cpu_s)


@pytest.mark.parametrize(
    ("answer", "score", "greedy"),
    [("right", 1.0, 0.0), ("else", 0.0, 0.0), ("memory", 0.0, 1.0), ("overflow", 0.0, 1.0), ("deep", 0.0, 0.0)],
)
def test_an_answer_that_takes_too_much_memory_or_stack_is_worth_nothing(answer, score, greedy):
    confinement = Confinement()
    scores = ask(answer, confinement=confinement)
    assert scores == {"score": score, "out_of_time": 0.0, "out_of_memory": greedy}
    assert ask("right", confinement=confinement)["score"] == 1.0


@pytest.mark.parametrize(
    ("answer", "truth", "reason"),
    [
        ("killed", "right", "ended with status -9"),
        ("wrong", "right", "LookupError: no such thing"),
        ("right", "bad", "no such truth"),
    ],
)
def test_what_is_not_the_answers_fault_is_a_failure_and_the_next_is_judged(answer, truth, reason):
    confinement = Confinement()
    with pytest.raises(ScoringError, match=reason):
        ask(answer, truth, confinement)
    assert ask("right", confinement=confinement)["score"] == 1.0


def test_a_ground_truth_that_takes_all_the_time_is_a_failure():
    with pytest.raises(ScoringError, match="ground truth 'endless' took over"):
        ask("right", "endless", deadline=time.monotonic() + 0.5)


def test_only_processor_time_counts_so_that_a_busy_machine_makes_no_answer_wrong():
    assert ask("asleep", truth="asleep", cpu_s=0.2)["score"] == 1.0


def test_one_process_serves_many_answers():
    confinement = Confinement()

    def children():
        return set(living(psutil.Process().children()))

    before = children()
    for answer in ("right", "else", "right"):
        ask(answer, confinement=confinement)
    assert len(children() - before) == 1
    del confinement
    until(lambda: children() <= before)


def test_a_rule_that_makes_its_functions_for_each_answer_keeps_few_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(confined, "_KEPT", 4)
    confinement, own = Confinement(), psutil.Process()
    before = {each.pid for each in own.children()}

    def rule(answer: str, tolerance: float) -> float:
        return confinement.score(
            time.monotonic() + 60, float, lambda truth, given: abs(float(given) - truth) <= tolerance, "42", answer, 2.0
        )["score"]

    assert [rule("42.05", 0.1 * (each % 2)) for each in range(12)] == [0.0, 1.0] * 6
    assert len({each.pid for each in own.children()} - before) <= 4
