"""The implicit process model beside the policy: it learns outcomes, feeds `prime`, and resumes with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import PartConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.ranks import Ranks
from asyncrl.types import Trajectory
from tests.learner.support import PlannedReplay, Run, assert_weights_close, assert_weights_equal, make_config

pytestmark = pytest.mark.slow


class RepeatingReplay(PlannedReplay):
    """Every batch has the tokens of the first, and outcomes that the tokens determine."""

    def batch(self, step: int) -> list[tuple[Trajectory, float]]:
        return [(trajectory, float(index % 2)) for index, (trajectory, _) in enumerate(super().batch(0))]


def prime(model: Path, folder: Path, **learner: Any) -> TrainConfig:
    config = make_config(model, folder, **{"lr": 1e-5, "batch_size": 16, **learner})
    config.algorithm.advantage = PartConfig("prime", {"beta": 0.1})
    config.implicit.train, config.implicit.lr = True, 5e-3
    return config


def run(config: TrainConfig, **options: Any) -> Run:
    return Run(config, RepeatingReplay(config, **options))


def test_it_learns_to_predict_the_outcome_and_resumes_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    whole = run(prime(model, tmp_path / "whole", steps=10, micro_tokens=512)).train(ranks)
    losses = list(whole.metrics.of("implicit/loss").values())
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert losses[-1] < 0.3
    assert whole.metrics.of("implicit/accuracy")[9] == 1.0
    assert all(norm > 0 for norm in whole.metrics.of("implicit/grad_norm").values())

    config = prime(model, tmp_path / "broken", steps=10, micro_tokens=512)
    run(config, stop_at=9).until_stopped(ranks)
    resumed = run(config).train(ranks)
    assert min(resumed.weights) == 8
    assert_weights_equal(resumed.final, whole.final)


def test_any_split_into_passes_trains_it_the_same(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    whole, split = (
        run(prime(model, tmp_path / str(size), micro_tokens=size, batch_size=8, steps=3)).train(ranks)
        for size in (10_000, 40)
    )
    assert_weights_close(whole.final, split.final, atol=1e-5)


def test_an_advantage_that_does_not_read_it_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = prime(model, tmp_path)
    config.algorithm.advantage = PartConfig("grpo")
    with pytest.raises(ConfigError, match="advantage=prime only"):
        run(config).train(ranks)
