"""Every process of a run gets a host, GPUs, threads and shares of memory that fit."""

from __future__ import annotations

import os
import pty
import re
import termios
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, product
from pathlib import Path

import pytest

from asyncrl.config.schema import EngineConfig, ModelConfig, ServerConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.placement.placement import PlacedRole, Placement, check_unmoved, place, settle
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.placement.sharing import shares
from asyncrl.launch.placement.table import placement_table, terminal_width
from asyncrl.launch.processes import role_environment


def make_config(kind: str = "sglang", tp_size: int = 1, scorer: str = "cpu", **cluster: object) -> TrainConfig:
    config = TrainConfig(model=ModelConfig(path="m"), engine=EngineConfig(kind, server=ServerConfig(tp_size=tp_size)))
    config.scoring.prm.path, config.scoring.prm.device = "prm", scorer
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    return config


def gpus_of(config: TrainConfig, *hosts: int) -> dict[str, list[tuple[int, tuple[int, ...] | None]]]:
    """Host and GPUs of each process of the roles that use some."""
    placement = place(config, [Host(gpus, 16) for gpus in hosts])
    used = {module: [(role.node, role.gpus) for role in placement.of(module)] for module in ("learner", "actor")}
    return used | {"scoring": [(role.node, role.gpus) for role in placement.of("scoring")]}


@pytest.mark.parametrize(
    ("gpus", "learner", "servers", "scorer"),
    [
        (0, (), (), ()),
        (1, (0,), (0,), (0,)),
        (2, (0,), (1,), (1,)),
        (3, (0,), (1,), (2,)),
        (4, (0, 1), (2,), (3,)),
        (8, (0, 1, 2, 3), (4, 5, 6), (7,)),
    ],
)
def test_learner_servers_and_scorers_of_one_host_have_different_gpus_where_there_are_enough(
    gpus: int, learner: tuple[int, ...], servers: tuple[int, ...], scorer: tuple[int, ...]
) -> None:
    placed = gpus_of(make_config(scorer="auto"), gpus)
    assert placed == {"learner": [(0, learner)], "actor": [(0, servers)], "scoring": [(0, scorer)]}


def test_a_scorer_whose_model_is_spread_gets_so_many_gpus() -> None:
    config = make_config(scorer="auto")
    config.scoring.prm.gpus = 2
    assert gpus_of(config, 8)["scoring"] == [(0, (6, 7))]


def test_two_gpus_and_no_other_setting_put_the_learner_on_one_and_the_server_on_the_other() -> None:
    config = make_config(gpus=2)
    assert placement_table(place(config, [Host(2, 8)])) == (
        "process    pool  host  GPUs  CPUs  threads  port\n"
        "replay     all   0     -     1     1        5755\n"
        "scoring-0  all   0     -     3     2        -\n"
        "actor-0    all   0     1     2     2        any   engine.server.count=1\n"
        "learner    all   0     0     2     2        5756\n"
    )


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("names", [(), tuple(f"gpu-node-{number:03}.cluster.example.org" for number in range(4))])
def test_a_table_on_a_narrow_terminal_has_no_longer_lines_and_loses_nothing(width: int, names: Sequence[str]) -> None:
    config = make_config(scorer="cuda", pools={"train": {"nodes": 2, "gpus": 8}, "rollout": {"nodes": 2, "gpus": 2}})
    config.cluster.roles = {"replay": "train", "learner": "train", "actor": "rollout", "scoring": "rollout"}
    config.engine.server.count = 2
    placement = place(config, [Host(8, 64), Host(8, 64), Host(4, 64), Host(4, 64)])
    wide, narrow = placement_table(placement, names), placement_table(placement, names, width)
    assert max(map(len, wide.splitlines())) > width >= max(map(len, narrow.splitlines()))
    assert sorted("".join(narrow.split())) == sorted("".join(wide.split()))
    assert "    engine.server.count=2 engine.server.memory=" in narrow
    assert placement_table(placement, names, 400) == wide


def test_the_width_is_that_of_the_terminal_and_a_file_has_none(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 60))
    with os.fdopen(theirs, "w") as terminal, (tmp_path / "file").open("w") as file:
        assert (terminal_width(terminal), terminal_width(file)) == (60, None)
    os.close(ours)


