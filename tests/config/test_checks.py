"""Values and combinations that cannot work are refused with the fix, all at once."""

from __future__ import annotations

import re
import shlex
from math import isfinite
from operator import attrgetter
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from asyncrl.config.bind import check_bind
from asyncrl.config.compose import composed
from asyncrl.config.keys import OPTIONS
from asyncrl.config.option import Option
from asyncrl.config.refusals import refusals
from asyncrl.config.schema import ModelConfig, PartConfig, TrainConfig
from asyncrl.errors import ConfigError

JSON = '{"a": 1, "b": [1, 2], "c": "x,y"}'


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    tasks = tmp_path / "tasks.parquet"
    tasks.touch()
    config = TrainConfig(model=ModelConfig(path="somewhere"))
    config.data.train = [str(tasks)]
    return config


def put(config: TrainConfig, key: str, new: object) -> TrainConfig:
    section, _, name = key.rpartition(".")
    setattr(attrgetter(section)(config), name, new)
    return config


def test_the_defaults_are_possible(config: TrainConfig) -> None:
    assert refusals(config) == []


def constrained() -> list[tuple[str, object]]:
    """Every option with a constraint, and a value that breaks it."""
    return [(key, bad(option)) for key, option in OPTIONS.items() if option.within or option.choices]


def bad(option: Option) -> object:
    one: object = "nonsense"
    if option.within:
        low, high = (float(edge) for edge in option.within[1:-1].split(","))
        one = low - 1 if isfinite(low) else high + 1
    return {list: [one], dict: {"a": [one]}}.get(type(option.default), one)


@pytest.mark.parametrize(("seed", "refused"), [(-1, True), (0, False), (2**32 - 1, False), (2**32, True)])
def test_a_seed_has_at_most_32_bits(config: TrainConfig, seed: int, refused: bool) -> None:
    assert bool(refusals(put(config, "run.seed", seed))) is refused


@pytest.mark.parametrize(("key", "bad"), constrained())
def test_a_value_that_breaks_its_constraint_is_refused(config: TrainConfig, key: str, bad: object) -> None:
    (line,) = refusals(put(config, key, bad))
    assert re.match(rf"{key}=.*: it must be ", line)


def test_all_that_is_wrong_is_in_one_message(config: TrainConfig) -> None:
    put(config, "learner.group_size", 0)
    put(config, "learner.lr", float("nan"))
    put(config, "learner.eval_every", 5)
    assert [line.split("=")[0] for line in refusals(config)] == [
        "learner.group_size",
        "learner.lr",
        "learner.eval_every",
    ]


