"""The command `asyncrl train --plan` for hosts to which it does not connect."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from asyncrl.config.compose import read
from asyncrl.config.schema import EngineConfig, ModelConfig, TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.launch.local import train
from asyncrl.launch.plan import show_plan, without_option
from asyncrl.launch.preflight.algorithm import check_algorithm

POOLS = {"train": {"nodes": 2, "gpus": 8, "cpus": 64}, "memory": {"gpus": 0, "cpus": 16}, "rollout": {"gpus": 4}}


def make_config(launcher: str, **cluster: object) -> TrainConfig:
    """The configuration of a run on a cluster that does not exist."""
    config = TrainConfig(model=ModelConfig(path="m"), engine=EngineConfig("sglang", launch=True))
    config.cluster.launcher, config.cluster.hosts = launcher, ["nowhere.invalid"] if launcher == "hosts" else []
    config.network.insecure = True
    config.cluster.shell, config.cluster.ray.address = ["false"], "nowhere.invalid:1" if launcher == "ray" else None
    for key, value in cluster.items():
        setattr(config.cluster, key, value)
    return config


@pytest.mark.parametrize("launcher", ["local", "hosts", "ray", "slurm"])
def test_a_number_of_hosts_is_planned_without_a_connection(launcher: str, capsys: pytest.CaptureFixture[str]) -> None:
    show_plan(make_config(launcher, gpus=8, cpus=64), "--plan=4")
    lines = capsys.readouterr().out.splitlines()
    learners = [line.split() for line in lines if line.startswith("learner")]
    assert [words[words.index("ranks") + 1 :][:3] for words in learners] == [
        ["train", "0", "0-7"],
        ["train", "1", "0-7"],
    ]
    assert [line.split()[2] for line in lines if line.startswith("actor")] == ["2", "3"]


def test_a_plan_without_gpus_says_so_where_servers_need_some(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("local", gpus=0, cpus=8)
    show_plan(config)
    assert "no host has a GPU for the servers" in capsys.readouterr().out
    for arguments in (["--device=cpu"], ["--device", "cpu"]):
        config.engine.server.arguments = arguments
        show_plan(config)
        assert "no host has a GPU" not in capsys.readouterr().out
    config.engine.server.arguments = ["--device=cpu", "--device", "cuda"]
    show_plan(config)
    assert "no host has a GPU" in capsys.readouterr().out, "a server takes the last of several"
    config.engine.server.arguments, config.cluster.gpus = [], 1
    show_plan(config, "--plan=1")
    assert "no host has a GPU" not in capsys.readouterr().out


def test_the_hosts_that_pools_describe_are_planned_without_a_connection(capsys: pytest.CaptureFixture[str]) -> None:
    roles = {"replay": "memory", "scoring": "memory", "actor": "rollout", "learner": "train"}
    show_plan(make_config("ray", pools=POOLS, roles=roles, cpus=32), "--plan=pools")
    words = [line.split() for line in capsys.readouterr().out.splitlines()]
    where = {each[0]: each for each in words}
    assert where["replay"][1:4] == ["memory", "2", "-"]
    assert where["actor-0"][1:5] == ["rollout", "3", "0-3", "16"]
    assert where["learner-node-1"][4:7] == ["train", "1", "0-7"]


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--plan=", "write --plan=N for N hosts, or --plan for those of this run"),
        ("--plan=0", "write a number of hosts, at most 100,000, or pools"),
        ("--plan=many", "write a number of hosts, at most 100,000, or pools"),
        ("--plan=1000000000", "write a number of hosts, at most 100,000, or pools"),
        ("--plan=2", "set cluster.gpus and cluster.cpus"),
        ("--plan=pools", r"cluster\.pools\.rollout has no cpus; add this key, or set cluster\.cpus"),
    ],
)
def test_a_plan_of_hosts_that_nothing_describes_is_refused(option: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        show_plan(make_config("ray", pools=POOLS, roles={"replay": "memory"}), option)


@pytest.mark.parametrize("option", ["--plan", "--plan=1"])
def test_pools_that_need_other_hosts_are_refused_with_the_plan_that_assumes_these(option: str) -> None:
    pools = {"train": {"nodes": 1, "gpus": 8}, "rollout": {"nodes": 3, "gpus": 8}}
    config = make_config("local", pools=pools, roles={"actor": "rollout"}, gpus=8, cpus=64)
    with pytest.raises(ConfigError, match="to plan without any hosts, write --plan=pools, or --plan=N for N hosts"):
        show_plan(config, option)
    show_plan(config, "--plan=pools")


def test_the_number_of_hosts_may_be_a_word_of_its_own() -> None:
    for words in (["--plan=16", "cluster.pools={}"], ["--plan", "16", "cluster.pools={}"]):
        assert without_option(words) == (["cluster.pools={}"], "--plan=16")
    assert without_option(["--plan", "pools"]) == ([], "--plan=pools")
    assert without_option(["--plan", "cluster.gpus=8"]) == (["cluster.gpus=8"], "--plan")
    assert without_option(["16"]) == (["16"], "")


@pytest.mark.parametrize("launcher", ["local", "hosts", "ray", "slurm"])
def test_a_plan_refuses_what_the_start_would(launcher: str) -> None:
    """Without a launcher it is a plan for one: the local one starts nothing on several hosts."""
    config = make_config(launcher, gpus=8, cpus=64)
    config.network.insecure = False
    with pytest.raises(ConfigError, match=r"network\.insecure=false: the learner is on 2 hosts, and gloo and NCCL"):
        show_plan(config, "--plan=4")
    show_plan(config, "--plan=2")  # The learner is on one of them.
    config.network.keys = "/nowhere/keys"
    with pytest.raises(ConfigError, match=r"network\.keys: cannot read /nowhere/keys/allowed"):
        show_plan(config, "--plan=2")


def test_copies_of_the_model_that_the_ranks_do_not_divide_are_refused_by_the_plan_too() -> None:
    config = TrainConfig(model=ModelConfig(path="m"))
    config.learner.replicas, config.cluster.gpus = 3, 0
    with pytest.raises(ConfigError, match=r"learner\.replicas=3 with cluster\.learner_ranks=1: .* use a divisor of 1"):
        show_plan(config)


@pytest.mark.parametrize("launcher", ["hosts", "ray", "slurm"])
def test_a_learner_that_would_wait_for_hosts_that_nobody_starts_is_refused(launcher: str) -> None:
    config = make_config(launcher, gpus=8, cpus=64)
    config.learner.nodes, config.learner.rendezvous = 3, "10.0.0.1:5757"
    config.network.host = "10.0.0.1"
    with pytest.raises(ConfigError, match=r"learner\.nodes=3: the learner has 2 of 4 hosts; set it to 1"):
        show_plan(config, "--plan=4")
    config.learner.nodes = 2
    show_plan(config, "--plan=4")


@pytest.mark.parametrize("launcher", ["local", "hosts", "ray", "slurm"])
def test_what_needs_a_gpu_is_refused_where_no_host_of_its_role_has_one(launcher: str) -> None:
    config = make_config(launcher, gpus=0, cpus=64)
    config.scoring.prm.path, config.scoring.prm.device, config.model.attention = "prm", "cuda", "flash_attention_2"
    config.scoring.shaping.process_weight = 1.0
    config.scoring.outcome_model.path, config.scoring.outcome_model.device = "judge", "cuda:0"
    with pytest.raises(ConfigError) as refused:
        show_plan(config, "--plan=2")
    assert [line.partition(":")[0] for line in str(refused.value).splitlines()] == [
        "scoring.prm.device=cuda",
        "scoring.outcome_model.device=cuda",
        "model.attention=flash_attention_2",
    ]
    config.cluster.gpus = 1
    show_plan(config, "--plan=2")


def test_a_ray_cluster_on_which_nothing_would_start_is_refused() -> None:
    config = make_config("local", gpus=0, cpus=64)
    config.cluster.ray.address = "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=r"set cluster\.launcher=ray, or cluster\.ray\.address=null"):
        show_plan(config, "--plan=1")


WORDS = ["model.path=m", "data.train=x"]
NO_SCORE = "algorithm reads the scores {}, which nothing in scoring gives"
NO_STEPS = (
    "algorithm.advantage=process_grpo needs step scores: set scoring.prm.path to a process reward model, "
    "scoring.prm.family to a class of yours (my_module.MyScorer), scoring.steps to a function of yours"
)
UNREAD = "scoring.prm.family=my.Steps: nothing reads its step scores. Give them a weight in the reward"
UNREAD_MODEL = "scoring.outcome_model: nothing reads its scores. Give them a weight in the reward"
UNREAD_FUNCTION = "scoring.steps=my.steps: nothing reads its step scores. Give them a weight in the reward"
UNREAD_STEPS = (
    "scoring.shaping.prm_aggregation=per_step: algorithm.advantage=grpo does not read the step scores of "
    "scoring.prm.path"
)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("algorithm.loss=pppo", r"algorithm\.loss=pppo: did you mean ppo\?"),
        ("algorithm.correction=[truncate,opsmm]", r"algorithm\.correction=opsmm: did you mean opsm\?"),
        ("algorithm.loss.params.clip=1", r"algorithm\.loss ppo has no parameter 'clip'"),
        ("algorithm=process_grpo", re.escape(NO_STEPS)),
        ("algorithm.stream=[{name: ce, params: {score: rule/exact_nmber}}]", NO_SCORE.format("rule/exact_nmber")),
        ("algorithm.reward=[best_of_n]", NO_SCORE.format("process")),
    ],
)
def test_an_algorithm_that_cannot_be_is_refused_by_the_plan_and_by_a_start_before_anything_else(
    word: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("asyncrl.launch.local.check_paths", lambda *_: None)  # The data and the model do not exist.
    config = read([*WORDS, "scoring.rule=exact_number", word], names_missing_data=False)
    config.run.dir = str(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        show_plan(config, "--plan=many")  # An option that a plan would refuse later.
    with pytest.raises(ConfigError, match=reason):
        train(config, threading.Event())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["scoring.prm.family=my.Steps"], UNREAD),
        (["scoring.steps=my.steps"], UNREAD_FUNCTION),
        (["scoring.prm.path=prm", "scoring.shaping.prm_aggregation=per_step"], UNREAD_STEPS),
        (["scoring.outcome_model.path=orm", "scoring.shaping.outcome_model_weight=0"], UNREAD_MODEL),
    ],
)
def test_scores_of_models_that_nothing_reads_are_refused_with_the_ways_to_use_them(
    words: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)):
        check_algorithm(read([*WORDS, *words], names_missing_data=False))


@pytest.mark.parametrize(
    "words",
    [
        ["scoring.shaping.process_weight=0.5"],
        ["scoring.shadow=true"],
        ["algorithm=process_grpo", "scoring.shaping.prm_aggregation=per_step"],
        ["algorithm.stream=[rl, {name: ce, params: {score: process}}]"],
        ["scoring.shaping.prm_aggregation=best_of_n", "algorithm.reward=[best_of_n]"],
        ["algorithm.advantage=tests.algorithms.my_parts.Centred"],
    ],
)
def test_step_scores_that_something_reads_are_taken(words: list[str]) -> None:
    check_algorithm(read([*WORDS, "scoring.prm.path=prm", *words], names_missing_data=False))
    check_algorithm(read([*WORDS, "scoring.steps=my.steps", *words], names_missing_data=False))


def test_a_sampler_with_importance_weights_is_refused_for_a_loss_that_is_a_regression() -> None:
    words = ["algorithm=oapl", "replay.sampler.kind=prioritised"]
    with pytest.raises(ConfigError, match=r"set replay\.sampler\.kind=oldest, or replay\.sampler\.beta=0"):
        check_algorithm(read([*WORDS, *words], names_missing_data=False))
    check_algorithm(read([*WORDS, *words, "replay.sampler.beta=0"], names_missing_data=False))
    check_algorithm(read([*WORDS, "algorithm=vespo", words[1]], names_missing_data=False))


GAMES = "tests.tools.environments.games"


@pytest.mark.parametrize(
    "words",
    [
        ["actor.agent=my.agent"],
        ["actor.agent_command=[agent]"],
        ["actor.interactions={user: my.User}"],
        [f"actor.environment={GAMES}.Steps"],
        [f"actor.environments={{a: {GAMES}.Quiet, b: {GAMES}.Steps}}"],
    ],
)
def test_an_algorithm_may_read_rewards_of_turns(words: list[str]) -> None:
    check_algorithm(read([*WORDS, "algorithm=process_grpo", *words], names_missing_data=False))


def test_an_environment_that_rewards_no_calls_gives_no_step_scores() -> None:
    words = ["algorithm=process_grpo", f"actor.environment={GAMES}.Counter"]
    with pytest.raises(ConfigError, match=re.escape(NO_STEPS)):
        check_algorithm(read([*WORDS, *words], names_missing_data=False))


def test_a_plan_takes_an_algorithm_that_reads_step_scores_with_what_gives_them() -> None:
    config = make_config("ray", gpus=8, cpus=64)
    config.algorithm.advantage.name = "process_grpo"
    config.scoring.prm.path = "prm"
    show_plan(config, "--plan=2")
    config.scoring.shadow = True
    with pytest.raises(ConfigError, match=re.escape(NO_STEPS)):
        show_plan(config, "--plan=2")


def test_a_plan_says_what_each_server_is_given_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config("local", gpus=4, cpus=32)
    config.actor.concurrency = 512
    show_plan(config, "--plan=1")
    expected = "each server is given --max-running-requests 328 and CUDA graphs of decoding up to 328, since an actor "
    assert f"{expected}runs 512 episodes at once on 2 servers" in capsys.readouterr().out
    config.actor.agent = "tests.agent.play"
    show_plan(config, "--plan=1")
    printed = capsys.readouterr().out
    assert "each server is given CUDA graphs of decoding up to 648, since an actor runs 512 episodes" in printed
    assert "its agent may request several turns of an episode at once" in printed
    config.engine.server.arguments = ["--max-running-requests=8", "--disable-cuda-graph"]
    show_plan(config, "--plan=1")
    assert "each server is given" not in capsys.readouterr().out


def test_a_weight_of_demonstrations_is_refused_if_no_task_has_one() -> None:
    weight = "algorithm.demonstration.weight=shaped"
    with pytest.raises(
        ConfigError, match=f"^{weight}: no task has a demonstration. Name the column of demonstrations in data.dem"
    ):
        check_algorithm(read([*WORDS, weight], names_missing_data=False))
    check_algorithm(read([*WORDS, weight, "data.demonstration=target"], names_missing_data=False))