def test_processes_that_share_a_gpu_divide_its_memory_and_the_table_says_so() -> None:
    table = placement_table(place(make_config(scorer="cuda"), [Host(1, 4)]))
    assert "engine.server.count=1 engine.server.memory=0.32, shares with scoring-0, learner\n" in table
    assert "learner.memory=0.32, shares with scoring-0, actor-0\n" in table
    config = make_config()
    config.engine.server.memory = 0.6
    (learner,) = place(config, [Host(1, 4)]).of("learner")
    assert learner.arguments == ("learner.memory=0.22",), "what the configuration gives the server is not the learner's"


@pytest.mark.parametrize(
    ("gpus", "tp_size", "servers", "ranks", "learner", "shared"),
    [
        (2, 1, 2, None, "0", "[0]"),
        (4, 1, 4, 2, "0,1", "[0,1]"),
        (4, 2, 2, None, "0", "[0]"),
        (4, 1, 4, 4, "0-3", ""),
    ],
)
def test_servers_on_all_gpus_share_those_of_the_learner_and_only_these_have_a_share_of_their_memory(
    gpus: int, tp_size: int, servers: int, ranks: int | None, learner: str, shared: str
) -> None:
    config = make_config(tp_size=tp_size, learner_ranks=ranks)
    config.engine.server.count = servers
    placement = place(config, [Host(gpus, 16)])
    *_, actors, learners = placement_table(placement).splitlines()
    own = f" engine.server.shared={shared}" if shared else ""
    assert actors.endswith(f"engine.server.count={servers} engine.server.memory=0.41{own}, shares with learner")
    assert learners.endswith("learner.memory=0.41, shares with actor-0")
    assert f" {learner} " in learners
    config.engine.server.memory = 0.3
    (actor,) = place(config, [Host(gpus, 16)]).of("actor")
    assert actor.arguments == (f"engine.server.count={servers}", "engine.server.memory=0.3")


@pytest.mark.parametrize(
    ("gpus", "servers", "scorer", "server", "learner", "message"),
    [
        (
            *(1, None, "cpu", 0.9, 0.9),
            "learner.memory=0.9 engine.server.memory=0.9: a GPU is shared, and 0.9 for learner and 0.9 for actor "
            "make 1.8 of its memory, of which 1 may be given; lower them to 1 in all",
        ),
        (
            *(1, None, "cpu", 0.95, None),
            "engine.server.memory=0.95: a GPU is shared, and 0.1 at least for learner and 0.95 for actor "
            "make 1.05 of its memory, of which 0.95 may be given; lower it to 0.85",
        ),
        (2, 2, "cpu", 0.9, None, "make 1 of its memory, of which 0.95 may be given; lower it to 0.85"),
        (
            *(1, None, "cuda", None, 0.9),
            "0.9 for learner, 0.1 at least for actor and 0.1 at least for scoring make 1.1 of its "
            "memory, of which 0.95 may be given; lower it to 0.75",
        ),
        (1, None, "cuda", 0.5, 0.4, "make 1 of its memory, of which 0.95 may be given; lower them to 0.85 in all"),
    ],
)
def test_shares_that_leave_a_role_on_the_same_gpu_too_little_are_refused_with_the_numbers_and_what_to_lower(
    gpus: int, servers: int | None, scorer: str, server: float | None, learner: float | None, message: str
) -> None:
    config = make_config(scorer=scorer)
    config.engine.server.count, config.engine.server.memory, config.learner.memory = servers, server, learner
    with pytest.raises(ConfigError, match=re.escape(message)):
        place(config, [Host(gpus, 16)])


@pytest.mark.parametrize(
    ("gpus", "scorer", "server", "learner", "arguments"),
    [
        (1, "cpu", 0.55, 0.45, ["engine.server.memory=0.55", "learner.memory=0.45"]),
        (1, "cpu", 0.85, None, ["engine.server.memory=0.85", "learner.memory=0.1"]),
        (1, "cuda", None, 0.75, ["engine.server.memory=0.1", "learner.memory=0.75"]),
        (2, "cpu", 0.95, 0.95, []),
    ],
)
def test_shares_that_fit_on_a_gpu_stay_and_others_get_no_less_than_the_least(
    gpus: int, scorer: str, server: float | None, learner: float | None, arguments: list[str]
) -> None:
    config = make_config(scorer=scorer)
    config.engine.server.memory, config.learner.memory = server, learner
    placed = place(config, [Host(gpus, 16)]).roles
    assert [each for role in placed for each in role.arguments if "memory" in each] == arguments


