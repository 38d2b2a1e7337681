"""A learning rate that is far too large is warned of, with the usual range."""

from __future__ import annotations

import pytest

from asyncrl.config.schema import TrainConfig
from asyncrl.launch.preflight.learning import warn_of_large_rates


def warnings_of(config: TrainConfig, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    warn_of_large_rates(config.model, config.critic, config.implicit, config.learner)
    return [record.getMessage() for record in caplog.records]


def test_a_learning_rate_above_every_usual_one_is_warned_of_with_the_usual_range(
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = TrainConfig()
    config.learner.lr = config.implicit.lr = 3.0
    [line] = warnings_of(config, caplog)
    assert line.startswith("learner.lr=3 is so large")
    assert "learner.optimizer=adamw" in line
    assert "1e-6 to 1e-5 for reinforcement learning" in line
    config.implicit.train, config.critic.lr = True, 0.1
    assert [each.partition(" ")[0] for each in warnings_of(config, caplog)] == [
        "learner.lr=3",
        "critic.lr=0.1",
        "implicit.lr=3",
    ]


def test_usual_rates_are_not_warned_of_and_adapters_may_have_larger_ones(caplog: pytest.LogCaptureFixture) -> None:
    config = TrainConfig()
    config.learner.lr = 1e-3
    assert warnings_of(config, caplog) == []
    config.learner.lr = 5e-3
    assert len(warnings_of(config, caplog)) == 1
    config.model.lora.rank = 8
    assert warnings_of(config, caplog) == []
    config.learner.lr = 0.1
    assert warnings_of(config, caplog)[0].endswith("1e-5 to 1e-3 for adapters")
