import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import ShapingConfig
from asyncrl.scoring.shaping import StepText, accuracy, aggregate, earned, repeated, shape, transformed

SCORES = np.array([0.5, 0.25, 1.0], np.float32)


@pytest.mark.parametrize(
    ("how", "value"),
    [
        ("mean_response", 1.75 / 3),
        ("best_of_n", 1.75 / 3),
        ("min", 0.25),
        ("pooled_last", 1.0),
        ("product", 0.125),
    ],
)
def test_step_scores_become_one_number(how, value):
    assert aggregate(SCORES, how) == pytest.approx(value)


def test_clip_leaves_only_what_is_missing_and_delta_only_what_a_step_adds():
    assert transformed(SCORES, ShapingConfig(step_transforms=["clip"], clip_eta=0.75)).tolist() == [-0.25, -0.5, 0]
    assert transformed(SCORES, ShapingConfig(step_transforms=["delta"])).tolist() == [0.25, -0.75, 1.0]
    both = transformed(SCORES, ShapingConfig(step_transforms=["clip", "delta"], clip_eta=0.75))
    assert both.tolist() == [0.25, -0.5, 0]
    assert transformed(SCORES, ShapingConfig()) is SCORES


@pytest.mark.slow
@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=20))
def test_delta_makes_the_steps_from_any_on_sum_to_its_score(values):
    scores = np.array(values, np.float32)
    deltas = transformed(scores, ShapingConfig(step_transforms=["delta"]))
    np.testing.assert_allclose(np.cumsum(deltas[::-1].astype(np.float64))[::-1], scores, atol=1e-5)


def test_a_step_repeats_another_whatever_its_white_space_case_number_and_last_mark():
    def found(*texts):
        return repeated(StepText(text, 1) for text in texts)

    assert found("so 1 + 1", "then", " so  1 + 1\n", "Then.") == [False, False, True, True]
    assert found("So it is.", "(1) So it is.", "2. so it is!", "Step 3: so it is") == [False, True, True, True]
    assert found("3 + 4", "3 - 4", "(3 + 4) * 2", "3 + 4 * 2", "5 + 4") == [False] * 5


def test_steps_are_earned_up_to_the_first_answer_once_each_and_within_the_lengths():
    texts = ["a", "b", "a", "so #### 5", "#### 5", "thanks"]
    steps = [StepText(text, 10) for text in texts]
    scores = np.arange(1, 7).astype(np.float32)

    def kept(length=60, **config):
        values, indices = earned(scores, steps, length, ShapingConfig(**config))
        return dict(zip(indices, values.tolist(), strict=True))

    assert kept() == {0: 1, 1: 2, 3: 4}
    assert kept(stop_at_answer=False) == {0: 1, 1: 2, 3: 4, 4: 5, 5: 6}
    assert kept(answer_pattern="b") == {0: 1, 1: 2}
    assert kept(max_step_tokens=9) == kept(length=61, max_resp_len=60) == {0: 0, 1: 0, 3: 0}
    assert kept(length=9999, max_step_tokens=1, enable_anti_hack=False) == dict(enumerate(range(1, 7)))