def test_the_share_of_servers_is_nothing_to_an_embedded_engine() -> None:
    config = make_config("embedded")
    config.engine.server.memory = 0.95
    (learner,) = place(config, [Host(1, 4)]).of("learner")
    assert learner.arguments == ("learner.memory=0.41",)


@pytest.mark.parametrize(
    ("gpus", "tp_size", "settings", "actors"),
    [
        (2, 1, {}, [(1, 0)]),
        (4, 1, {"learner_ranks": 3}, [(3, 0)]),
        (4, 2, {"learner_ranks": 3}, [(2, 3, 0)]),
        (0, 1, {}, [()]),
    ],
)
def test_nccl_into_servers_starts_from_a_gpu_of_the_learner_that_has_none_of_them(
    gpus: int, tp_size: int, settings: dict[str, object], actors: list[tuple[int, ...]]
) -> None:
    config = make_config(tp_size=tp_size, **settings)
    config.weights.into_servers = "nccl"
    assert [role.gpus for role in place(config, [Host(gpus, 16)]).of("actor")] == actors


@pytest.mark.parametrize(
    ("gpus", "servers", "settings"),
    [
        (1, None, {}),
        (2, 2, {}),
        (2, 2, {"learner_ranks": 2}),
        (
            *(2, None),
            {
                "pools": {"train": {"gpus": 1}, "rollout": {"gpus": 1}},
                "roles": {"replay": "train", "learner": "train", "actor": "rollout", "scoring": "rollout"},
            },
        ),
    ],
)
def test_nccl_into_servers_that_leave_the_learner_no_gpu_of_its_own_is_refused(
    gpus: int, servers: int | None, settings: dict[str, object]
) -> None:
    config = make_config("sglang", **settings)
    config.engine.server.count = servers
    assert place(config, [Host(gpus, 16)]).of("actor"), "any other way has room"
    config.weights.into_servers = "nccl"
    with pytest.raises(
        ConfigError, match=r"^weights.into_servers=nccl needs .*; set auto or ipc, or give the learner a GPU"
    ):
        place(config, [Host(gpus, 16)])


def overlap(one: PlacedRole, other: PlacedRole) -> bool:
    return one.node == other.node and bool(set(one.gpus or ()) & set(other.gpus or ()))


def check(config: TrainConfig, placement: Placement) -> None:
    """Check what must hold of every placement on one host."""
    (host,) = placement.hosts
    assert all(gpu in range(host.gpus) for role in placement.roles for gpu in role.gpus or ())
    assert all(role.threads >= 1 for role in placement.roles)
    assert len({role.name for role in placement.roles}) == len(placement.roles)
    (learner,) = placement.of("learner")
    if not host.gpus:
        return
    assert learner.gpus
    for actor in placement.of("actor"):
        assert actor.gpus
        if config.engine.launches:
            count = next(int(each.partition("=")[2]) for each in actor.arguments if "count" in each)
            assert len(actor.gpus) == count * config.engine.server.tp_size
    needed = 1 + config.engine.server.tp_size + (config.scoring.prm.device != "cpu")
    if host.gpus >= needed:
        assert not any(overlap(one, other) for one, other in combinations(placement.roles, 2))
        used = {gpu for role in placement.roles for gpu in role.gpus or ()}
        assert host.gpus - len(used) < config.engine.server.tp_size, "GPUs lie idle that a server would take"
    else:
        memory = [
            float(each.partition("=")[2]) for role in placement.roles for each in role.arguments if "memory" in each
        ]
        assert sum(memory) < 1


@pytest.mark.parametrize(
    ("kind", "tp_size", "scorer"), [*product(("sglang",), (1, 2, 4), ("cpu", "auto")), ("embedded", 1, "cuda")]
)
def test_a_placement_holds_what_it_must_for_every_number_of_gpus(kind: str, tp_size: int, scorer: str) -> None:
    for gpus in (0, *range(tp_size, 17)):
        config = make_config(kind, tp_size, scorer)
        check(config, place(config, [Host(gpus, 16)]))


