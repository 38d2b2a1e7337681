import pytest

from asyncrl.config.schema import ShapingConfig
from asyncrl.scoring.shaping import Found, shape


def test_the_reward_is_the_weighted_sum_of_its_named_parts():
    config = ShapingConfig(
        outcome_weight=2.0,
        outcome_model_weight=0.125,
        process_weight=0.5,
        environment_weight=0.25,
        prm_acc_bonus_weight=3.0,
    )
    found = Found(10, rules=1.1, outcome=1.0, outcome_model=0.8, process=0.25, environment=2.0)
    shaped = shape(found, config)
    assert shaped.parts == {
        "rules": 1.1,
        "outcome_model": 0.8,
        "process": 0.25,
        "environment": 2.0,
        "accuracy": 1.0,
    }
    assert shaped.reward == pytest.approx(2.2 + 0.1 + 0.125 + 0.5 + 3.0)


def test_by_default_the_rules_alone_are_the_reward_and_the_parts_are_still_told():
    shaped = shape(Found(10, rules=0.5, outcome=0.5, process=0.9, environment=3.0), ShapingConfig())
    assert shaped.reward == 0.5
    assert set(shaped.parts) == {"rules", "process", "environment", "accuracy"}


def test_a_kind_that_a_source_does_not_need_is_no_part_of_its_reward():
    assert shape(Found(10, process=0.5), ShapingConfig(process_weight=2.0, prm_acc_bonus_weight=9.0)).reward == 1.0


@pytest.mark.parametrize(("outcome", "accuracy"), [(1.0, 1.0), (0.51, 1.0), (0.5, 0.0), (-1.0, 0.0)])
def test_an_answer_is_right_where_the_first_rule_gives_more_than_a_half(outcome, accuracy):
    assert Found(1, outcome=outcome).accuracy == accuracy


@pytest.mark.parametrize(("length", "bonus"), [(400, 0.05), (200, 0.025), (600, 0.025), (800, 0), (1, 0.05 / 400)])
def test_the_length_bonus_is_only_for_right_answers(length, bonus):
    config = ShapingConfig(length_bonus_weight=0.05)
    right = shape(Found(length, rules=1.0, outcome=1.0), config)
    assert right.reward == pytest.approx(1 + bonus)
    assert right.parts["length_bonus"] == pytest.approx(bonus)
    assert shape(Found(length, rules=0.0, outcome=0.0), config).reward == 0


def test_a_wrong_answer_pays_the_penalty_while_anti_hack_is_on():
    config = ShapingConfig(incorrect_answer_penalty=-0.5)
    assert shape(Found(1, rules=0.0, outcome=0.0), config).reward == -0.5
    assert shape(Found(1, rules=1.0, outcome=1.0), config).parts["incorrect_answer"] == 0
    config.enable_anti_hack = False
    assert shape(Found(1, rules=0.0, outcome=0.0), config).reward == 0


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (60, 0), (80, -0.25), (90, -0.375), (100, -0.5), (999, -0.5)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(length, penalty):
    config = ShapingConfig(overlong_penalty=0.5, overlong_max_length=100, overlong_buffer=40)
    shaped = shape(Found(length, rules=1.0, outcome=1.0), config)
    assert shaped.reward == pytest.approx(1 + penalty)
    assert shaped.parts["overlong"] == pytest.approx(penalty)
