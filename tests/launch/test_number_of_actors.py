"""The number of actors of a run that starts its servers, if the configuration leaves it open."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.launch.placement.actors import AGENT_TURN_S, LOAD, TURN_S, actors_needed, settle_actors
from asyncrl.launch.placement.placement import place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.plan import show_plan

MANY = 4096
"""Episodes at once that need three cores."""


def make_config(episodes: int = MANY) -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="m"), engine=EngineConfig("sglang"))
    config.actor.concurrency, config.network.insecure = episodes, True
    return config


def settled(config: TrainConfig, *hosts: Host) -> str:
    placement = place(config, hosts)
    return settle_actors(config.actor, config.cluster, config.engine, config.learner.batch_size, placement)


def test_one_core_is_enough_for_the_short_turns_of_more_than_a_thousand_episodes() -> None:
    assert actors_needed(64, 512, by_agent=False) == 1
    assert actors_needed(1024, 512, by_agent=False) == 1
    assert actors_needed(MANY, 512, by_agent=False) == 3


def test_turns_of_an_agent_and_turns_that_must_be_shorter_need_more() -> None:
    assert actors_needed(1024, 512, by_agent=True) == 2
    assert actors_needed(1024, 8, by_agent=False) == 4
    assert actors_needed(1, 1, by_agent=True) == 1


def test_an_actor_never_has_more_turns_than_its_core_has_time_for() -> None:
    for episodes in (1, 500, 1500, 10_000):
        for by_agent, turn_s in ((False, TURN_S), (True, AGENT_TURN_S)):
            turns_per_s = episodes * 51 / 40 / actors_needed(episodes, 4096, by_agent)
            assert turns_per_s * turn_s <= LOAD + 1e-9


def test_actors_divide_servers_and_episodes_evenly() -> None:
    config = make_config()
    assert settled(config, Host(8, 64)).startswith("2 actors on each node with servers run 2048 episodes at once each")
    actors = place(config, [Host(8, 64)]).of("actor")
    assert [(role.gpus, role.servers) for role in actors] == [((4, 5), 2), ((6, 7), 2)], "three do not divide 4 GPUs"
    assert config.actor.concurrency == 2048


def test_actors_on_several_nodes_are_counted_on_each() -> None:
    config = make_config()
    assert settled(config, Host(8, 64), Host(8, 64))
    assert config.cluster.actors == 2
    assert [role.node for role in place(config, [Host(8, 64)] * 2).of("actor")] == [1, 1]


def few(config: TrainConfig) -> None:
    config.actor.concurrency = 1024


def default(config: TrainConfig) -> None:
    config.actor.concurrency = None


def set_to_one(config: TrainConfig) -> None:
    config.cluster.actors = 1


def autoscaled(config: TrainConfig) -> None:
    config.cluster.autoscale.actors = [1, 4]


def counted(config: TrainConfig) -> None:
    config.engine.server.count = 4


def colocated(config: TrainConfig) -> None:
    config.cluster.colocated = True


def elsewhere(config: TrainConfig) -> None:
    config.engine.urls = ["http://127.0.0.1:1"]


def embedded(config: TrainConfig) -> None:
    config.engine.kind = "embedded"


@pytest.mark.parametrize(
    "change",
    [few, default, set_to_one, autoscaled, counted, colocated, elsewhere, embedded],
    ids=lambda each: each.__name__,
)
def test_where_one_actor_is_enough_or_the_user_decides_nothing_is_set(change: Callable[[TrainConfig], None]) -> None:
    config = make_config()
    change(config)
    before = (config.cluster.actors, config.actor.concurrency)
    assert settled(config, Host(8, 64)) == ""
    assert (config.cluster.actors, config.actor.concurrency) == before


def test_one_gpu_with_servers_or_few_cpus_have_one_actor() -> None:
    assert settled(make_config(), Host(2, 64)) == ""
    assert settled(make_config(), Host(8, 7)) == ""


def test_a_plan_shows_the_actors_and_the_share_of_each(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config()
    config.cluster.gpus, config.cluster.cpus = 8, 64
    show_plan(config, "--plan=1")
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("actor-") for line in lines) == 2
    assert lines[-2] == (
        "2 actors on each node with servers run 2048 episodes at once each: 4096 episodes with short turns need 3 cores"
    )
    assert lines[-1].endswith("since an actor runs 2048 episodes at once on 2 servers")