def test_embedded_actors_and_scorers_of_a_pool_of_their_own_are_one_process_on_each_gpu() -> None:
    pools = {"train": {"gpus": 2}, "rollout": {"gpus": 4}, "reward": {"gpus": 2}}
    config = make_config("embedded", scorer="cuda", pools=pools, roles={"actor": "rollout", "scoring": "reward"})
    assert gpus_of(config, 8) == {
        "learner": [(0, (0, 1))],
        "actor": [(0, (2,)), (0, (3,)), (0, (4,)), (0, (5,))],
        "scoring": [(0, (6,)), (0, (7,))],
    }
    config.cluster.actors, config.cluster.scorers = 2, 3
    placed = gpus_of(config, 8)
    assert placed["actor"] == [(0, (2,)), (0, (3,))]
    assert placed["scoring"] == [(0, (6,)), (0, (7,)), (0, (6,))], "more scorers than GPUs share these"


def test_pools_are_spread_over_hosts_and_each_node_has_its_ranks_and_its_actor() -> None:
    pools = {"train": {"nodes": 2, "gpus": 8}, "rollout": {"nodes": 2, "gpus": 8}}
    config = make_config(tp_size=2, pools=pools, roles={"actor": "rollout"})
    placement = place(config, [Host(8, 64)] * 4)
    learners, actors, every = placement.of("learner"), placement.of("actor"), tuple(range(8))
    assert [(role.name, role.node, role.gpus) for role in learners] == [
        ("learner", 0, every),
        ("learner-node-1", 1, every),
    ]
    assert [role.arguments for role in learners] == [("learner.node=0",), ("learner.node=1",)]
    assert [(role.name, role.node, role.gpus) for role in actors] == [("actor-0", 2, every), ("actor-1", 3, every)]
    assert [role.arguments for role in actors] == [("engine.server.count=4",)] * 2
    assert [role.node for role in placement.of("replay")] == [0]
    settle(config.cluster, config.learner, placement)
    assert (config.learner.nodes, config.cluster.learner_ranks, config.cluster.actors) == (2, 8, 2)
    assert place(config, [Host(8, 64)] * 4) == placement, "what was settled is settled for good"


def test_without_pools_half_of_several_hosts_train() -> None:
    placed = gpus_of(make_config(scorer="auto"), 4, 4, 4)
    assert placed["learner"] == [(0, (0, 1, 2, 3))]
    assert placed["actor"] == [(2, (0, 1, 2, 3)), (1, (0, 1, 2))]
    assert placed["scoring"] == [(1, (3,))]


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        (
            {"train": {"gpus": 5}, "rollout": {"gpus": 4}},
            r"rollout: node 1 of 1 needs 4 GPUs .*train has 5 GPUs;",
        ),
        ({"train": {"nodes": 2}}, r"node 2 of 2 needs a host without another .* the run has 1 host with 8"),
        ({"train": {"gpus": 4, "cpus": 20}}, r"needs 4 GPUs and 20 CPUs .*with 8 GPUs and 16 CPUs"),
        ({"train": {"gpus": 1}, "rollout": {"gpus": 1}}, r"engine\.server\.tp_size: it takes 2 GPUs .* has 1"),
        ({"train": {"gpus": 2}, "rollout": {"gpus": 6}}, r"learner\.replicas: it takes 4 GPUs"),
    ],
)
def test_more_than_there_is_is_refused_with_the_reason(pools: dict[str, dict[str, int]], reason: str) -> None:
    config = make_config(tp_size=2, pools=pools, roles={"actor": list(pools)[-1]})
    config.learner.replicas = 4 if "replicas" in reason else 1
    with pytest.raises(ConfigError, match=reason):
        place(config, [Host(8, 16)])


