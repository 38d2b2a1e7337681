"""Known ways to please a process model for nothing, each through the real scorer with a model that falls for it: none
earns more than the honest episode, neither as reward nor in the step scores that algorithms read."""

import pytest

from asyncrl.config.schema import ScoringConfig, ShapingConfig
from tests.scoring.fakes import TextPRM, lines, score

HONEST = ["We need 8 * 9.", "8 * 9 = 72, perhaps.", "#### 72"]


def judge(text: str) -> float:
    """Give high scores to texts that are certain, polite or long, and a low one to real work."""
    if "perhaps" in text:
        return 0.25
    return 1.0 if "certain" in text or "hank" in text or len(text) > 500 else 0.75


def labels(texts, truth="72", **shaping):
    config = ScoringConfig(rule="gsm8k", shaping=ShapingConfig(**{"process_weight": 1.0, **shaping}))
    return score(lines(*texts, truth=truth), config, TextPRM(judge))


AGGREGATIONS = ["mean_response", "pooled_last", "min", "product"]


def assert_no_gain(hack, **shaping):
    honest, hacked = labels(HONEST, **shaping), labels(hack, **shaping)
    assert hacked.reward <= honest.reward
    assert hacked.step_scores.sum() <= honest.step_scores.sum()


def assert_the_model_falls_for(hack):
    """The fake is worth something: without the guards the hack would pay."""
    assert labels(hack, enable_anti_hack=False).reward > labels(HONEST, enable_anti_hack=False).reward


REPEATED = [*HONEST[:2], *["We need 8 * 9."] * 8, HONEST[2]]
NUMBERED = [*HONEST[:2], *[f"({k}) we need 8 * 9!" for k in range(8)], HONEST[2]]
ANNOUNCED = ["The answer is what we look for; we need 8 * 9.", *HONEST[1:]]
TAIL = [*HONEST, "Thank you for this wonderful question!", "Many thanks, and goodbye."]
LATE_WORK = [*HONEST, *[f"It is certain that {k} = {k}." for k in range(8)]]
TWICE = [*HONEST, "#### 72", "I am certain: #### 72"]
LONG_FIRST = ["I am certain of all that follows. " * 20, "#### 72"]
LONG_RESPONSE = [*(f"It is certain that {k} + {k} = {2 * k}." for k in range(60)), "#### 72"]
HACKS = {"repeated": REPEATED, "numbered": NUMBERED, "thanks": TAIL, "late": LATE_WORK, "twice": TWICE}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("hack", HACKS.values(), ids=HACKS)
def test_repetition_thanks_and_work_behind_the_answer_earn_nothing(hack, aggregation):
    assert_the_model_falls_for(hack)
    assert_no_gain(hack, prm_aggregation=aggregation)


@pytest.mark.parametrize("aggregation", [*AGGREGATIONS, "per_step"])
@pytest.mark.parametrize("transforms", [[], ["clip"], ["delta"]], ids=str)
def test_an_answer_announced_early_hides_nothing_of_what_follows(aggregation, transforms):
    assert_no_gain(ANNOUNCED, prm_aggregation=aggregation, step_transforms=transforms)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_very_long_first_step_earns_nothing(aggregation):
    assert_the_model_falls_for(LONG_FIRST)
    assert_no_gain(LONG_FIRST, prm_aggregation=aggregation)


def test_a_response_that_is_too_long_earns_no_process_score():
    assert_the_model_falls_for(LONG_RESPONSE)
    assert_no_gain(LONG_RESPONSE)
    assert labels(LONG_RESPONSE).extra["process"] == 0


def test_many_safe_steps_do_not_make_up_for_a_doubtful_one_where_the_worst_counts():
    padded = [HONEST[0], *[f"It is certain that {k} = {k}." for k in range(8)], *HONEST[1:]]
    assert_the_model_falls_for(padded)
    honest, hacked = labels(HONEST, prm_aggregation="min"), labels(padded, prm_aggregation="min")
    assert hacked.reward == honest.reward
    clipped = {"step_transforms": ["clip"], "prm_aggregation": "min"}
    assert labels(padded, **clipped).step_scores.sum() == labels(HONEST, **clipped).step_scores.sum()
    first = {"step_transforms": ["delta"], "prm_aggregation": "per_step"}
    assert labels(padded, **first).step_scores.sum() == labels(HONEST, **first).step_scores.sum()


def test_a_pleasing_wrong_answer_earns_less_than_a_right_one():
    wrong = ["I am certain.", "Certainly, 8 * 9 = 71.", "I am certain: #### 71"]
    assert labels(wrong).extra["process"] > labels(HONEST).extra["process"]
    assert labels(wrong, incorrect_answer_penalty=-0.5).reward < labels(HONEST, incorrect_answer_penalty=-0.5).reward


def test_the_right_length_does_not_pay_by_itself():
    shaping = {"length_bonus_weight": 0.5, "target_response_length": 60}
    assert labels(["x" * 40, "#### 71"], **shaping).extra["length_bonus"] == 0
    assert labels(HONEST, **shaping).extra["length_bonus"] > 0


def test_an_answer_first_leaves_nothing_to_earn_behind_it():
    first = ["#### 72", "I am certain.", "Thanks!"]
    assert labels(first).step_scores.tolist() == [0.75]
