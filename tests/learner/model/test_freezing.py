from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from asyncrl.config.schema import CriticConfig, LearnerConfig, ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.critic import load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.weights.delta import diff
from asyncrl.weights.manifest import take_snapshot
from tests.learner.support import Run, assert_weights_equal, make_config, random_sequences

pytestmark = pytest.mark.slow

WANTED = ["embeddings", "*.layers.0.*"]


def is_frozen(name: str) -> bool:
    return "embed_tokens" in name or ".layers.0." in name


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_frozen_has_no_gradient_and_no_moments_and_all_else_has_those_of_a_whole_training(
    model: Path, ranks: Ranks, optimizer: str
):
    packed, gradients = PackedSequences.of(random_sequences(6, 9)), []
    for wanted in ([], WANTED):
        config = ModelConfig(str(model), freeze=wanted)
        policy = Trainable(load_policy(config, 1.0, ranks, 64), 1e-3, LearnerConfig(optimizer=optimizer))
        policy.module(packed)[0].sum().backward()
        own = policy.module.named_parameters()
        gradients.append({name: each.grad.clone() for name, each in own if each.grad is not None})
        policy.update(0)
        assert policy.moments().keys() == gradients[-1].keys()
    whole, rest = gradients
    assert rest.keys() == {name for name in whole if not is_frozen(name)}
    for name, gradient in rest.items():
        torch.testing.assert_close(gradient, whole[name])


def test_a_run_leaves_what_is_frozen_as_it_is_sends_no_bytes_of_it_and_resumes_with_the_same_bits(
    model: Path, ranks: Ranks, tmp_path: Path
):
    config = make_config(model, tmp_path / "whole")
    config.model.freeze = WANTED
    whole = Run(config).train(ranks)
    snapshots = [take_snapshot(version, whole.weights[version], 64) for version in sorted(whole.weights)]
    for old, new in pairwise(snapshots):
        names = [spec.name for spec in new.manifest.tensors]
        sent = {names[patch.tensor] for patch in diff(old, new).header.patches}
        assert sent == {name for name in names if not is_frozen(name)}, "only the deltas of what is trained"
    config.run.dir = str(tmp_path / "stopped")
    Run(config, die_at=3).until_stopped(ranks)
    assert_weights_equal(Run(config).train(ranks).final, whole.final)


def test_a_critic_may_train_its_head_alone(model: Path, ranks: Ranks):
    critic = Trainable(
        load_critic(CriticConfig(freeze=["*"]), ModelConfig(str(model)), ranks, 64), 1e-2, LearnerConfig()
    )
    critic.module(PackedSequences.of(random_sequences(6, 9))).sum().backward()
    critic.update(0)
    assert critic.moments().keys() == {"head.weight", "head.bias"}


def test_a_policy_of_which_nothing_is_left_to_train_is_refused_by_the_option(model: Path, ranks: Ranks):
    with pytest.raises(ConfigError, match=r"implicit\.freeze=.*leaves none to train"):
        load_policy(ModelConfig(str(model), freeze=["*"]), 1.0, ranks, 64, "implicit")