@pytest.mark.parametrize(
    ("pools", "reason"),
    [
        (
            {"learner": {"gpus": 4}, "actor": {"gpus": 4}, "scoring": {"gpus": 0}},
            "pools.scoring has no GPU for the scorer",
        ),
        (
            {"learner": {"gpus": 4}, "actor": {"gpus": 0}, "scoring": {"gpus": 4}},
            "pools.actor has no GPU for the actor's",
        ),
        ({"learner": {}, "actor": {"gpus": 4}, "scoring": {"gpus": 4}}, "pools.learner has no GPU for the learner"),
        ({"learner": {"gpus": 4}, "actor": {"gpus": 3}, "scoring": {"gpus": 1}}, "of 3 GPUs per node, 1 would be idle"),
        (
            {"learner": {"gpus": 5}, "actor": {"gpus": 2}, "scoring": {"gpus": 1}},
            r"idle, since learner\.replicas uses GPUs in multiples of 2",
        ),
    ],
)
def test_a_pool_without_gpus_for_its_role_or_with_a_number_that_does_not_divide_is_refused(
    pools: dict[str, dict[str, int]], reason: str
) -> None:
    config = make_config(tp_size=2, scorer="auto", pools=pools, roles={"replay": "scoring"})
    config.learner.replicas = 2
    with pytest.raises(ConfigError, match=reason):
        place(config, [Host(8, 16)])


def test_roles_may_be_without_gpus_where_there_are_none_or_they_need_none() -> None:
    pools = {"learner": {}, "actor": {}, "scoring": {}}
    assert gpus_of(make_config(scorer="auto", pools=pools, roles={"replay": "scoring"}), 0)["learner"] == [(0, ())]
    pools = {"learner": {"gpus": 8}, "actor": {"gpus": 0}, "scoring": {"gpus": 0}}
    embedded = make_config("embedded", pools=pools, roles={"replay": "scoring"})
    assert gpus_of(embedded, 8)["actor"] == [(0, ())], "an embedded engine runs on the CPU as well"
    with pytest.raises(ConfigError, match=r"host 0 has no GPU for the learner"):
        place(make_config(), [Host(0, 16), Host(8, 16)])


def test_copies_of_the_model_have_equal_shares_of_the_ranks() -> None:
    config = make_config()
    config.learner.replicas = 4
    assert gpus_of(config, 15)["learner"] == [(0, (0, 1, 2, 3))]


def test_servers_that_somebody_else_started_keep_their_gpus() -> None:
    config = make_config()
    config.engine.urls = ["http://127.0.0.1:30000"]
    assert gpus_of(config, 8) == {"learner": [(0, (0,))], "actor": [(0, None)], "scoring": [(0, ())]}
    config.cluster.gpus = 4
    assert gpus_of(config, 4)["learner"] == [(0, (0, 1, 2, 3))]


def test_a_process_sees_its_gpus_alone_and_those_of_its_parents_choice() -> None:
    actor, scorer = place(make_config(), [Host(2, 8)]).of("actor") + place(make_config(), [Host(2, 8)]).of("scoring")
    assert role_environment(actor, {})["CUDA_VISIBLE_DEVICES"] == "1"
    assert role_environment(actor, {"CUDA_VISIBLE_DEVICES": "4,GPU-5"})["CUDA_VISIBLE_DEVICES"] == "GPU-5"
    assert role_environment(scorer, {})["CUDA_VISIBLE_DEVICES"] == ""
    assert role_environment(actor, {})["OMP_NUM_THREADS"] == "2"


@pytest.mark.parametrize(
    "hosts", [[Host(0, 8)] * 4, [Host(4, 8)] * 4, [Host(0, 4), Host(0, 2), Host(0, 9), Host(0, 3)]]
)
@pytest.mark.parametrize("key", ["actors", "scorers"])
def test_more_processes_over_several_hosts_leave_all_others_where_they_are(hosts: list[Host], key: str) -> None:
    config = make_config("embedded")
    placement = place(config, hosts)
    settle(config.cluster, config.learner, placement)
    assert place(config, hosts) == placement
    for _ in range(5):
        setattr(config.cluster, key, getattr(config.cluster, key) + 1)
        more = place(config, hosts)
        check_unmoved(placement, more)
        assert {role.name for role in placement.roles} < {role.name for role in more.roles}
        placement = more