SHOWN = {"data.demonstration": "target"}
VLLM = {"engine.kind": "vllm", "engine.urls": ["http://u"]}
SERVED = {"engine.kind": "sglang"}
AWAY = {"engine.kind": "sglang", "engine.urls": ["http://127.0.0.1:1", "http://10.0.0.2:30000"]}
KEYS = {"network.host": "0.0.0.0", "network.keys": "k"}
TURNS = {"cluster.colocated": True, "engine.kind": "sglang", "replay.max_lag": 0}
WAIT, MASK = {"replay.old_groups.wait_s": 60.0}, {"replay.old_groups.mask": True}
STEPS = {"scoring.steps": "my.steps"}
MANAGER, ONE_MANAGER = {"scoring.manager.name": "naive"}, {"scoring.manager.sources": {"a": {"name": "naive"}}}
BY_MODEL = {"scoring.rule": None, "scoring.outcome_model.path": "m"}
PRM, TANH = {"scoring.prm.path": "prm"}, {"scoring.shaping.use_logit_tanh": True}
FROM_ENVIRONMENT = {"scoring.shaping.outcome_weight": 0.0, "scoring.shaping.environment_weight": 1.0}


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"learner.batch_size": 10, "learner.group_size": 4}, "such as 12"),
        (STEPS | {"scoring.guards.window_s": 60.0}, r"so there is no alarm; set scoring\.guards\.window_s=900\.0"),
        (SHOWN | {"data.dataset": "a.B"}, "makes tasks without demonstrations"),
        (SHOWN | {"actor.agent": "a.b"}, "an agent makes its own prompts, and a demonstration"),
        (SHOWN | {"actor.environment": "a.B", "actor.tools": []}, "an environment begins the episode, and"),
        (SHOWN | {"actor.interactions": {"a": "x.Y"}}, "no user scores the turns"),
        (SHOWN | {"scoring.shaping.environment_weight": 0.5}, "tools do not run for a demonstration"),
        (SHOWN | MANAGER, "judges only episodes of the policy; set the first to null"),
        (SHOWN | {"implicit.train": True, "algorithm.advantage.name": "prime"}, "no test has trained this model on"),
        (TURNS | {"engine.kind": "embedded"}, "cannot free its memory"),
        (TURNS | {"engine.kind": "vllm"}, "only SGLang servers that the run starts"),
        (TURNS | {"engine.urls": ["http://127.0.0.1:1"]}, "name no servers"),
        (TURNS | {"replay.max_lag": 1}, "set 0"),
        (TURNS | {"replay.source": "."}, "a stored run needs no servers"),
        (TURNS | {"weights.to_engines": "distributed"}, "never hold GPUs at the same time"),
        (TURNS | {"weights.into_servers": "nccl"}, "without a server"),
        (TURNS | {"engine.server.per_gpu": 2}, "one server takes turns with the learner on each GPU"),
        (SERVED | {"engine.server.per_gpu": 2, "engine.server.tp_size": 2}, "a part of a GPU, or several GPUs"),
        (SERVED | {"engine.server.per_gpu": 2, "engine.server.arguments": ["--device=cpu"]}, "have no GPU"),
        (TURNS | {"cluster.pools": {"train": {}, "actor": {}}}, "into one pool"),
        ({"learner.minibatches": 7}, "divide"),
        ({"learner.publish_every": 7}, "last weights must be published"),
        ({"learner.publish_every": 4, "learner.checkpoint_every": 10}, "publish_every=4: .*multiple of the second"),
        ({"actor.max_tokens": 9000, "engine.max_length": 4096}, "engine.max_length"),
        ({"learner.eval_every": 5}, "data.eval"),
        ({"scoring.shaping.process_weight": 0.5}, "scoring.prm.path.*or scoring.steps to a function of yours"),
        ({**AWAY, "weights.into_servers": "gloo"}, r"engine\.urls=.*10\.0\.0\.2.*gloo and NCCL have no keys"),
        ({**KEYS, "weights.to_engines": "distributed"}, r"network\.host=.*gloo and NCCL have no keys"),
        ({"engine.kind": "vllm"}, "set exactly one of engine.urls"),
        ({"engine.kind": "sglang", "engine.launch": True, "engine.router": "http://r"}, "set exactly one of"),
        ({"engine.kind": "sglang", "engine.launch": False}, r"actors start servers with engine\.python"),
        (SERVED | {"engine.server.arguments": ["--a", "--b c=d", "-e f"]}, r"'--b c=d' as one word; write each name"),
        ({"engine.kind": "sglang", "engine.urls": ["a:30000"]}, "must begin with http"),
        ({**VLLM, "weights.into_servers": "ipc"}, "vLLM takes weights from a folder"),
        ({**VLLM, "actor.temperature": 0.001}, "vLLM samples at 0.01 or more"),
        ({**VLLM, "engine.return_routed_experts": True}, "do not report experts; use sglang or embedded"),
        ({**VLLM, "engine.dtype": "bfloat16"}, "it applies only to the embedded engine; give servers"),
        ({"learner.router_replay": True}, r"engine\.return_routed_experts.*set the second"),
        ({"engine.kind": "vllm", "engine.launch": True}, "it starts SGLang servers only"),
        ({**AWAY, "cluster.actors": 2}, "name more servers in engine.urls"),
        ({**AWAY, "cluster.autoscale.actors": [1, 2]}, r"autoscale\.actors.* name more servers in engine.urls"),
        ({"replay.filter.zero_variance": True, "learner.group_size": 1}, "would drop every group"),
        ({**PRM, "scoring.rules": {"a": None}}, r"no kind of score of a \(prm\) has a weight"),
        ({"actor.step_split": "word"}, "dotted path"),
        ({"scoring.timeout_s": 900.0}, "scoring.stall_s"),
        ({"scoring.needs": {"a": ["prm"]}}, "one or more kinds, all of them configured: rules"),
        ({"scoring.needs": {"a": []}}, "must name one or more kinds"),
        ({"scoring.rule": None}, r"scoring\.rule=null: nothing scores the episodes; name a rule, a manager or a model"),
        (
            {"scoring.rules": {"a": None}, "scoring.needs": {"a": ["rules"]}},
            "source a need rules, but the rule is n",
        ),
        ({**BY_MODEL, "scoring.shaping.prm_acc_bonus_weight": 0.5}, "only a rule or a manager says if an answer is r"),
        ({**BY_MODEL, "scoring.shadow": True}, "no score would be left to train on; name a rule"),
        ({"data.eval": []}, "name one or more files of tasks; null means that there are none"),
        ({**MANAGER, "scoring.manager.timeout_s": 900.0}, "make the first smaller than"),
        ({**MANAGER, "scoring.manager.batch_groups": 2}, "less than half the second"),
        ({"scoring.manager.params": {"a": 1}}, "need a manager; name one"),
        ({**ONE_MANAGER, "scoring.needs": {"b": ["manager"]}}, "b has no manager"),
        ({"scoring.manager.sources": {"a": "naive"}}, "a has 'naive'; give null, or a mapping"),
        ({"scoring.manager.sources": {"a": {"nam": "naive"}}}, "a mapping with some of the keys name, compute_score"),
        ({"scoring.manager.sources": {"a": {"num_examine": -1}}}, "num_examine of a must be a whole number"),
        ({**PRM, "scoring.needs": {"a": ["prm"]}}, r"no kind of score of a \(prm\) has a weight"),
        ({"scoring.shaping.outcome_weight": 0.0}, r"any source \(rules\) has a weight"),
        (
            {**FROM_ENVIRONMENT, "algorithm.correction": [PartConfig("zero_variance")]},
            "give it params={score: reward}",
        ),
        (
            {**FROM_ENVIRONMENT, "replay.filter.zero_variance": True, "replay.filter.score": "outcome"},
            "outcomes are not part of the reward; compare the reward",
        ),
        ({"replay.filter.score": "rule/none/style"}, "nothing in scoring gives this score; use reward, outcome, rule/"),
        ({"scoring.serve": ["prm"]}, "configured kinds: rules"),
        ({**STEPS, **PRM}, "scoring.steps=my.steps with scoring.prm.path=prm: both give step scores; keep one of them"),
        (
            {**STEPS, "scoring.prm.family": "my.Model"},
            "scoring.prm.family=my.Model: both give step scores",
        ),
        ({**STEPS, **TANH}, "used as they are; set scoring.shaping.use_logit_tanh=false"),
        (
            {**STEPS, "scoring.shaping.max_resp_len": 9},
            "max_resp_len changes only .*set scoring.shaping.max_resp_len=1024",
        ),
        ({**STEPS, "scoring.needs": {"a": ["steps"]}}, r"no kind of score of a \(steps\) has a weight"),
        ({"scoring.prm.params": {"beta": 1}}, "the parameters need a model"),
        ({"scoring.shadow": True, "scoring.shaping.outcome_weight": 0.0}, "give the outcome a weight"),
        ({**PRM, "scoring.shadow": True, "scoring.needs": {"a": ["prm"]}}, "or a manager to its kinds"),
        ({"scoring.manager.compute_score_params": {"a": 1}}, "need a manager; name one"),
        ({"scoring.manager.sources": {"a": {"params": {"b": 1}}}}, "a has no manager; give it a name"),
        ({"scoring.shaping.answer_pattern": "a{4294967295}"}, "cannot read this regular expression"),
        ({**TANH, "scoring.shaping.prm_aggregation": "product"}, "use min"),
        ({**TANH, "scoring.shaping.use_raw_logit": True}, "use_logit_tanh and prm_apply_sigmoid change the logit"),
        ({"scoring.shaping.use_raw_logit": True, "scoring.shaping.prm_aggregation": "product"}, "use min"),
        ({**PRM, "scoring.prm.gpus": 2}, "set the device to cuda or auto"),
        ({"scoring.shaping.prm_aggregation": "best_of_n"}, "add {name: best_of_n} to algorithm.reward"),
        (
            {"scoring.shaping.overlong_penalty": 1.0},
            "overlong_max_length=0 with .*overlong_buffer=512: .* at least as large",
        ),
        ({"scoring.shaping.answer_pattern": "("}, "cannot read this regular expression"),
        ({"network.host": "0.0.0.0"}, "asyncrl keys"),
        ({"actor.chat_api_host": "0.0.0.0"}, "plain HTTP"),
        ({"observe.prometheus_host": "0.0.0.0", "observe.sinks": ["prometheus"]}, "plain HTTP"),
        (
            {"observe.upload": ["episodes"], "observe.keep_episodes": 0, "observe.keep_evaluated": 0},
            "no episodes are kept",
        ),
        ({"observe.upload": ["model"], "learner.export": False}, "no model is exported"),
        ({"actor.agent": "a.b", "actor.max_total_tokens": 9}, "must have room for its sequences; raise"),
        ({"actor.environment": "a.B", "actor.environments": {"c": "a.C"}}, "the second for several; leave one out"),
        ({"actor.environment": "a.B", "actor.agent": "a.b"}, "an agent plays the environment itself"),
        ({"actor.environments": {"c": "a.C"}, "actor.tools": ["python"]}, "methods of an environment are the tools"),
        ({"actor.environment": "a.B", "actor.mcp_servers": {"c": {}}}, "methods of an environment are the tools"),
        ({"actor.agent": "a.b", "actor.mcp_servers": {"c": {}}}, "an agent connects to its servers itself"),
        ({"actor.search.corpus": "a", "actor.search.url": "http://a"}, "passages come from only one of them"),
        ({"actor.search.url": "localhost:8000"}, "write an address such as http://"),
        ({"data.dataset": "a.B", "data.columns": {"prompt": "q"}}, "the class reads the files, so no columns are used"),
        ({"data.dataset": "a.B", "data.keep_in_memory": False}, "makes its tasks in memory"),
        ({"data.columns": {"reward_model": "a"}}, "instead of reward_model, name ground_truth"),
        ({"data.band": [0.9, 0.1]}, "the lowest and the highest"),
        ({"learner.optimizer_on_host": True, "learner.optimizer": "adamw_8bit"}, "use adamw or muon"),
        ({"model.lora.path": "a", "model.lora.rank": 8}, "leave out all but path"),
        ({"critic.lora.alpha": 8}, r"there are no adapters; set critic\.lora\.rank"),
        ({"implicit.lora.rank": 8, "implicit.freeze": ["embeddings"]}, "only adapters are trained"),
        ({"model.lora.rank": 8, "model.lora.targets": []}, "name linear layers"),
        ({"model.lora.rank": 8, "algorithm.balance_bias_rate": 0.1}, "does not change the biases of routers"),
        ({"model.lora.rank": 8, "learner.reference_on_host": True}, "needs no extra memory; set the first to false"),
        (
            {"model.lora.path": "a", "learner.reference_on_host": True},
            r"reference_on_host=true with model\.lora\.path=a: ",
        ),
        ({"model.lora.path": "a", "algorithm.balance_bias_rate": 0.1}, r"bias_rate=0\.1 with model\.lora\.path=a: "),
        ({"model.lora.path": "a", "learner.expert_ranks": 2}, r"model\.lora\.path=a with learner\.expert_ranks=2: "),
        ({"critic.lora.path": "a", "critic.shared": True}, r"critic\.shared=true with critic\.lora\.path=a: "),
        ({"learner.warmup_steps": 101}, "warmup_steps=101 with learner.steps=null: .* lower"),
        ({"observe.profile_steps": [3, 100]}, r"profile_steps=\[3, 100\] with .* 0 to 99"),
        ({"observe.memory_steps": [100]}, r"memory_steps=\[100\] with .* 0 to 99"),
        ({"learner.interface": "lo"}, "set the first to null"),
        ({"learner.betas": [0.9]}, "AdamW takes two"),
        ({"cluster.learner_ranks": 4, "learner.replicas": 3}, "a divisor of 4"),
        ({"cluster.learner_ranks": 3, "learner.nodes": 2, "learner.replicas": 4}, "a divisor of 6"),
        ({"cluster.learner_ranks": 8, "learner.replicas": 2, "learner.context_ranks": 3}, "use a divisor of 4"),
        ({"cluster.learner_ranks": 8, "learner.replicas": 2, "learner.expert_ranks": 3}, "use a divisor of 4"),
        ({"learner.expert_ranks": 2, "model.lora.rank": 8}, "a model with adapters gathers its experts"),
        ({"cluster.learner_ranks": 8, "learner.replicas": 2, "learner.tensor_ranks": 3}, "use a divisor of 4"),
        (
            {"learner.tensor_ranks": 2, "critic.lora.rank": 8},
            r"critic\.lora\.rank=8 .* cannot be divided; set the second to 1",
        ),
        ({"learner.tensor_ranks": 2, "model.dtype": "float16"}, "use bfloat16"),
        ({"learner.tensor_ranks": 2, "learner.context_ranks": 2}, r"context_ranks=2 .* set one of them to 1"),
        ({"learner.tensor_ranks": 2, "learner.expert_ranks": 2}, r"expert_ranks=2 .* set one of them to 1"),
        ({"learner.tensor_ranks": 2, "model.attention": "flash_attention_2"}, "use auto or sdpa"),
        (
            {"learner.context_ranks": 2, "model.attention": "flex_attention"},
            "cannot share a sequence between ranks; use auto or sdpa",
        ),
        ({"learner.keep_best": 1}, "checkpoint_every=20, and name held-out tasks in data.eval"),
        (
            {"model.lora.path": "a", "model.freeze": ["embeddings"]},
            "the adapters of the folder are trained; set the first",
        ),
        ({"learner.node": 1}, "numbered from 0 to 0"),
        ({"learner.nodes": 2}, "such as 10.0.0.1:5757"),
        ({"learner.rendezvous": "10.0.0.1:5757"}, "or the second to the number of hosts"),
        ({"learner.interface": "eth0"}, "set the first to null"),
        ({"network.replay_port": 5755, "network.weights_port": 5755}, "name another port"),
        (
            {"network.replay_host": "localhost", "network.replay_port": 5755, "network.weights_port": 5755},
            "name another port",
        ),
        ({"learner.nodes": 2, "learner.rendezvous": "10.0.0.1:5757"}, "have no keys and do not encrypt"),
        (
            {"learner.nodes": 2, "learner.rendezvous": "10.0.0.1:5757", "network.insecure": True},
            "network.host=127.0.0.1 .* must reach the replay",
        ),
        ({"learner.deterministic": True, "model.attention": "flex_attention"}, "use auto"),
        ({"replay.shards": 9}, "use at most 8 shards"),
        (WAIT | {"replay.max_lag": 0}, "only groups of its own version; set the first key to 0"),
        (WAIT | {"replay.sampler.max_times_sampled": 2}, "or the second to 1"),
        (MASK | {"replay.max_lag": 0}, "only groups of its own version; set the first key to false"),
        (MASK | {"replay.sampler.max_times_sampled": 2}, "or the second to 1"),
        (MASK | {"implicit.train": True, "algorithm.advantage.name": "prime"}, "learns from whole episodes"),
        (WAIT | {"replay.sampler.kind": "fifo"}, "must train them first; use oldest, or set the second key to 0"),
        ({"run.name": "../mine"}, "a name without slashes"),
        ({"run.name": ".."}, "a name without slashes"),
        ({"replay.filter.min_reward": 1.0, "replay.filter.max_reward": 0.5}, "every group would be refused"),
        ({"cluster.pools": {"train": {"gpu": 4}}}, "the pool train has an unknown key gpu; use nodes, gpus, cpus"),
        ({"cluster.pools": {"train": {"nodes": 0}}}, "train needs at least one node"),
        ({"cluster.pools": {"train": {}, "rollout": {}}}, "no role uses the pool rollout; give it a role"),
        ({"cluster.roles": {"actor": "rollout"}}, "which does not exist; cluster.pools is empty"),
        ({"cluster.pools": {"a": {}}, "cluster.roles": {"server": "a"}}, "there is no role server; use replay"),
        ({"cluster.launcher": "hosts"}, r"set cluster\.hosts=\[gpu1,gpu2\]"),
        ({"cluster.launcher": "ray", "cluster.hosts": ["a"]}, "set cluster.launcher=hosts"),
        ({"cluster.launcher": "hosts", "cluster.hosts": ["a", "b", "a"]}, "would count twice: a; name each once"),
        ({"cluster.launcher": "hosts", "cluster.hosts": ["a", "", "-v"]}, "not the name of a host: '', '-v'"),
        ({"cluster.actors": 10**9}, r"it must be a whole number in \[1, 100000\]"),
        ({"cluster.pools": {"a": {"gpus": 10**9}}}, r"whole numbers in \[0, 100000\]"),
        ({"network.learner_host": "10.0.0.2"}, r"network\.learner_host=10.0.0.2: other machines"),
        ({"network.weights_port": 5755}, "the replay listens there"),
        ({"network.replay_port": 65535, "replay.shards": 2}, "up to 65535"),
        ({"scoring.outcome_model.device": "gpu"}, "use cpu, cuda, cuda:N"),
        ({"replay.shard": 1}, "numbered from 0 to 0"),
        ({"replay.source": "nowhere"}, "folder of a finished run"),
        ({"implicit.train": True}, "use algorithm=prime"),
    ],
)
def test_an_impossible_combination_is_refused_with_the_fix(
    config: TrainConfig, changes: dict[str, object], fix: str
) -> None:
    for key, new in changes.items():
        put(config, key, new)
    assert re.search(fix, "\n".join(refusals(config)))


