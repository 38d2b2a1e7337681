from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.config.schema import LearnerConfig, ModelConfig
from asyncrl.learner.memory import fit_exchange, tell_exchange
from asyncrl.learner.model.optimizer import Exchange, Trainable
from asyncrl.learner.model.policy import load_policy
from asyncrl.learner.model.sharding import units_of
from asyncrl.learner.ranks.ranks import EXPERT_MESH, Ranks

ONCE, GATHERED = Exchange(once=True), Exchange(reshard=0.0)


def make_trained(model: Path, ranks: Ranks, **options: object) -> Trainable:
    policy = load_policy(ModelConfig(str(model)), 1.0, ranks, 64)
    return Trainable(policy, 1e-3, LearnerConfig(**options), "bfloat16")


def test_without_a_gpu_ranks_exchange_in_each_pass_and_gather_all_layers_twice(model: Path, ranks: Ranks):
    assert make_trained(model, ranks).exchange == Exchange(once=False, reshard=1.0)


@pytest.mark.slow
def test_the_first_rank_tells_when_ranks_on_the_cpu_exchange(
    model: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.INFO)
    for options in ({}, {"exchange": "update"}):
        policy = make_trained(model, ranks, **options)
        for rank, size in ((0, 1), (1, 2), (0, 2)):
            tell_exchange(SimpleNamespace(policy=policy, ranks=SimpleNamespace(rank=rank, size=size)))
    told = [each.split(":")[0] for each in caplog.messages if each.startswith("ranks exchange")]
    assert told == [
        "ranks exchange weights and gradients in each pass, and gather the weights of 100% of the layers twice",
        "ranks exchange weights and gradients once an update",
    ]


def test_ranks_exchange_as_rarely_as_the_memory_allows(model: Path, ranks: Ranks, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    policy = make_trained(model, ranks)
    count, layers = sum(each.numel() for each in policy.module.parameters()), policy.module.model.model.layers
    last = 2 * sum(each.numel() for each in layers[-1].parameters())
    root = 2 * count - 2 * last
    # The weights in bfloat16, and gradients in float32.
    assert policy.exchange_bytes(ONCE) == 6 * count
    assert policy.exchange_bytes(GATHERED) == 2 * count
    assert policy.exchange_bytes(Exchange(reshard=0.5)) == root + last
    assert policy.exchange_bytes(Exchange()) == 0
    for room, once, reshard in [
        (6 * count, True, 0.0),
        (6 * count - 1, False, 0.0),
        (2 * count, False, 0.0),
        (2 * count - 1, False, 0.01),
        (root + last - 1, False, 0.51),
        (-1e9, False, 1.0),
    ]:
        fit_exchange([policy], room)
        assert policy.exchange == Exchange(once, reshard), room
        assert once or policy.exchange_bytes(policy.exchange) <= max(room, 0)
        assert ("once an update: activations" in caplog.messages[-1]) == once


@pytest.mark.slow
def test_experts_that_ranks_spread_take_no_memory_of_the_exchange(mixture: Path, ranks: Ranks):
    spread = replace(ranks, expert_mesh=init_device_mesh("cpu", (1, 1, 1), mesh_dim_names=EXPERT_MESH))
    policy = make_trained(mixture, spread)
    parameters = dict(policy.module.named_parameters())
    experts = sum(each.numel() for name, each in parameters.items() if ".mlp.experts." in name)
    others = sum(each.numel() for each in parameters.values()) - experts
    assert experts > 0
    assert policy.exchange_bytes(ONCE) == 6 * others
    assert policy.exchange_bytes(GATHERED) == 2 * others


def test_all_models_share_what_memory_is_left(model: Path, ranks: Ranks):
    policy, critic = make_trained(model, ranks), make_trained(model, ranks)
    needed = policy.exchange_bytes(ONCE)
    fit_exchange([policy, critic], 2 * needed)
    assert policy.exchange.once
    assert critic.exchange.once
    fit_exchange([policy, critic], 2 * needed - 1)
    assert not policy.exchange.once
    assert not critic.exchange.once


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"exchange": "pass"}, Exchange(once=False, reshard=0.0)),
        ({"exchange": "pass", "reshard": 1.0}, Exchange(once=False, reshard=1.0)),
        ({"exchange": "update", "reshard": 0.5}, Exchange(once=True, reshard=0.5)),
        ({"reshard": 0.5}, Exchange(once=True, reshard=0.5)),
    ],
)
def test_what_the_configuration_says_is_left_as_it_is(
    options: dict[str, object], expected: Exchange, model: Path, ranks: Ranks
):
    policy = make_trained(model, ranks, **options)
    fit_exchange([policy], 1e9)
    assert policy.exchange == expected


def test_neighbouring_layers_are_gathered_together_until_they_are_large_enough():
    layers = {f"model.layers.{index}": nn.Linear(10, 10, bias=False) for index in range(5)}
    layers |= {"other.layers.0": nn.Linear(10, 10, bias=False)}

    def sizes(largest: float) -> list[int]:
        return [len(unit) for unit in units_of(layers, set(), largest)]

    assert sizes(0) == [1, 1, 1, 1, 1, 1]
    assert sizes(101) == [2, 2, 1, 1]
    assert sizes(200) == [2, 2, 1, 1]
    assert sizes(1e9) == [5, 1]
    ignored = {layers["model.layers.0"].weight, layers["model.layers.1"].weight}
    assert [len(unit) for unit in units_of(layers, ignored, 100)] == [3, 1, 1, 1]