def test_actors_beside_ranks_that_nobody_named_stay_where_they_are_in_a_settled_run() -> None:
    pools = {"train": {"nodes": 2}, "replay": {"gpus": 1}}
    config = make_config("embedded", scorer="auto", pools=pools, roles={"actor": "train", "scoring": "train"}, actors=2)
    config.cluster.roles["learner"] = "train"
    placement = place(config, hosts := [Host(8, 8), Host(8, 8)])
    settle(config.cluster, config.learner, placement)
    assert place(config, hosts) == placement


def test_processes_that_run_keep_their_gpus_when_there_come_to_be_more() -> None:
    embedded, servers = make_config("embedded", actors=2), make_config(actors=1)
    before = {kind: place(config, [Host(4, 8)]) for kind, config in (("embedded", embedded), ("servers", servers))}
    embedded.cluster.actors, servers.cluster.actors = 3, 2
    embedded.cluster.learner_ranks = servers.cluster.learner_ranks = 2
    check_unmoved(before["embedded"], place(embedded, [Host(4, 8)]))
    with pytest.raises(ConfigError, match=r"actor-0 would have other GPUs, which needs a restart"):
        check_unmoved(before["servers"], place(servers, [Host(4, 8)]))


def test_a_learner_of_whole_copies_gets_at_least_one_of_them_and_the_others_what_is_left() -> None:
    config = make_config("embedded", scorer="auto", actors=2, scorers=2)
    config.learner.replicas = 3
    assert gpus_of(config, 5) == {
        "learner": [(0, (0, 1, 2))],
        "actor": [(0, (3,)), (0, (3,))],
        "scoring": [(0, (4,)), (0, (4,))],
    }


def test_the_learner_has_as_many_ranks_on_each_of_its_hosts_and_a_settled_run_is_placed_alike() -> None:
    config, hosts = make_config(), [Host(8, 16), Host(2, 16), Host(4, 16), Host(4, 16)]
    placement = place(config, hosts)
    assert [role.gpus for role in placement.of("learner")] == [(0, 1), (0, 1)]
    settle(config.cluster, config.learner, placement)
    assert place(config, hosts) == placement
    with pytest.raises(ConfigError, match="host 1 has no GPU for the learner, and other hosts or pools have some"):
        place(make_config(), [Host(8, 16), Host(0, 16), Host(4, 16), Host(4, 16)])


def test_pools_that_fit_on_hosts_of_different_sizes_are_not_refused_for_their_order() -> None:
    small, large, other = {"gpus": 2}, {"gpus": 8}, {"gpus": 0, "cpus": 16}
    config = make_config(pools={"actor": small, "learner": large, "scoring": other}, roles={"replay": "scoring"})
    assert gpus_of(config, 8, 2) == {
        "learner": [(0, tuple(range(8)))],
        "actor": [(1, (0, 1))],
        "scoring": [(0, ())],
    }


def test_processes_go_to_the_nodes_by_what_these_have_and_more_of_them_take_none_away() -> None:
    assert shares(6, [4, 2]) == [4, 2]
    assert shares(2, [64, 4]) == [1, 1], "each node has one before any has two"
    assert shares(1, [4, 64]) == [0, 1]
    assert shares(5, [1, 1, 1]) == [2, 2, 1]
    assert shares(3, [0, 2]) == [1, 2]
    for weights in ([3, 1], [64, 8, 8], [5, 0, 2]):
        before = shares(0, weights)
        for total in range(1, 40):
            now = shares(total, weights)
            assert sum(now) == total
            assert all(new >= old for new, old in zip(now, before, strict=True))
            before = now


@pytest.mark.parametrize("hosts", [[Host(4, 8), Host(2, 8), Host(6, 8)], [Host(2, 8), Host(8, 64), Host(1, 4)]])
def test_actors_of_hosts_that_are_not_alike_keep_their_gpus_in_a_settled_run(hosts: list[Host]) -> None:
    """Each embedded engine has a GPU of its own, also once the number of actors is written into the configuration."""
    config = TrainConfig(model=ModelConfig(path="m"))
    config.cluster.pools = {"train": {"nodes": 1}, "rollout": {"nodes": 2}}
    config.cluster.roles = {"actor": "rollout"}
    first = place(config, hosts)
    gpus = [(role.node, role.gpus) for role in first.of("actor")]
    assert len(set(gpus)) == len(gpus) == sum(host.gpus for host in hosts) - hosts[first.of("learner")[0].node].gpus
    settle(config.cluster, config.learner, first)
    assert place(config, hosts) == first