def test_a_value_of_an_argument_of_servers_may_have_spaces(config: TrainConfig) -> None:
    put(config, "engine.kind", "sglang")
    put(
        config,
        "engine.server.arguments",
        ["--device=cpu", '--json-model-override-args={"a": 1}', "--a", "b c", " [1, 2]"],
    )
    assert refusals(config) == []


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        (["--a", "--b fa3", "-e f"], ["--a", "--b", "fa3", "-e f"]),
        (["--b  2 --c x=y"], ["--b", "2", "--c", "x=y"]),
        (["--o " + JSON], ["--o", JSON]),
        (["--o it's ${HOME} a\\b \\"], ["--o", "it's ${HOME} a\\b \\"]),
        (["  --device=cpu", " --o=" + JSON], ["--device=cpu", "--o=" + JSON]),
        (["[--device=cpu]"], ["--device=cpu"]),
        (["['--device=cpu', --b,fa3]"], ["--device=cpu", "--b", "fa3"]),
        ([f"[--o,{JSON},--b,1,2]"], ["--o", JSON, "--b", "1", "2"]),
    ],
)
def test_the_arguments_of_servers_that_a_refusal_suggests_are_read_as_they_are_meant(
    config: TrainConfig, given: list[str], meant: list[str]
) -> None:
    put(config, "engine.kind", "sglang")
    (line,) = refusals(put(config, "engine.server.arguments", given))
    (word,) = shlex.split(line.partition("as a separate item: ")[2])
    server = composed([word]).engine.server
    assert OmegaConf.to_container(server.arguments, resolve=False) == meant
    assert refusals(put(config, "engine.server.arguments", meant)) == []


