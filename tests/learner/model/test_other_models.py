"""Models in addition to the policy: an implicit process model, which feeds `prime`, and a critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import CriticConfig, ModelConfig, PartConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.types import Trajectory
from tests.learner.support import (
    VOCABULARY,
    PlannedReplay,
    Run,
    assert_weights_close,
    assert_weights_equal,
    make_config,
    random_sequences,
    with_critic,
)

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


def train_prime(config: TrainConfig, **options: Any) -> Run:
    return Run(config, RepeatingReplay(config, **options))


@pytest.mark.heavy
def test_it_learns_to_predict_the_outcome_and_resumes_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    whole = train_prime(prime(model, tmp_path / "whole", steps=10, micro_tokens=512)).train(ranks)
    losses = list(whole.metrics.of("implicit/loss").values())
    assert losses[0] == pytest.approx(0.693, abs=1e-3)
    assert losses[-1] < 0.3
    assert whole.metrics.of("implicit/accuracy")[9] == 1.0
    assert whole.metrics.of("implicit/pairwise_accuracy")[9] == 1.0
    assert all(norm > 0 for norm in whole.metrics.of("implicit/grad_norm").values())

    config = prime(model, tmp_path / "broken", steps=10, micro_tokens=512)
    train_prime(config, die_at=9).until_stopped(ranks)
    resumed = train_prime(config).train(ranks)
    assert min(resumed.weights) == 8
    assert_weights_equal(resumed.final, whole.final)


def test_any_split_into_passes_trains_it_and_the_policy_the_same(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"batch_size": 8, "minibatches": 2, "steps": 3}
    whole, split = (
        train_prime(prime(model, tmp_path / str(size), micro_tokens=size, **changes)).train(ranks)
        for size in (10_000, 40)
    )
    assert_weights_close(whole.final, split.final, atol=1e-5)
    assert whole.metrics.of("loss") == pytest.approx(split.metrics.of("loss"), abs=1e-6)
    assert whole.metrics.of("grad_norm") == pytest.approx(split.metrics.of("grad_norm"), rel=1e-4)


def test_an_advantage_that_does_not_read_it_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    config = prime(model, tmp_path)
    config.algorithm.advantage = PartConfig("grpo")
    with pytest.raises(ConfigError, match="advantage=prime only"):
        train_prime(config).train(ranks)


def test_a_value_depends_on_the_tokens_before_it_in_its_own_sequence_only(model: Path, ranks: Ranks):
    critic = load_critic(CriticConfig(), ModelConfig(str(model)), ranks, 64)
    first, second = random_sequences(6, 9)
    assert not critic(PackedSequences.of([first, second])).any(), "a new critic values everything at zero"
    with torch.no_grad():
        critic.head.weight.fill_(0.1)
        packed = critic(PackedSequences.of([first, second]))
        alone = critic(PackedSequences.of([second]))
        changed = critic(PackedSequences.of([torch.cat([second[:4], (second[4:] + 1) % VOCABULARY])]))
    torch.testing.assert_close(packed[6:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(changed[:5], alone[:5])
    assert (changed[5:] != alone[5:]).all()


def test_a_critic_learns_the_return_and_resumes_with_the_same_bits(model: Path, ranks: Ranks, tmp_path: Path):
    def run(name: str, **options: int) -> Run:
        config = with_critic(make_config(model, tmp_path / name, steps=6, lr=1e-4))
        return Run(config, reward=lambda step: 0.8, **options)

    whole = run("whole").train(ranks)
    bias = whole.metrics.of("value/bias")
    assert bias[0] == pytest.approx(0.8, abs=1e-4)
    assert abs(bias[5]) < 0.6

    run("broken", stop_at=5).until_stopped(ranks)
    resumed = run("broken").train(ranks)
    assert_weights_equal(resumed.final, whole.final)
    assert resumed.metrics.of("value/bias")[5] == bias[5]
    weights = [each.metrics.of("kl_reference/weight")[5] for each in (resumed, whole)]
    assert weights[0] == weights[1] != 0.1
