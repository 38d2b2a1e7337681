from __future__ import annotations

from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import CriticConfig, ModelConfig
from asyncrl.learner.critic import load_critic
from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.ranks import Ranks
from tests.learner.support import VOCABULARY, Run, assert_weights_equal, make_config, random_sequences, with_critic

pytestmark = pytest.mark.slow


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
