"""A wrong configuration ends with a message that names the fix, before anything starts; never with a traceback."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.config.checks import CHOICES, NOT_NEGATIVE, POSITIVE, check, check_bind
from asyncrl.config.schema import ModelConfig, TrainConfig
from asyncrl.config.values import value
from asyncrl.errors import ConfigError
from tests.helpers import GENEROUS_S


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    tasks = tmp_path / "tasks.parquet"
    tasks.touch()
    config = TrainConfig(model=ModelConfig(path="somewhere"))
    config.data.train = str(tasks)
    return config


def put(config: TrainConfig, key: str, new: object) -> TrainConfig:
    section, _, name = key.rpartition(".")
    setattr(value(config, section), name, new)
    return config


def test_the_defaults_are_possible(config: TrainConfig) -> None:
    check(config)


@pytest.mark.parametrize("key", CHOICES)
def test_an_unknown_choice_is_refused_naming_the_allowed(config: TrainConfig, key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key}=nonsense: use one of"):
        check(put(config, key, "nonsense"))


@pytest.mark.parametrize(("key", "bad"), [(key, 0) for key in POSITIVE] + [(key, -1) for key in NOT_NEGATIVE])
def test_an_impossible_number_is_refused(config: TrainConfig, key: str, bad: int) -> None:
    with pytest.raises(ConfigError, match=key):
        check(put(config, key, bad))


GPU_SERVERS = {
    "engine.kind": "sglang",
    "engine.launch": True,
    "engine.server.tp_size": 2,
    "weights.transports": ["distributed"],
}
VLLM = {"engine.kind": "vllm", "engine.urls": ["http://u"], "weights.transports": ["disk"]}
PRM, TANH = {"scoring.prm.path": "prm"}, {"scoring.shaping.use_logit_tanh": True}


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"learner.batch_size": 10, "learner.group_size": 4}, "such as 12"),
        ({"learner.minibatches": 7}, "divide"),
        ({"learner.publish_every": 7}, "last weights must be published"),
        ({"learner.publish_every": 4, "learner.checkpoint_every": 10}, "multiple of publish_every=4"),
        ({"actor.max_tokens": 9000}, "engine.max_length"),
        ({"actor.temperature": 0.0}, "no exploration"),
        ({"learner.eval_every": 5}, "data.eval"),
        ({"scoring.shaping.process_weight": 0.5}, "scoring.prm.path"),
        ({"data.train": "nowhere.parquet"}, "no such file"),
        ({"engine.sampling": {"top_p": 0.9}}, "leave it at 1"),
        ({"engine.sampling": {"min_q": 0.9}}, "there are top_p"),
        ({"weights.transports": ["carrier pigeon"]}, "tensor, disk, distributed, ipc"),
        ({"weights.transports": ["ipc", "tensor"]}, "set weights.staging=cuda"),
        ({"weights.staging": "gpu"}, "such as cuda:1"),
        (
            {
                "engine.kind": "sglang",
                "engine.urls": ["http://127.0.0.1:1", "http://10.0.0.2:30000"],
                "weights.transports": ["tensor", "distributed"],
            },
            r"engine\.urls=10\.0\.0\.2 .*take distributed out",
        ),
        ({"weights.staging": "cuda:1"}, "leave it at cpu"),
        ({**GPU_SERVERS, "weights.staging": "cuda"}, "no two ranks on one GPU"),
        ({**GPU_SERVERS, "weights.staging": "cuda:3", "engine.server.first_gpu": 2}, "no two ranks on one GPU"),
        ({"weights.fallback": "zmq"}, "another one than weights.channel"),
        ({"weights.channel": "distributed"}, "joins between two broadcasts"),
        (
            {
                "network.host": "0.0.0.0",
                "network.keys": "k",
                "weights.channel": "distributed",
                "weights.fallback": "zmq",
            },
            "gloo and NCCL know no keys",
        ),
        ({"engine.kind": "sglang"}, "set exactly one of engine.urls"),
        ({"engine.kind": "sglang", "engine.launch": True, "engine.router": "http://r"}, "set exactly one of"),
        ({"engine.kind": "sglang", "engine.urls": ["a:30000"]}, "must begin with http"),
        ({"engine.kind": "vllm", "engine.urls": ["http://u"]}, "vLLM takes weights from a folder"),
        ({**VLLM, "actor.temperature": 0.001}, "vLLM would sample at 0.01"),
        ({"engine.kind": "vllm", "engine.launch": True, "weights.transports": ["disk"]}, "SGLang servers only"),
        ({"engine.kind": "sglang", "engine.launch": True, "cluster.actors": 2}, "engine.server.count"),
        ({"engine.kind": "sglang", "engine.urls": ["http://u"], "weights.mode": "in_place"}, "prefix_cache=salt"),
        ({"engine.kind": "sglang", "engine.urls": ["http://u"], "engine.prefix_cache": "salt"}, "keeps its salt"),
        ({"actor.step_split": "word"}, "dotted path"),
        ({"scoring.timeout_s": 900.0}, "scoring.stall_s"),
        ({"scoring.needs": {"a": ["prm"]}}, "kinds that are configured: rules"),
        ({"scoring.needs": {"a": []}}, "must name some"),
        ({**PRM, "scoring.needs": {"a": ["prm"]}}, r"nothing that a needs \(prm\) has a weight"),
        ({"scoring.shaping.outcome_weight": 0.0}, r"any source needs \(rules\) has a weight"),
        ({"scoring.serve": ["rule"]}, "kinds that are configured: rules"),
        ({"scoring.shadow": True, "scoring.shaping.outcome_weight": 0.0}, "give a weight to the outcome"),
        ({**PRM, "scoring.shadow": True, "scoring.needs": {"a": ["prm"]}}, "let it need rules"),
        ({**TANH, "scoring.shaping.prm_aggregation": "product"}, "use min"),
        ({"scoring.shaping.prm_aggregation": "best_of_n"}, "add {name: best_of_n} to algorithm.reward"),
        ({"scoring.shaping.step_transforms": ["clamp"]}, "clip and delta"),
        ({"scoring.shaping.incorrect_answer_penalty": 0.5}, "0 or less"),
        ({"scoring.shaping.overlong_penalty": 1.0}, "overlong_max_length=0: .* at least overlong_buffer=512"),
        ({"scoring.shaping.answer_pattern": "("}, "no regular expression"),
        ({"network.host": "0.0.0.0"}, "asyncrl keys"),
        ({"network.max_message_mb": 5000}, "at most 4095"),
    ],
)
def test_an_impossible_combination_is_refused_with_the_fix(
    config: TrainConfig, changes: dict[str, object], fix: str
) -> None:
    for key, new in changes.items():
        put(config, key, new)
    with pytest.raises(ConfigError, match=fix):
        check(config)


def test_a_bind_off_loopback_needs_an_explicit_word() -> None:
    for host in ("127.0.0.1", "127.0.0.9", "localhost", "::1"):
        check_bind(host, insecure=False)
    for host in ("0.0.0.0", "10.0.0.1", "node7"):
        with pytest.raises(ConfigError, match="insecure=true"):
            check_bind(host, insecure=False)
        check_bind(host, insecure=True)
        check_bind(host, insecure=False, secured=True)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncrl.replay", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=GENEROUS_S, check=False)


@pytest.mark.parametrize(
    ("arguments", "fix"),
    [
        (["model.path=x", "data.train=nowhere.parquet"], "no such file"),
        (["model.path=x"], "data.train must be set"),
        (["learner.no_such_key=1"], "no_such_key"),
        (["learner.steps=many"], "many"),
        (["algorithm=no_such"], "no_such"),
    ],
)
def test_a_role_with_a_wrong_command_line_ends_with_a_message_not_a_traceback(arguments: list[str], fix: str) -> None:
    result = run(*arguments)
    assert result.returncode != 0
    assert fix in result.stderr
    assert "Traceback" not in result.stderr


def test_help_and_cfg_show_the_configuration_without_starting_anything() -> None:
    shown = run("--help")
    assert shown.returncode == 0
    assert "docs/configuration.md" in shown.stdout
    composed = run("--cfg", "job", "learner.steps=7")
    assert composed.returncode == 0
    assert "steps: 7" in composed.stdout


@pytest.mark.parametrize(
    "changes",
    [
        {"weights.staging": "cuda:2"},
        {"weights.staging": "cuda:0", "weights.transports": ["ipc", "disk"]},
        {"weights.staging": "cpu"},
    ],
)
def test_staging_that_suits_the_transports_is_taken(config: TrainConfig, changes: dict[str, object]) -> None:
    for key, new in {**GPU_SERVERS, **changes}.items():
        put(config, key, new)
    check(config)
