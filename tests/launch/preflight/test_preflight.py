"""Before anything starts: a chat template that does not take the tools or the data."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from asyncrl.config.schema import (
    ActorConfig,
    DataConfig,
    EngineConfig,
    ModelConfig,
    NetworkConfig,
    PartConfig,
    RunConfig,
    ServerConfig,
    TrainConfig,
)
from asyncrl.data.rendered import read_rendered
from asyncrl.errors import ConfigError, DataError, UnavailableError
from asyncrl.launch.preflight.machine import check_devices, check_disk, check_ports
from asyncrl.launch.preflight.preflight import preflight
from asyncrl.tools import Tool, ToolRefusal
from tests.engine.sglang.pythons import python_with
from tests.engine.support import tiny_model
from tests.launch.preflight.in_process import InThisProcess
from tests.scoring.shared_verifiers import shared_verifiers
from tests.templates.families import tokenizer
from tests.vision import save_vision_model


@pytest.fixture(autouse=True, scope="module")
def _verifiers() -> Iterator[None]:
    """The starts of this file share the processes of equal rules, which none of them harms."""
    with shared_verifiers():
        yield


def config_of(folder: Path, family: str, roles: list[str], tools: list[str], truth: str = "1") -> TrainConfig:
    tokenizer(family).save_pretrained(folder / "model")
    tiny_model().save_pretrained(folder / "model")
    prompt = [{"role": role, "content": role} for role in roles]
    kwargs = {"weather": {"city": "Ulm"}}
    row = {
        "prompt": prompt,
        "data_source": "s",
        "reward_model": {"ground_truth": truth},
        "extra_info": {"tools_kwargs": kwargs},
    }
    pq.write_table(pa.Table.from_pylist([row]), folder / "tasks.parquet")
    return TrainConfig(
        model=ModelConfig(path=str(folder / "model")),
        data=DataConfig(train=[str(folder / "tasks.parquet")]),
        actor=ActorConfig(tools=tools, max_tokens=512),
        engine=EngineConfig(max_length=512),
        network=NetworkConfig(replay_port=0, weights_port=0),
    )


def start(config: TrainConfig) -> None:
    """Run all checks, the user's code in this process."""
    preflight(config, open_pool=InThisProcess)


def refusals(config: TrainConfig) -> list[str]:
    with pytest.raises((ConfigError, DataError)) as refused:
        start(config)
    return str(refused.value).splitlines()


