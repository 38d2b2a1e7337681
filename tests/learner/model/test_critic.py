"""The numbers that a step tells of its critic, worked by hand."""

from __future__ import annotations

import pytest
import torch

from asyncrl.learner.model.critic import critic_summary


def test_the_bias_of_a_critic_is_no_part_of_the_variance_that_it_leaves_unexplained() -> None:
    # Returns 1, 2 and 3, whose variance is 2/3, and values of half of them: errors 1/2, 1 and 3/2, whose mean is 1 and
    # whose variance is 1/6. So 1 - (1/6) / (2/3) = 3/4 is explained.
    sums = {
        "value/tokens": 3.0,
        "value/error": 3.0,
        "value/error_squared": 3.5,
        "value/clipped": 1.0,
        "return/sum": 6.0,
        "return/centred": 0.0,
        "return/squared": 2.0,
    }
    found = critic_summary({name: torch.tensor(value, dtype=torch.float64) for name, value in sums.items()})
    assert found == pytest.approx({"value/bias": 1, "value/explained_variance": 3 / 4, "value/clipped": 1 / 3})


def test_a_step_without_a_critic_has_no_numbers_of_one() -> None:
    assert critic_summary({"tokens": torch.tensor(3.0)}) == {}
