import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import ScoringError
from asyncrl.scoring.models.base import StepScores


@pytest.mark.slow
@given(st.lists(st.floats(-20, 20, width=32), max_size=6))
def test_probability_and_logit_say_the_same(logits):
    scores = StepScores.of_logits(logits)
    assert scores.probability.dtype == scores.logit.dtype == np.float32
    np.testing.assert_allclose(scores.probability, 1 / (1 + np.exp(-np.array(logits))), rtol=1e-6)
    within = np.clip(scores.logit, -10, 10)
    back = StepScores.of_probabilities(1 / (1 + np.exp(-within.astype(np.float64))))
    np.testing.assert_allclose(back.logit, within, atol=1e-4)


def test_certainty_stays_finite():
    scores = StepScores.of_probabilities([0.0, 1.0])
    assert scores.probability.tolist() == [0.0, 1.0]
    assert np.isfinite(scores.logit).all()
    np.testing.assert_array_equal(StepScores.of_logits([-200.0, 200.0]).probability, [0.0, 1.0])


@pytest.mark.parametrize("bad", [[float("nan")], [1.5], [-0.1], [float("inf")]])
def test_nonsense_is_refused(bad):
    with pytest.raises(ScoringError, match="not finite"):
        StepScores.of_probabilities(bad)
    with pytest.raises(ScoringError, match="not finite"):
        StepScores.of_logits([float("nan")])
    with pytest.raises(ScoringError, match="must be"):
        StepScores(np.zeros(2, np.float32), np.zeros(1, np.float32))
