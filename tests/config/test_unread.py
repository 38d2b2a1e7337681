"""Scores that change nothing are found by their weights and by the parts of the algorithm."""

from __future__ import annotations

from typing import Any

import pytest

from asyncrl.algorithms.advantages.base import Advantage
from asyncrl.algorithms.registry import parts
from asyncrl.config.schema import AlgorithmConfig, PartConfig, ScoringConfig, SftConfig, ShapingConfig
from asyncrl.config.unread import READ_STEPS, unread_scores

RULES = {"math": ["gsm8k", {"name": "my.form", "as": "form", "weight": 0}, {"name": "length", "weight": 0.5}]}


@pytest.mark.parametrize(
    ("scoring", "algorithm", "expected"),
    [
        ({}, {}, {"environment"}),
        ({"shaping": ShapingConfig(environment_weight=0.5)}, {}, set()),
        ({}, {"advantage": PartConfig("process_grpo")}, set()),
        ({}, {"advantage": PartConfig("gae", {"step_weight": 0.5})}, set()),
        ({"steps": "my.steps"}, {"advantage": PartConfig("process_grpo")}, {"environment"}),
        ({"rules": RULES}, {}, {"environment", "rule/form"}),
        ({"rules": {"math": [{"name": "gsm8k", "weight": 0}, "length"]}}, {}, {"environment"}),
        ({"rules": RULES}, {"advantage": PartConfig("gdpo", {"weights": {"rule/form": 1.0}})}, {"environment"}),
        ({"rules": RULES}, {"advantage": PartConfig("gdpo", {"weights": {"environment": 1.0}})}, {"rule/form"}),
        ({"rules": RULES}, {"advantage": PartConfig("my.Advantage")}, set()),
        ({"rules": RULES}, {"reward": [PartConfig("my.Reward")]}, set()),
        ({"rules": RULES}, {"sft": SftConfig(path=["demos.jsonl"])}, {"environment", "rule/form"}),
        ({"rules": {"math": ["gsm8k", {"name": "my.py:form", "weight": 0}]}}, {}, {"environment", "rule/form"}),
    ],
)
def test_a_score_without_a_weight_is_unread_unless_a_part_names_it(
    scoring: dict[str, Any], algorithm: dict[str, Any], expected: set[str]
) -> None:
    assert unread_scores(ScoringConfig(**scoring), AlgorithmConfig(**algorithm)).keys() == expected


def test_the_advantages_that_read_the_rewards_of_turns_are_those_that_need_step_scores() -> None:
    known = parts("advantage").items()
    assert {name for name, part in known if issubclass(part, Advantage) and part.needs_steps} == set(READ_STEPS)


def test_the_advice_names_the_ways_to_use_a_score_or_to_do_without_it() -> None:
    advice = unread_scores(ScoringConfig(rules=RULES), AlgorithmConfig())["rule/form"]
    assert "rule/form" not in unread_scores(ScoringConfig(rules=RULES), AlgorithmConfig(), compared="rule/form")
    assert advice.startswith(
        "give this rule a weight (scoring.rules.math), name `rule/form` in a part of the algorithm"
    )
