import numpy as np
import pytest

from asyncrl.config.schema import ShapingConfig
from asyncrl.errors import ScoringError
from asyncrl.scoring.shaping import shape

SCORES = np.array([0.5, 0.25, 1.0], np.float32)


@pytest.mark.parametrize(("how", "process"), [("mean", 1.75 / 3), ("min", 0.25), ("last", 1.0), ("product", 0.125)])
def test_the_reward_is_the_weighted_sum_of_its_named_parts(how, process):
    config = ShapingConfig(outcome_weight=2.0, process_weight=0.5, process_aggregation=how, environment_weight=0.25)
    shaped = shape(1.0, SCORES, {"calculator": 3.0, "sandbox": -1.0}, config)
    assert shaped.parts == pytest.approx({"process": process, "environment": 2.0})
    assert shaped.reward == pytest.approx(2.0 + 0.5 * process + 0.25 * 2.0)


def test_by_default_the_outcome_alone_is_the_reward_and_the_parts_are_still_told():
    shaped = shape(0.5, SCORES, {"calculator": 3.0}, ShapingConfig())
    assert shaped.reward == 0.5
    assert set(shaped.parts) == {"process", "environment"}


def test_step_scores_that_count_but_are_absent_are_a_failure_and_not_a_zero():
    none = np.zeros(0, np.float32)
    assert "process" not in shape(1.0, none, {}, ShapingConfig()).parts
    with pytest.raises(ScoringError, match="no scored steps"):
        shape(1.0, none, {}, ShapingConfig(process_weight=0.1))
