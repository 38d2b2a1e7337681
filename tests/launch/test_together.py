"""Several servers on each GPU: where they are placed, and when they are the default."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.launch.placement import together
from asyncrl.launch.placement.placement import Placement, place
from asyncrl.launch.placement.pools import Host
from asyncrl.launch.placement.together import settle_servers
from asyncrl.launch.plan import show_plan

H200 = 141 * 10**9
EPISODES = 512


def make_config(model: Path | str = "m") -> TrainConfig:
    return TrainConfig(model=ModelConfig(path=str(model)), engine=EngineConfig("sglang"))


def settled(config: TrainConfig, host: Host, episodes: int = EPISODES) -> bool:
    placement = place(config, [host])
    return settle_servers(config.engine, config.weights, config.model, episodes, placement)


def actors_of(placement: Placement) -> list[tuple[tuple[int, ...] | None, int, tuple[str, ...]]]:
    return [(role.gpus, role.servers, role.arguments) for role in placement.of("actor")]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small model, on a machine whose GPUs are H200."""
    monkeypatch.setattr(together, "gpu_bytes", lambda _: H200)
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    return tmp_path


def test_an_actor_starts_so_many_servers_on_each_of_its_gpus() -> None:
    config = make_config()
    config.engine.server.per_gpu = 4
    assert actors_of(place(config, [Host(4, 64)])) == [((2, 3), 8, ("engine.server.count=8",))]


def test_a_number_of_servers_takes_as_few_gpus_as_they_need() -> None:
    config = make_config()
    config.engine.server.per_gpu, config.engine.server.count = 4, 6
    placement = place(config, [Host(8, 64)])
    assert actors_of(placement) == [((6, 7), 6, ("engine.server.count=6",))]
    assert placement.of("learner")[0].gpus == (0, 1, 2, 3, 4, 5)


def test_only_servers_on_a_gpu_of_the_learner_have_a_share_of_its_memory() -> None:
    config = make_config()
    config.engine.server.per_gpu, config.engine.server.count = 2, 4
    ((gpus, servers, arguments),) = actors_of(place(config, [Host(2, 64)]))
    assert (gpus, servers) == ((0, 1), 4)
    assert arguments == ("engine.server.count=4", "engine.server.memory=0.41", "engine.server.shared=[0,1]")


def test_a_small_model_with_many_episodes_gets_several_servers_on_each_gpu(small: Path) -> None:
    config = make_config(small)
    assert settled(config, Host(2, 32))
    assert config.engine.server.per_gpu == 4
    assert not settled(config, Host(2, 32)), "it is no longer open"


def test_the_episodes_and_cpus_of_each_gpu_count(small: Path) -> None:
    config = make_config(small)
    assert settled(config, Host(4, 32))
    assert config.engine.server.per_gpu == 2, "an actor's episodes are divided among two GPUs"
    assert not settled(make_config(small), Host(2, 4))
    assert not settled(make_config(small), Host(2, 32), episodes=64)


def colocated(config: TrainConfig) -> None:
    config.cluster.colocated = True


def counted(config: TrainConfig) -> None:
    config.engine.server.count = 1


def on_cpu(config: TrainConfig) -> None:
    config.engine.server.arguments = ["--device", "cpu"]


def sent_by_nccl(config: TrainConfig) -> None:
    config.weights.into_servers = "nccl"


def of_two_gpus(config: TrainConfig) -> None:
    config.engine.server.tp_size = 2


def embedded(config: TrainConfig) -> None:
    config.engine.kind = "embedded"


def set_to_one(config: TrainConfig) -> None:
    config.engine.server.per_gpu = 1


@pytest.mark.parametrize(
    "change",
    [colocated, counted, on_cpu, sent_by_nccl, of_two_gpus, embedded, set_to_one],
    ids=lambda each: each.__name__,
)
def test_what_the_user_chose_is_kept(small: Path, change: Callable[[TrainConfig], None]) -> None:
    config = make_config(small)
    change(config)
    before = config.engine.server.per_gpu
    assert not settled(config, Host(4, 64), episodes=4096)
    assert config.engine.server.per_gpu == before


def test_a_server_that_shares_its_gpu_with_the_learner_stays_alone(small: Path) -> None:
    assert not settled(make_config(small), Host(1, 32))


def test_a_model_whose_size_is_unknown_or_large_gets_one_server(small: Path) -> None:
    with (small / "model.safetensors").open("ab") as file:
        file.truncate(2 << 30)
    assert not settled(make_config(small), Host(2, 32))
    (small / "model.safetensors").unlink()
    assert not settled(make_config(small), Host(2, 32))


def test_a_plan_for_this_machine_shows_the_servers_that_a_run_would_start(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(small)
    config.cluster.gpus, config.cluster.cpus, config.actor.concurrency = 2, 32, EPISODES
    show_plan(config)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("actor-0") and line.endswith("engine.server.count=4") for line in lines)
    assert lines[-2].startswith("each server is given --max-running-requests 168 and CUDA graphs of decoding up to 168")
    assert lines[-1].startswith("4 servers share each GPU")


def test_an_actor_alone_on_its_gpu_has_no_share_of_the_memory() -> None:
    config = make_config()
    config.cluster.actors = 2
    shared, alone = actors_of(place(config, [Host(2, 64)]))
    assert shared[2] == ("engine.server.count=1", "engine.server.memory=0.41")
    assert alone[2] == ("engine.server.count=1",)
    config.engine.server.memory = 0.3
    assert all(each[2][-1] == "engine.server.memory=0.3" for each in actors_of(place(config, [Host(2, 64)])))
