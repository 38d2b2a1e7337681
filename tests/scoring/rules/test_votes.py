"""Attempts that give the same answer have the same vote, and others another one."""

from __future__ import annotations

from contextlib import closing

import pytest

from asyncrl.config.schema import ScoringConfig
from asyncrl.scoring.rules.registry import load_rules
from asyncrl.scoring.rules.votes import LONGEST
from asyncrl.scoring.verifier import Verifier
from tests.scoring.fakes import rule_input


def with_pred(data_source: str, solution_str: str, ground_truth: str, extra_info: object = None) -> dict[str, object]:
    """Return a score and the answer that was read, as rules of verl do."""
    return {"score": 1.0, "pred": solution_str[-1], "note": "is left out"}


def votes(rule: str, *answers: str, truth: str = "72") -> list[str]:
    rules = load_rules(ScoringConfig(rule=rule))
    return [rules.score(rule_input(answer, truth=truth)).vote for answer in answers]


def test_numbers_vote_by_their_value() -> None:
    assert votes("exact_number", "#### 1,000", "it is 1000.0", "the answer is 10^3", "none") == ["1000"] * 3 + [""]
    assert votes("gsm8k", "#### 1/2", "so 0.5") == ["1/2", "1/2"]


def test_options_vote_by_their_letter() -> None:
    assert votes("multiple_choice", "The answer is (B).", r"\boxed{b}", "B or C", truth="B") == ["B", "B", ""]


@pytest.mark.parametrize("answer", [r"so \boxed{x  + 1}", "<answer>x + 1</answer>", "#### x + 1", " x +\n1 "])
def test_other_answers_vote_by_what_they_state(answer: str) -> None:
    assert votes("exact_match", answer, truth="x") == ["x + 1"]


def test_a_function_may_name_the_answer_that_it_read() -> None:
    assert votes("tests.scoring.rules.test_votes.with_pred", "it is 7", "no, 8") == ["7", "8"]


@pytest.mark.slow
def test_the_verifier_brings_votes_from_its_processes() -> None:
    with closing(Verifier(ScoringConfig(rule="exact_number"))) as verifier:
        assert verifier.score(rule_input("#### 5", truth="72")).vote == "5"


def test_a_long_answer_votes_by_a_digest() -> None:
    one, other, again = votes("exact_match", "x" * 500 + "a", "x" * 500 + "b", "x" * 500 + "a", truth="x")
    assert one == again != other
    assert len(one) == LONGEST
