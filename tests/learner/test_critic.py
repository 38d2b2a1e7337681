from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.config.schema import CriticConfig, ModelConfig
from asyncrl.errors import StoppedError
from asyncrl.learner.backbone import Packed
from asyncrl.learner.critic import Critic, load_critic
from asyncrl.learner.ranks import Ranks
from asyncrl.learner.run import train
from tests.learner.support import VOCABULARY, FakeMetrics, FakePublisher, FakeReplay, make_config, with_critic
from tests.learner.test_loop import StoppingReplay, assert_weights_equal


def make_critic(model: Path, ranks: Ranks) -> Critic:
    return load_critic(CriticConfig(), ModelConfig(str(model)), ranks, 64)


def sequences(*lengths: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator) for length in lengths]


def test_a_new_critic_values_everything_at_zero(model: Path, ranks: Ranks):
    assert not make_critic(model, ranks)(Packed.of(sequences(5, 7))).any()


def test_a_value_depends_on_the_tokens_before_it_in_its_own_sequence_only(model: Path, ranks: Ranks):
    critic = make_critic(model, ranks)
    first, second = sequences(6, 9)
    with torch.no_grad():
        critic.head.weight.fill_(0.1)
        packed = critic(Packed.of([first, second]))
        alone = critic(Packed.of([second]))
        changed = critic(Packed.of([torch.cat([second[:4], (second[4:] + 1) % VOCABULARY])]))
    torch.testing.assert_close(packed[6:], alone, atol=1e-5, rtol=0)
    torch.testing.assert_close(changed[:5], alone[:5])
    assert (changed[5:] != alone[5:]).all()


def test_a_critic_learns_the_return_and_resumes_with_the_same_bits(model: Path, ranks: Ranks, tmp_path: Path):
    config = with_critic(make_config(model, tmp_path / "whole", steps=6, lr=1e-4))
    metrics, whole = FakeMetrics(), FakePublisher()
    train(config, ranks, FakeReplay(config, reward=0.8), whole, metrics, threading.Event())
    bias = metrics.of("value/bias")
    assert bias[0] == pytest.approx(0.8, abs=1e-4)
    assert abs(bias[5]) < 0.6

    config = with_critic(make_config(model, tmp_path / "broken", steps=6, lr=1e-4))
    stopping = StoppingReplay(config, last=5)
    stopping._reward = 0.8
    with pytest.raises(StoppedError):
        train(config, ranks, stopping, FakePublisher(), FakeMetrics(), threading.Event())
    resumed, again = FakePublisher(), FakeMetrics()
    train(config, ranks, FakeReplay(config, reward=0.8), resumed, again, threading.Event())
    assert_weights_equal(resumed.weights[6], whole.weights[6])
    assert again.of("value/bias")[5] == bias[5]
    assert again.of("kl_reference/weight")[5] == metrics.of("kl_reference/weight")[5] != 0.1