def test_a_bind_off_loopback_needs_an_explicit_word() -> None:
    for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        check_bind(host, insecure=False)
    for host in ("0.0.0.0", "10.0.0.1", "node7"):
        with pytest.raises(ConfigError, match="insecure=true"):
            check_bind(host, insecure=False)
        check_bind(host, insecure=True)
        check_bind(host, insecure=False, secured=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine.kind": "embedded"}, "cannot follow a grammar; use sglang or vllm"),
        ({"actor.environment": "a.B"}, "cannot call tools; set the first to {}"),
        ({"actor.agent": "my.agent"}, "an agent sets response_format in each of its requests"),
        ({"actor.tools": ["calculator"]}, "cannot call tools"),
        ({"actor.temperature": 0.7}, "no token would be trained without it; use 1"),
        ({"actor.response_format": {"type": "regex"}}, "use {type: text}"),
    ],
)
def test_a_response_format_needs_servers_no_tools_and_temperature_1(
    config: TrainConfig, changes: dict[str, object], reason: str
) -> None:
    possible = {
        "actor.response_format": {"type": "regex", "regex": "[ab]+"},
        "actor.tools": [],
        "engine.kind": "sglang",
        "engine.urls": ["http://localhost:1"],
    }
    for key, new in possible.items():
        put(config, key, new)
    assert refusals(config) == []
    for key, new in changes.items():
        put(config, key, new)
    assert reason in "\n".join(refusals(config))


def test_a_group_of_one_episode_and_a_demonstration_may_be_filtered_by_its_scores(config: TrainConfig) -> None:
    config.replay.filter.zero_variance, config.learner.group_size, config.data.demonstration = True, 1, "answer"
    assert not any("would drop every group" in each for each in refusals(config))