@pytest.mark.parametrize(
    ("roles", "tools", "message"),
    [
        (["system", "user"], [], r"tasks\.parquet: row 0 has messages of the roles system, user"),
        (["user"], ["calculator"], r"actor\.tools: calculator cannot be used with model\.path"),
    ],
)
def test_what_a_template_does_not_show_does_not_start(tmp_path: Path, roles: list[str], tools: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        preflight(config_of(tmp_path, "gemma2", roles, tools))


def test_a_prompt_that_ends_with_the_assistant_does_not_start(tmp_path: Path):
    [refused] = refusals(config_of(tmp_path, "phi4", ["user", "assistant"], []))
    assert "tasks.parquet: row 0 has a prompt that ends with a message of the assistant" in refused


@pytest.mark.parametrize("family", ["llama3_1", "hermes3", "deepseek_v3"])
def test_several_tools_start_under_templates_that_show_one_call_or_have_one_for_tools(tmp_path: Path, family: str):
    config = config_of(tmp_path, family, ["system", "user"], ["calculator", "python"])
    tiny_model(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    config.actor.max_tokens = config.engine.max_length = 1024
    preflight(config)


def test_a_model_without_a_tokenizer_is_named(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    (tmp_path / "model" / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.path=.*model: its tokenizer cannot be loaded"):
        preflight(config)


def test_prompts_that_fill_the_whole_context_do_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.actor.max_tokens = config.engine.max_length = 4
    [refused] = refusals(config)
    assert refused.startswith("actor.max_tokens=4 leaves no room for an answer in 1 of 1 prompts")


def test_a_start_warns_of_shared_held_out_tasks_and_of_large_learning_rates_and_an_evaluation_does_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    (tmp_path / "other.parquet").write_bytes((tmp_path / "tasks.parquet").read_bytes())
    config.data.eval = [str(tmp_path / "other.parquet")]
    start(config)
    assert "data.eval: 1 of 1 held-out tasks have the prompt of a training task" in caplog.text
    config.learner.lr = 3.0
    caplog.clear()
    start(config)
    assert "learner.lr=3 is so large" in caplog.text
    config.learner.steps = 0
    caplog.clear()
    start(config)
    assert "held-out" not in caplog.text
    assert "learner.lr" not in caplog.text, "an evaluation trains nothing"


def test_a_source_that_is_a_run_and_not_its_replay_folder_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    (tmp_path / "run" / "replay").mkdir(parents=True)
    config.replay.source = str(tmp_path / "run")
    (refused,) = refusals(config)
    assert re.match(r"replay\.source=.*/run: .*name the replay folder of a run, such as runs/NAME/replay", refused)


def test_models_that_are_missing_or_too_short_are_named_with_their_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.engine.max_length = config.actor.max_tokens = 513
    assert refusals(config) == [
        f"actor.max_tokens=513 and engine.max_length=513: the model {tmp_path}/model has 512 positions; set at most 512"
    ]
    (tmp_path / "empty").mkdir()
    config.model.path, config.critic.path, config.scoring.prm.path = f"{tmp_path}/none", f"{tmp_path}/empty", "./none"
    config.scoring.shaping.process_weight = 1.0
    assert refusals(config) == [
        f"model.path={tmp_path}/none: there is no such folder",
        f"critic.path={tmp_path}/empty: the folder has no config.json: name the folder of a model",
        "scoring.prm.path=./none: there is no such folder; a relative path starts at the working directory, "
        f"{tmp_path}",
    ]
    config.model.path, config.critic.path, config.scoring.prm.path = "my model", None, None
    assert refusals(config) == [
        "model.path=my model: there is no such folder, and no model of the Hugging Face hub can have this name"
    ]


@pytest.mark.slow
def test_a_model_without_what_an_option_freezes_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.model.freeze = ["embeddings", "moe_router"]
    [reason] = refusals(config)
    assert reason.startswith("model.freeze=moe_router: this rule freezes nothing in a ")
    config.model.freeze, config.critic.freeze = ["embeddings"], ["*"]
    preflight(config)


@pytest.mark.slow
def test_a_model_without_the_layers_that_adapters_want_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.model.lora.rank, config.model.lora.targets = 4, ["no_proj"]
    [reason] = refusals(config)
    assert reason.startswith("model.lora.targets=no_proj: the model has no module of this name")
    config.model.lora.targets, config.critic.lora.rank = ["all-linear"], 2
    preflight(config)


@pytest.mark.parametrize(
    ("section", "option", "value", "reason"),
    [
        ("learner", "tensor_ranks", 8, "learner.tensor_ranks=8: a Qwen3ForCausalLM has 4 heads, which 8 ranks cannot"),
        ("learner", "expert_ranks", 2, "learner.expert_ranks=2: a Qwen3ForCausalLM has no stacked experts"),
        ("learner", "router_replay", True, "the experts of a qwen3 model cannot be replayed"),
        ("algorithm", "balance_weight", 0.01, "algorithm.balance_weight=0.01: experts of a qwen3 model cannot be"),
        ("algorithm", "balance_weight", None, "algorithm.balance_weight=null: the model's configuration has no"),
        ("algorithm", "balance_bias_rate", 0.01, "algorithm.balance_bias_rate=0.01: routers of a qwen3 model have no"),
    ],
)
def test_a_dense_model_does_not_start_with_options_of_mixtures_or_more_ranks_than_it_has_heads(
    tmp_path: Path, section: str, option: str, value: Any, reason: str
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    setattr(getattr(config, section), option, value)
    [found] = refusals(config)
    assert found.startswith(reason)


def test_a_family_whose_layers_no_plan_divides_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    gpt2 = AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=4, vocab_size=300, n_positions=512)
    AutoModelForCausalLM.from_config(gpt2).save_pretrained(tmp_path / "model")
    config.learner.tensor_ranks = 2
    assert "learner.tensor_ranks=2: a GPT2LMHeadModel has no plan in transformers" in "".join(refusals(config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "option", "value", "reason"),
    [
        ("learner", "tensor_ranks", 2, "reads images, whose tokens ranks cannot divide"),
        ("learner", "context_ranks", 2, "reads images, whose tokens ranks cannot divide"),
        ("algorithm", "advantage", PartConfig("gae"), "a critic of its own would see none"),
    ],
)
def test_a_model_that_reads_images_does_not_start_with_what_does_not_go_with_them(
    tmp_path: Path, section: str, option: str, value: Any, reason: str
):
    config = config_of(tmp_path, "phi4", ["user"], [])
    save_vision_model(tmp_path / "model")
    config.engine.kind, config.engine.urls = "sglang", ["http://127.0.0.1:1"]
    setattr(getattr(config, section), option, value)
    assert any(reason in line for line in refusals(config))


def test_rows_with_images_do_not_start_where_nothing_reads_them(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    shown = [{"type": "image", "image": b"x", "text": None}, {"type": "text", "image": None, "text": "What?"}]
    row = {"prompt": [{"role": "user", "content": shown}], "data_source": "s", "reward_model": {"ground_truth": "1"}}
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "tasks.parquet")
    assert any("row 0: a message shows an image: this needs a model that reads" in each for each in refusals(config))


def test_rows_with_images_do_not_start_with_agent_loops_of_verl(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    row = {"prompt": [{"role": "user", "content": "<image>What?"}], "images": ["a.png"], "data_source": "s"}
    rows = [{**row, "reward_model": {"ground_truth": "1"}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "tasks.parquet")
    config.actor.agent = "verl"
    assert any("row 0 has an image, and agent loops of verl show only text here" in each for each in refusals(config))


def test_demonstrations_are_rendered_by_the_start_which_names_a_bad_row(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.run.dir, config.algorithm.sft.path = str(tmp_path / "runs"), [str(tmp_path / "shown.jsonl")]
    assert refusals(config) == [f"algorithm.sft.path={tmp_path}/shown.jsonl: there is no such file; see docs/data.md"]
    (tmp_path / "shown.jsonl").write_text(
        '{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": "<|im_end|>b"}'
    )
    [reason] = refusals(config)
    assert "shown.jsonl: line 2, column response: message 1 contains '<|im_end|>'" in reason
    (tmp_path / "shown.jsonl").write_text('{"prompt": "a", "response": "b"}')
    preflight(config)
    [folder] = (tmp_path / "runs").glob("*/demonstrations/*")
    assert len(read_rendered(folder)) == 1


def test_a_ground_truth_that_a_built_in_rule_cannot_use_is_refused(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [], truth="seven")
    with pytest.raises(DataError, match=r"tasks\.parquet: row 0 has a ground truth that the rule exact_number cannot"):
        preflight(config)
    config.scoring.rule = "exact_match"
    preflight(config)


@pytest.mark.slow
def test_a_reward_function_of_trl_whose_column_is_missing_is_refused(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.scoring.rule = ["exact_match", "tests.scoring.rules.test_trl.correct"]
    [reason] = refusals(config)
    assert "tasks.parquet: row 0: tests.scoring.rules.test_trl.correct takes answer; the file has" in reason
    assert 'add data.columns="{answer: reward_model.ground_truth}", or give the parameter a default' in reason
    config.data.columns = {"answer": "reward_model.ground_truth"}
    start(config)
    config.data.columns = {}
    config.scoring.rule = ["exact_match", "tests.scoring.rules.test_trl.length"]
    start(config)


def test_an_option_may_not_ask_for_more_than_the_machine_has():
    config = TrainConfig(model=ModelConfig(attention="flex_attention"))
    config.engine = EngineConfig("sglang", launch=True, python="no-such", server=ServerConfig(count=2, tp_size=2))
    config.scoring.prm.path, config.scoring.prm.device, config.cluster.learner_ranks = "p", "cuda:2", 4
    config.learner.interface = "no-such0"
    with pytest.raises(ConfigError) as refused:
        check_devices(config, gpus=2)
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [
        *("learner.interface=no-such0", "cluster.learner_ranks", "engine.server.count", "scoring.prm.device"),
        "engine.python=no-such",
    ]
    config.cluster.gpus, config.learner.interface = 8, None
    with pytest.raises(ConfigError, match=r"device=cuda:2: .* use auto or cpu(.|\n)*0 GPUs; use auto\ncluster.gpus=8:"):
        check_devices(config, gpus=0)


def config_with_servers(python: str, *arguments: str) -> TrainConfig:
    return TrainConfig(engine=EngineConfig("sglang", python=python, server=ServerConfig(arguments=list(arguments))))


def test_a_python_without_sglang_is_refused_and_called_the_default_where_none_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    mend = "name a Python that has SGLang (docs/gpu.md), and try it with `asyncrl doctor --python PATH`"
    with pytest.raises(ConfigError) as refused:
        check_devices(config_with_servers(python_with(tmp_path, "python3")), gpus=1)
    assert str(refused.value) == f"engine.python={tmp_path}/python3: it has no package sglang; {mend}"
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError) as refused:
        check_devices(config_with_servers(EngineConfig().python), gpus=1)
    assert str(refused.value) == (f"engine.python=python3 (the default): it has no package sglang; {mend}")


def test_servers_without_a_gpu_are_refused_unless_their_arguments_name_another_device(tmp_path: Path):
    python = python_with(tmp_path, "python3", "sglang/launch_server.py")
    config = config_with_servers(python)
    reason = r"^engine\.kind=sglang: servers need a GPU, and {}; engine\.server\.arguments=\[--device,cpu\] runs .*$"
    with pytest.raises(ConfigError, match=reason.format("this machine has 0 GPUs")):
        check_devices(config, gpus=0)
    config.cluster.gpus = 0
    with pytest.raises(ConfigError, match=reason.format(r"cluster\.gpus=0")):
        check_devices(config, gpus=2)
    for device in ("cpu", "xpu"):
        check_devices(config_with_servers(python, "--device", device), gpus=0)


def test_servers_that_others_start_need_neither_a_gpu_nor_a_python_here():
    config = config_with_servers("no-such")
    config.engine.urls = ["http://a:1"]
    check_devices(config, gpus=0)


@pytest.mark.parametrize(("gpus", "problem"), [(0, "0 GPUs; use at most 1"), (2, "accelerate is not installed")])
def test_a_model_is_spread_only_over_gpus_that_are_there_and_with_accelerate(
    gpus: int, problem: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("asyncrl.launch.preflight.machine.find_spec", lambda name: None)
    config = TrainConfig(model=ModelConfig())
    config.scoring.prm.path, config.scoring.prm.device, config.scoring.prm.gpus = "p", "auto", 2
    with pytest.raises(ConfigError, match=rf"scoring\.prm\.gpus=2: .*{problem}"):
        check_devices(config, gpus)


def test_a_disk_without_room_for_one_checkpoint_is_refused_and_one_that_may_fill_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = TrainConfig(RunConfig(dir=str(tmp_path)))
    check_disk(config.run, config.learner, config.replay, parameters=10**9, free=100 * 10**9)
    assert not caplog.messages
    check_disk(config.run, config.learner, config.replay, parameters=10**9, free=20 * 10**9)
    assert "may fill its disk: 20.0 GB are free, 3 checkpoints and the model take about 40.0 GB" in caplog.text
    with pytest.raises(ConfigError, match=r"8\.0 GB are free there, and one checkpoint takes 12\.0 GB"):
        check_disk(config.run, config.learner, config.replay, parameters=10**9, free=8 * 10**9)


@pytest.mark.parametrize(
    ("free", "warning"),
    [
        (62 * 10**9, ""),
        (9 * 10**9, "9.0 GB are free, 3 checkpoints and the model take about 40.0 MB, and the stored episodes"),
        (30 * 10**6, "30.0 MB are free, 3 checkpoints and the model take about 40.0 MB"),
    ],
)
def test_a_small_run_is_warned_of_its_disk_only_if_little_room_is_left(
    free: int, warning: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = TrainConfig(RunConfig(dir=str(tmp_path)))
    config.replay.retention = "all"
    check_disk(config.run, config.learner, config.replay, parameters=10**6, free=free)
    assert warning in caplog.text
    assert bool(caplog.messages) is bool(warning)


def test_every_taken_port_is_named():
    config = TrainConfig()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config.network.replay_port = config.network.weights_port = taken.getsockname()[1]
        with pytest.raises(UnavailableError) as refused:
            check_ports(config.network, config.learner, shards=1)
    lines = str(refused.value).splitlines()
    assert [line.split("=")[0] for line in lines] == ["network.replay_port", "network.weights_port"]
    assert all("set network.replay_port=0 network.weights_port=0 (both)" in line for line in lines)
    assert all(f"in use); process {os.getpid()} listens there: " in line for line in lines)


def test_all_that_cannot_be_used_is_named_at_once(tmp_path: Path):
    config = config_of(tmp_path, "gemma2", ["user"], ["abacus"])
    config.scoring.rule, config.algorithm.loss.name = "guess", "pppo"
    config.algorithm.advantage.params = {"lamb": 3}
    config.data.train, config.data.eval = ["missing.parquet"], [str(tmp_path / "model" / "model.safetensors")]
    config.model.path = "./modle"

    def cannot_resume() -> None:
        raise ConfigError("the run began otherwise")

    with pytest.raises(DataError) as refused:
        preflight(config, cannot_resume)
    assert [line.split(":")[0] for line in str(refused.value).splitlines()] == [
        "data.train=missing.parquet",
        "the run began otherwise",
        f"{config.data.eval[0]} cannot be read as Parquet",
        "scoring.rule=guess",
        "algorithm.advantage grpo has no parameter 'lamb'; it takes normalise_std",
        *("algorithm.loss=pppo", "actor.tools", "model.path=./modle"),
    ]


def test_a_start_that_is_refused_does_not_go_through_all_rows_before(tmp_path: Path):
    config = config_of(tmp_path, "phi4", ["user"], [])
    config.run.dir, config.algorithm.sft.path = str(tmp_path / "runs"), [str(tmp_path / "shown.jsonl")]
    (tmp_path / "shown.jsonl").write_text('{"prompt": "a", "response": "b"}')
    config.data.max_prompt_length, config.data.filter_overlong, config.data.keep_in_memory = 100, True, False

    def cannot_resume() -> None:
        raise ConfigError("the run began otherwise")

    with pytest.raises(ConfigError, match="the run began otherwise"):
        preflight(config, cannot_resume)
    assert not [*(tmp_path / "runs").rglob("*")]
    preflight(config)
    made = {path.name for path in (tmp_path / "runs" / config.run.name).iterdir()}
    assert made == {"tasks", "demonstrations", "prompt_lengths"}


def test_a_mistake_in_an_own_part_does_not_start(tmp_path: Path):
    config = config_of(tmp_path, "gemma2", ["user"], [])
    config.algorithm.advantage.name = "tests.algorithms.bad_parts.Scalar"
    (line,) = refusals(config)
    assert line.startswith("algorithm.advantage=tests.algorithms.bad_parts.Scalar does not work")


class Weather(Tool):
    """A tool whose `create` gets the city from the data. `released` counts the ends of its episodes."""

    schema: ClassVar[Mapping[str, Any]] = {
        "name": "weather",
        "description": "it",
        "parameters": {"type": "object", "properties": {}},
    }
    released = 0

    async def create(self, city: str) -> None:
        self.city = city

    async def execute(self, arguments: Mapping[str, Any]) -> str:
        return f"rain in {self.city}"

    async def release(self) -> None:
        Weather.released += 1


class Forecast(Weather):
    schema: ClassVar[Mapping[str, Any]] = {**Weather.schema, "name": "forecast"}


class Closed(Weather):
    def __init__(self, episode_id: str) -> None:
        raise ValueError("no database")


class Refusing(Weather):
    async def create(self, city: str = "") -> None:
        raise ToolRefusal("no account")


@pytest.mark.parametrize(("tool", "reason"), [(Closed, "no database"), (Refusing, "no account")])
def test_a_tool_whose_constructor_fails_or_whose_create_refuses_is_a_problem_of_its_own(
    tmp_path: Path, tool: type[Tool], reason: str
):
    with pytest.raises(ConfigError, match=rf"actor\.tools: with .*: row 0, .*{reason}"):
        start(config_of(tmp_path, "hermes3", ["user"], [f"{__name__}.{tool.__name__}"]))


@pytest.mark.slow
def test_tools_are_created_for_a_row_of_the_data_before_the_start_and_released(tmp_path: Path):
    Weather.released = 0
    start(config_of(tmp_path, "hermes3", ["user"], [f"{__name__}.Weather"]))
    assert Weather.released == 2  # An episode is played, too.
    names = r"'city'.*the tool's `schema` \(on offer: weather, forecast; the row has: weather;"
    with pytest.raises(ConfigError, match=rf"with .*tasks\.parquet: row 0, tool forecast: `create` failed .*{names}"):
        start(config_of(tmp_path, "hermes3", ["user"], [f"{__name__}.Weather", f"{__name__}.Forecast"]))
    assert Weather.released == 4


@pytest.mark.slow
def test_a_row_with_arguments_for_a_tool_that_is_not_on_offer_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    config = config_of(tmp_path, "hermes3", ["user"], [])
    start(config)
    assert "actor.tools offers no tools, but" in caplog.text
    assert "tasks.parquet: row 0 has tools_kwargs for weather: calls of a tool that is not on offer fail" in caplog.text
    caplog.clear()
    config.actor.tools = [f"{__name__}.Weather"]
    start(config)
    assert "tools_kwargs" not in caplog.text


def config_with_users(folder: Path, users: Mapping[str, str], *named: Mapping[str, Any]) -> TrainConfig:
    """Tasks of which each has one of the `interaction_kwargs`; empty ones name no user."""
    config = config_of(folder, "hermes3", ["user"], [])
    rows = [
        {
            "prompt": [{"role": "user", "content": "1+1"}],
            "data_source": "s",
            "reward_model": {"ground_truth": "2"},
            "extra_info": {"index": index, "interaction_kwargs": dict(kwargs) or None},
        }
        for index, kwargs in enumerate(named)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "tasks.parquet")
    return replace(config, actor=replace(config.actor, interactions=dict(users)))


@pytest.mark.slow
def test_each_user_starts_with_the_first_row_that_names_it_before_the_run_does(tmp_path: Path):
    users = {"checker": "asyncrl.commands.demo.AnswerChecker"}
    right = {"name": "checker", "ground_truth": "2"}
    start(config_with_users(tmp_path, users, {}, right, right))
    for name, kwargs, reason in (
        ("other", {"name": "other"}, r"row 1, task s/tasks/1 has .*name='other'; actor\.interactions has checker"),
        (
            "wordy",
            {"name": "checker", "ground_truth": "two"},
            r"row 1, start_interaction of .* failed: Scoring",
        ),
    ):
        (tmp_path / name).mkdir()
        with pytest.raises(ConfigError, match=rf"actor\.interactions: with .*tasks\.parquet: {reason}"):
            start(config_with_users(tmp_path / name, users, {}, kwargs))


@pytest.mark.slow
def test_users_whom_no_task_names_do_not_start_except_in_an_evaluation(tmp_path: Path):
    config = config_with_users(tmp_path, {"checker": "asyncrl.commands.demo.AnswerChecker"}, {})
    with pytest.raises(ConfigError, match=r"actor\.interactions: no task names one of the users"):
        start(config)
    start(replace(config, learner=replace(config.learner, steps=0)))


def test_a_class_of_users_that_is_none_does_not_start(tmp_path: Path):
    config = config_with_users(tmp_path, {"checker": "nowhere.Class"}, {"name": "checker"})
    with pytest.raises(ConfigError, match=r"actor\.interactions: checker: class_name=nowhere\.Class cannot be"):
        start(config)


def config_with_environments(folder: Path, rows: list[Mapping[str, Any]], **actor: Any) -> TrainConfig:
    config = config_of(folder, "hermes3", ["user"], [])
    row = {"prompt": [{"role": "user", "content": "1+1"}], "data_source": "s", "reward_model": {"ground_truth": "2"}}
    pq.write_table(pa.Table.from_pylist([{**row, **each} for each in rows]), folder / "tasks.parquet")
    return replace(config, actor=replace(config.actor, **actor))


class Flight:
    def reset(self, city: str) -> None:
        self.city = city

    def fly(self, to: str) -> str:
        """Flies.

        Args:
            to: where to
        """
        return to


@pytest.mark.slow
def test_each_environment_is_reset_with_the_first_row_that_names_it_before_the_run_starts(tmp_path: Path):
    games, named = "tests.tools.environments.games", f"{Flight.__module__}.Flight"
    several = {"flight": named, "quiet": f"{games}.Quiet"}
    rows: list[Mapping[str, Any]] = [
        {"environment": "quiet", "extra_info": {"city": None}},
        {"environment": "flight", "extra_info": {"city": "Ulm"}},
    ]
    start(config_with_environments(tmp_path, rows, environments=several))
    start(config_with_environments(tmp_path, rows[1:], environment=named))
    for wrong, reason in (
        (
            [{"environment": "flight"}],
            r"row 0, reset of environment flight takes city \(.*, which task s/tasks/0 lacks; its row has data_source",
        ),
        (
            [rows[0], {"environment": "train"}],
            r"row 1, task s/tasks/1 has environment='train'; actor\.environments has",
        ),
        ([rows[0], {"environment": None}], r"row 1, task s/tasks/1 has environment=None"),
    ):
        with pytest.raises(ConfigError, match=reason):
            start(config_with_environments(tmp_path, wrong, environments=several))