def test_an_answer_and_a_repeat_are_those_of_their_branch():
    texts = ["a", "so #### 5", "more"] * 2
    steps = [StepText(text, 1, branch=index // 3) for index, text in enumerate(texts)]
    scores = np.arange(1, 7).astype(np.float32)
    assert earned(scores, steps, 6, ShapingConfig())[1] == [0, 1, 3, 4]


def test_what_is_too_long_keeps_a_score_below_zero():
    scores = np.array([-0.5, 0.5], np.float32)
    values, _ = earned(scores, [StepText("a", 5), StepText("b", 4)], 9, ShapingConfig(max_resp_len=8))
    assert values.tolist() == [-0.5, 0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("#### 5", True),
        (r"so \boxed{5}", True),
        ("The answer is 5", True),
        ("Answer: 5", True),
        ("we answer later", False),
        ("the box", False),
    ],
)
def test_a_final_answer_is_known_by_its_mark(text, found):
    rising = np.array([0.5, 0.75], np.float32)
    _, kept = earned(rising, [StepText(text, 1), StepText("more", 1)], 2, ShapingConfig())
    assert kept == ([0] if found else [0, 1])


def test_a_turn_that_calls_a_tool_is_no_final_answer():
    steps = [StepText("to find the answer: call", 1, calls=True), StepText("more", 1)]
    assert earned(np.array([0.5, 0.75], np.float32), steps, 2, ShapingConfig())[1] == [0, 1]


AGGREGATIONS = ["mean_response", "min", "product", "pooled_last", "per_step"]
TRANSFORMS: list[list[str]] = [[], ["clip"], ["delta"], ["clip", "delta"]]


@pytest.mark.slow
@given(
    st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=12),
    st.integers(0, 11),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(TRANSFORMS),
)
def test_announcing_an_answer_anywhere_never_makes_steps_worth_more(values, announced, how, transforms):
    scores = np.abs(np.array(values, np.float32)) if how == "product" else np.array(values, np.float32)
    config = ShapingConfig(prm_aggregation=how, step_transforms=transforms)
    honest = [StepText(f"{k} + {k}", 1) for k in range(len(values))]
    hacked = [StepText("#### 5", 1) if k == announced else step for k, step in enumerate(honest)]
    (before, _), (after, _) = (earned(scores, steps, len(values), config) for steps in (honest, hacked))
    assert aggregate(after, how) <= aggregate(before, how) + 1e-6
    assert transformed(after, config).sum() <= transformed(before, config).sum() + 1e-5


def test_the_reward_is_the_weighted_sum_of_its_named_parts():
    config = ShapingConfig(
        outcome_weight=2.0,
        outcome_model_weight=0.125,
        process_weight=0.5,
        environment_weight=0.25,
        prm_acc_bonus_weight=3.0,
    )
    scores = {"rules": 1.1, "outcome_model": 0.8, "process": 0.25, "environment": 2.0, "accuracy": 1.0}
    reward, parts = shape(scores, 10, config)
    assert parts == scores
    assert reward == pytest.approx(2.2 + 0.1 + 0.125 + 0.5 + 3.0)


def test_by_default_the_rules_alone_are_the_reward():
    assert shape({"rules": 0.5, "accuracy": 0.0, "process": 0.9, "environment": 3.0}, 10, ShapingConfig())[0] == 0.5


def test_a_kind_that_a_source_does_not_need_is_no_part_of_its_reward():
    config = ShapingConfig(process_weight=2.0, prm_acc_bonus_weight=9.0)
    assert shape({"process": 0.5}, 10, config) == (1.0, {"process": 0.5})


def test_an_answer_is_right_where_the_first_rule_gives_more_than_a_half():
    assert [accuracy(outcome) for outcome in (1.0, 0.51, 0.5, -1.0)] == [1.0, 1.0, 0.0, 0.0]


RIGHT, WRONG = {"rules": 1.0, "accuracy": 1.0}, {"rules": 0.0, "accuracy": 0.0}


@pytest.mark.parametrize(("length", "bonus"), [(400, 0.05), (200, 0.025), (600, 0.025), (800, 0), (1, 0.05 / 400)])
def test_the_length_bonus_is_only_for_right_answers(length, bonus):
    config = ShapingConfig(length_bonus_weight=0.05)
    reward, parts = shape(RIGHT, length, config)
    assert reward == pytest.approx(1 + bonus)
    assert parts["length_bonus"] == pytest.approx(bonus)
    assert shape(WRONG, length, config)[0] == 0


def test_a_wrong_answer_pays_the_penalty_while_anti_hack_is_on():
    config = ShapingConfig(incorrect_answer_penalty=-0.5)
    assert shape(WRONG, 1, config)[0] == -0.5
    assert shape(RIGHT, 1, config)[1]["incorrect_answer"] == 0
    config.enable_anti_hack = False
    assert shape(WRONG, 1, config)[0] == 0


@pytest.mark.parametrize(("length", "penalty"), [(1, 0), (60, 0), (80, -0.25), (90, -0.375), (100, -0.5), (999, -0.5)])
def test_the_overlong_penalty_grows_linearly_over_the_buffer(length, penalty):
    config = ShapingConfig(overlong_penalty=0.5, overlong_max_length=100, overlong_buffer=40)
    reward, parts = shape(RIGHT, length, config)
    assert reward == pytest.approx(1 + penalty)
    assert parts["overlong"] == pytest.approx(penalty)