def test_more_actors_on_cpus_go_to_the_host_with_more_of_them() -> None:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.cluster.pools = {"train": {"nodes": 1}, "rollout": {"nodes": 2}}
    config.cluster.roles, config.cluster.actors = {"actor": "rollout"}, 6
    placed = place(config, [Host(0, 4), Host(0, 8), Host(0, 40)])
    assert Counter(role.node for role in placed.of("actor")) == {1: 1, 2: 5}


@pytest.mark.parametrize(
    ("gpus", "scorer", "tp_size", "learner", "servers", "scoring"),
    [
        (0, "cpu", 1, (), (), ()),
        (1, "cpu", 1, (0,), (0,), ()),
        (8, "cpu", 2, tuple(range(8)), tuple(range(8)), ()),
        (4, "auto", 2, (0, 1, 2), (0, 1), (3,)),
    ],
)
def test_a_colocated_learner_and_its_servers_have_the_same_gpus_and_scorers_others(
    gpus: int, scorer: str, tp_size: int, learner: tuple[int, ...], servers: tuple[int, ...], scoring: tuple[int, ...]
) -> None:
    config = make_config(scorer=scorer, tp_size=tp_size, colocated=True)
    assert gpus_of(config, gpus) == {
        "learner": [(0, learner)],
        "actor": [(0, servers)],
        "scoring": [(0, scoring)],
    }


def test_each_of_them_may_take_nearly_all_memory_in_its_turn_and_the_table_says_so() -> None:
    table = placement_table(place(make_config(colocated=True), [Host(1, 4)]))
    assert "engine.server.count=1 engine.server.memory=0.8, takes turns with learner\n" in table
    assert "learner.memory=0.85, takes turns with actor-0\n" in table


def test_the_plan_of_a_colocated_run_without_gpus_says_that_its_turns_are_worth_nothing() -> None:
    table = placement_table(place(make_config(colocated=True), [Host(0, 4)]))
    assert table.splitlines()[-1].startswith("cluster.colocated: the learner has no GPU here; it and the servers still")
    assert "cluster.colocated" not in placement_table(place(make_config(colocated=True), [Host(1, 4)]))


def test_a_colocated_run_without_a_gpu_for_its_scorer_or_on_two_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"set scoring\.prm\.device=cpu"):
        place(make_config(scorer="auto", colocated=True), [Host(1, 4)])
    with pytest.raises(ConfigError, match="must be on one host"):
        place(make_config(colocated=True), [Host(1, 4), Host(1, 4)])


def threads_of(config: TrainConfig, cpus: int) -> dict[str, tuple[int, int]]:
    """Threads and CPUs of one process of each role on a host with a GPU."""
    return {role.module: (role.threads, role.cpus) for role in place(config, [Host(1, cpus)]).roles}


def test_a_scorer_that_only_runs_rules_leaves_the_cpus_to_actor_and_learner() -> None:
    config = make_config()
    config.scoring.prm.path = None
    config.scoring.rule, config.scoring.rule_processes = "gsm8k", 1
    assert threads_of(config, 32) == {"replay": (1, 1), "scoring": (1, 2), "actor": (15, 15), "learner": (15, 15)}
    assert threads_of(config, 4) == {"replay": (1, 1), "scoring": (1, 2), "actor": (1, 1), "learner": (1, 1)}
    assert threads_of(config, 1)["learner"] == (1, 1)
    config.scoring.rule_processes = 8
    assert threads_of(config, 32)["scoring"] == (1, 9)
    assert threads_of(config, 32)["learner"] == (11, 11)
    config.cluster.scorer_threads = 5
    assert threads_of(config, 32)["scoring"] == (5, 13)


def test_a_scorer_with_a_model_or_a_manager_gets_a_share_of_the_cpus_and_one_with_a_served_model_none() -> None:
    config = make_config()
    assert threads_of(config, 32)["scoring"][0] == 10
    config.scoring.prm.path = "http://127.0.0.1:8000"
    assert threads_of(config, 32)["scoring"][0] == 1
    config.scoring.manager.name = "naive"
    assert threads_of(config, 32)["scoring"][0] == 10
