"""Configurations like those of verl's examples become ours, and what has no counterpart is named."""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import main, translated
from asyncrl.compat.verl.configuration.script import script_words
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.table import BY_KEY, TABLE
from asyncrl.compat.verl.configuration.translation import translate
from asyncrl.config.compose import read
from asyncrl.config.keys import OPTIONS, option_of
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.tools.interactions.registry import load_interactions

HERE = Path(__file__).parent


def loaded(name: str, tmp_path: Path, words: Sequence[str] = ()) -> tuple[TrainConfig, list[str]]:
    """The translation of an example as asyncrl's own configuration, and its report."""
    file = tmp_path / "mine.yaml"
    text, report = translated(HERE / name, list(words), file)
    assert takes(report)
    file.write_text(text)
    return read([f"experiment={file}"], names_missing_data=False), report


def takes(report: Sequence[str]) -> bool:
    """True if the translation has nothing that asyncrl refuses: `translated` reads it to find that out."""
    return not has(report, "Fix before you start a run")


def from_words(*words: str) -> Translated:
    return translate(read_verl(None, words, {}))


def has(report: Sequence[str], *parts: str) -> bool:
    """Return whether one line of the report has all of these parts."""
    return any(all(part in line for part in parts) for line in report)


@pytest.mark.slow
def test_ppo_with_a_critic_on_gsm8k(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data")
    config, report = loaded("gae_gsm8k.sh", tmp_path)
    assert config.data.train == ["/data/gsm8k/train.parquet"]
    assert (config.learner.batch_size, config.learner.group_size, config.learner.minibatches) == (256, 1, 4)
    assert (config.actor.max_tokens, config.actor.max_turn_tokens, config.actor.max_turns) == (768, 256, 1)
    assert (config.data.max_prompt_length, config.data.truncation, config.data.filter_overlong) == (512, "error", True)
    assert config.algorithm.advantage.params == {"gamma": 1.0, "lam": 0.95, "whiten": True}
    assert config.algorithm.kl.name == "k1"
    assert config.algorithm.kl.params == {"weight": 0.001, "place": "reward"}
    assert config.algorithm.value.params == {"clip": 0.5}
    assert (config.critic.path, config.critic.lr) == ("Qwen/Qwen2.5-0.5B-Instruct", 1e-5)
    assert (config.learner.steps, config.learner.eval_every, config.learner.checkpoint_every) == (435, 10, 10)
    assert (config.learner.micro_tokens, config.learner.optimizer_on_host) == (4 * 768, True)
    assert (config.run.name, config.observe.sinks, config.observe.project) == (
        "qwen-0.5b",
        ["console", "wandb"],
        "ppo_gsm8k",
    )
    assert config.critic.warmup_steps == 10
    assert has(report, "critic.ppo_micro_batch_size_per_gpu=4")
    assert has(report, "gpu_memory_utilization=0.4")


@pytest.mark.slow
def test_grpo_on_gsm8k(tmp_path: Path) -> None:
    config, report = loaded("grpo_gsm8k.sh", tmp_path)
    assert config.data.train == [f"{os.environ['HOME']}/data/gsm8k/train.parquet"]
    assert (config.learner.batch_size, config.learner.group_size, config.learner.minibatches) == (5120, 5, 4)
    assert config.algorithm.advantage.name == "grpo"
    assert config.algorithm.kl.name == "k3"
    assert config.algorithm.kl.params == {"weight": 0.001, "place": "loss"}
    assert config.algorithm.loss.params == {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0}
    assert (config.engine.kind, config.engine.server.tp_size, config.cluster.gpus) == ("sglang", 2, 8)
    assert (config.learner.reference_on_host, config.learner.weight_decay) == (True, 0.01)
    assert config.scoring.rules == {"openai/gsm8k": "gsm8k"}
    assert config.observe.sinks == ["console", "tensorboard"]
    assert has(report, "trainer.logger: swanlab")


@pytest.mark.slow
def test_dapo_with_its_buffer(tmp_path: Path) -> None:
    config, report = loaded("dapo.sh", tmp_path)
    assert (config.actor.max_turn_tokens, config.actor.max_tokens) == (20480, 22528)
    assert (config.learner.batch_size, config.learner.group_size, config.learner.minibatches) == (8192, 16, 16)
    assert config.algorithm.loss.params == {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}
    [overlong] = config.algorithm.reward
    assert overlong.params == {"max_length": 20480, "buffer": 4096, "weight": 1.0}
    assert (config.replay.filter.zero_variance, config.replay.filter.score) == (True, "outcome")
    assert config.replay.oversample == 3.0
    assert (config.learner.warmup_steps, config.learner.micro_tokens) == (10, 22528)
    assert has(report, "trainer.nnodes=16")
    assert config.learner.context_ranks == 8
    assert has(report, "val_kwargs.top_p=0.7")
    assert config.model.override_config["attention_dropout"] == 0.0


@pytest.mark.parametrize(
    ("words", "weights"),
    [
        (["algorithm.gdpo_reward_keys=[score,format]"], {"rule/compute_score": 1.0, "rule/compute_score/format": 1.0}),
        (
            [
                "algorithm.gdpo_reward_keys=[acc,format]",
                "algorithm.gdpo_reward_weights=[1.0,0.5]",
                "reward.custom_reward_function.path=mine.py",
                "reward.custom_reward_function.name=mine",
            ],
            {"rule/mine/acc": 1.0, "rule/mine/format": 0.5},
        ),
        (
            ["algorithm.gdpo_reward_keys=[acc]", "reward.reward_manager.name=batch"],
            {"manager/acc": 1.0},
        ),
        ([], {"outcome": 1.0}),
    ],
)
def test_the_named_rewards_of_gdpo_have_their_names_here(words: list[str], weights: dict[str, float]) -> None:
    found = from_words("algorithm.adv_estimator=gdpo", *words)
    assert found.settings["algorithm.advantage"] == {"name": "gdpo", "params": {"weights": weights}}
    assert has(found.differs, "algorithm.gdpo_reward_keys=None") == (not words)


OWN_FUNCTION = ["reward.custom_reward_function.path=mine.py", "reward.custom_reward_function.name=mine"]


@pytest.mark.parametrize(
    ("words", "metric", "score"),
    [
        (OWN_FUNCTION, "acc", "outcome"),
        (OWN_FUNCTION, "score", "rule/mine"),
        (OWN_FUNCTION, "style", "rule/mine/style"),
        ([*OWN_FUNCTION, "reward.reward_manager.name=batch"], "score", "manager"),
        ([*OWN_FUNCTION, "reward.reward_manager.name=gdpo"], "style", "manager/style"),
        ([], "score", "outcome"),
        ([], "style", "outcome"),
        (OWN_FUNCTION, "reward", None),
        (OWN_FUNCTION, "null", None),
    ],
)
def test_groups_are_compared_by_the_score_that_the_metric_names(words: list[str], metric: str, score: str) -> None:
    filters = "algorithm.filter_groups"
    found = from_words(*words, f"{filters}.enable=true", f"{filters}.metric={metric}")
    assert found.settings.get("replay.filter.score") == score
    assert found.settings["replay.filter.zero_variance"] is True
    assert has(found.differs, f"{filters}.metric={metric}", "do not give this number") == (
        metric == "style" and not words
    )


@pytest.mark.slow
def test_a_number_of_the_users_function_is_taken_as_the_score_of_the_filter(tmp_path: Path) -> None:
    config, _ = loaded("dapo.sh", tmp_path, [*OWN_FUNCTION, "algorithm.filter_groups.metric=style"])
    assert config.replay.filter.score == "rule/mine/style"


@pytest.mark.slow
def test_a_kl_in_the_reward_does_not_count_in_the_filter_and_the_report_says_so(tmp_path: Path) -> None:
    changes = ["algorithm.filter_groups.metric=seq_final_reward", "algorithm.use_kl_in_reward=True"]
    _, report = loaded("dapo.sh", tmp_path, changes)
    assert has(report, "seq_final_reward: the KL in the reward does not count")


@pytest.mark.slow
@pytest.mark.parametrize("metric", ["seq_reward", "seq_final_reward"])
def test_the_buffer_counts_for_the_filter_too_where_the_metric_is_the_reward(tmp_path: Path, metric: str) -> None:
    config, _ = loaded("dapo.sh", tmp_path, [f"algorithm.filter_groups.metric={metric}"])
    assert (config.replay.filter.zero_variance, config.replay.filter.score) == (True, "reward")
    shaping = config.scoring.shaping
    assert (shaping.overlong_penalty, shaping.overlong_max_length, shaping.overlong_buffer) == (1.0, 20480, 4096)
    assert config.algorithm.reward == []


@pytest.mark.slow
def test_several_turns_with_tools_on_sglang(tmp_path: Path) -> None:
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={HERE / 'tools.yaml'}"
    config, report = loaded("multi_turn.yaml", tmp_path, [tools])
    assert (config.actor.max_turns, config.actor.max_tool_chars) == (5, 256)
    assert (config.actor.tools, config.actor.tool_call_format) == (["python"], "hermes")
    assert (config.run.name, config.learner.group_size, config.observe.sinks) == ("qwen3b-16", 16, ["console"])
    gsm8k = {"class_name": "asyncrl.compat.verl.tools.gsm8k.Gsm8kTool", "config": {"type": "native"}}
    assert config.actor.verl_tools == [gsm8k]
    assert has(report, "verl.tools.sandbox_fusion_tools.SandboxFusionTool becomes python")
    assert not has(report, "actor.tools is empty")
    (tmp_path / "tools.yaml").write_text("tools: []")
    config, report = loaded("multi_turn.yaml", tmp_path, [tools.replace(str(HERE), str(tmp_path))])
    assert (config.actor.tools, config.actor.verl_tools) == ([], [])
    assert has(report, "actor.tools is empty", "every call of a tool fails")


@pytest.mark.slow
def test_each_tool_of_verl_becomes_what_plays_it_here(tmp_path: Path) -> None:
    schema = {"type": "function", "function": {"name": "mine", "description": "d"}}
    mine = {"class_name": "my_tools.Mine", "config": {"type": "native", "n": 2}, "tool_schema": schema}
    gone = {"class_name": "verl.tools.geo3k_tool.Geo3kTool", "config": {"type": "native"}}
    retrieval = {"retrieval_service_url": "http://127.0.0.1:8000/retrieve", "topk": 5}
    found = {"class_name": "verl.tools.search_tool.SearchTool", "config": {"type": "native", **retrieval}}
    servers = {"My Server": {"url": "https://mcp.example.com", "auth_token": "abc"}}
    (tmp_path / "servers.json").write_text(json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": str(tmp_path / "servers.json"), "tool_selected_list": ["look"]}
    served = {
        "class_name": "verl.tools.mcp_base_tool.MCPBaseTool",
        "config": {"type": "mcp", "timeout": 30},
        "mcp": mcp,
    }
    (tmp_path / "tools.yaml").write_text(json.dumps({"tools": [mine, gone, found, served]}))
    turns = "actor_rollout_ref.rollout.multi_turn"
    words = [f"{turns}.tool_config_path={tmp_path / 'tools.yaml'}", f"{turns}.function_tool_path=my_functions.py"]
    config, report = loaded("multi_turn.yaml", tmp_path, words)
    assert config.actor.verl_tools == [mine, gone, {"function_tool_path": "my_functions.py"}]
    assert config.actor.tools == ["search"]
    assert (config.actor.search.url, config.actor.search.topk) == ("http://127.0.0.1:8000/retrieve", 5)
    header = {"Authorization": "Bearer $MY_SERVER_TOKEN"}
    server = {"url": "https://mcp.example.com", "headers": header, "timeout_s": 30, "tools": ["look"]}
    assert config.actor.mcp_servers == {"My Server": server}
    assert has(report, "verl.tools.geo3k_tool.Geo3kTool is used unchanged, but asyncrl does not provide it")
    assert has(report, "set the environment variable MY_SERVER_TOKEN to the auth_token of My Server")


@pytest.mark.slow
def test_a_reference_in_a_file_of_tools_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "tools.yaml").write_text('tools: [{class_name: my_tools.Mine, config: {key: "${oc.env:HOME}"}}]')
    tools = f"actor_rollout_ref.rollout.multi_turn.tool_config_path={tmp_path / 'tools.yaml'}"
    config, report = loaded("multi_turn.yaml", tmp_path, [tools])
    assert config.actor.verl_tools == []
    assert has(report, "tools.yaml: it cannot be read (ValueError)")


@pytest.mark.slow
def test_interactions_become_simulated_users(tmp_path: Path) -> None:
    turns = "actor_rollout_ref.rollout.multi_turn"
    users = f"{turns}.interaction_config_path={HERE / 'interactions.yaml'}"
    config, report = loaded("multi_turn.yaml", tmp_path, [users, f"{turns}.max_user_turns=3"])
    quiz = {"class_name": "tests.data.verl.quiz_interaction.QuizInteraction", "max_hints": 2}
    assert config.actor.interactions == {
        "gsm8k": {"class_name": "asyncrl.commands.demo.AnswerChecker", "config": {"strict": True}},
        "quiz": {"class_name": "asyncrl.compat.verl.VerlInteraction", "config": quiz},
    }
    assert (config.actor.max_turns, config.actor.max_user_turns) == (5, 3)
    assert has(report, "verl's Gsm8kInteraction is asyncrl.commands.demo.AnswerChecker here")
    assert has(report, "the policy's last turn gets a score here")
    load_interactions({"gsm8k": config.actor.interactions["gsm8k"]})
    _, report = loaded("multi_turn.yaml", tmp_path, [f"{turns}.interaction_config_path=nowhere.yaml"])
    assert has(report, "interaction_config_path=nowhere.yaml: there is no such file")


@pytest.mark.slow
def test_a_process_reward_with_rejections(tmp_path: Path) -> None:
    config, report = loaded("process_reward.yaml", tmp_path)
    prm, shaping = config.scoring.prm, config.scoring.shaping
    assert (prm.family, prm.path, prm.dtype) == ("qwen_prm", "Qwen/Qwen2.5-Math-PRM-7B", "bfloat16")
    assert (prm.device, prm.gpus, prm.micro_inputs, prm.micro_tokens) == ("auto", 1, 4, 4 * 4096)
    assert (prm.tokenizer, shaping.use_raw_logit, config.actor.step_split) == (None, False, "paragraph")
    assert (shaping.outcome_weight, shaping.process_weight, shaping.prm_acc_bonus_weight) == (0.0, 1.0, 0.5)
    assert (shaping.use_logit_tanh, shaping.tanh_tau, shaping.length_bonus_weight) == (True, 3.0, 0.05)
    assert shaping.prm_aggregation == "best_of_n"
    assert [each.name for each in config.algorithm.reward] == ["best_of_n"]
    truncate, by_token, by_sequence = config.algorithm.correction
    assert truncate.params == {"level": "sequence", "cap": 2.0}
    assert by_token.params == pytest.approx({"low": -math.log(2), "high": math.log(2)} | _texts("k1", "token"))
    assert by_sequence.params == {"by": "k3", "over": "sequence_mean", "high": 0.1}
    assert config.algorithm.advantage.params == {"normalise_std": False}
    assert has(report, "trainer.projct_name=typo", "did you mean trainer.project_name?")
    assert has(report, "reward.reward_kwargs.use_shm=true")


@pytest.mark.slow
def test_a_batch_manager_and_a_class_of_the_users_judge_whole_groups() -> None:
    function = "reward.custom_reward_function.path=rewards/mine.py"
    batch = from_words("reward.reward_manager.name=batch", function).settings
    assert batch["scoring.manager.name"] == "batch"
    assert batch["scoring.manager.compute_score"] == "rewards.mine.compute_score"
    assert "scoring.rule" not in batch
    own = ["source=importlib", "name=Mine", "module.path=pkg://my_package.managers"]
    words = [
        *(f"reward.reward_manager.{each}" for each in own),
        "+reward.reward_kwargs.top=2.0",
        "+reward.reward_kwargs.bonus.size=3",
    ]
    result = from_words(*words)
    assert result.settings["scoring.manager.name"] == "my_package.managers.Mine"
    assert result.settings["scoring.manager.params"] == {"top": 2.0, "bonus": {"size": 3}}
    assert has(result.differs, "reward.reward_manager.name=Mine", "put that into scoring.manager.params.config")
    for given in (["reward.reward_manager.name=batch", function], words):
        assert takes(translated(None, given, None)[1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "sigmoid", "raw"),
    [
        (["reward_manager=qwen_prm"], False, True),
        (["reward_manager=qwen_prm", "prm_apply_sigmoid=true"], True, None),
        (["reward_manager=qwen_prm", "use_logit_tanh=true"], False, None),
        (["reward_manager=skywork_prm"], True, None),
        (["reward_manager=skywork_prm", "prm_apply_sigmoid=false"], False, True),
    ],
)
def test_a_logit_stays_bare_where_verl_leaves_it(words: list[str], sigmoid: bool, raw: bool | None) -> None:
    given = [f"reward_model.{word}" for word in [*words, "prm_model_path=a/b"]]
    settings = from_words(*given).settings
    assert settings["scoring.shaping.prm_apply_sigmoid"] is sigmoid
    assert settings.get("scoring.shaping.use_raw_logit") is raw
    assert takes(translated(None, given, None)[1])


def test_tokenizers_of_a_process_model_are_translated_or_named() -> None:
    words = ["reward_manager=qwen_prm", "prm_model_path=a/b", "tokenizer=a/tokens", "input_tokenizer=c/d"]
    words += ["dtype=int8", "strategy=fsdp"]
    result = from_words(*(f"reward_model.{word}" for word in words))
    assert result.settings["scoring.prm.tokenizer"] == "a/tokens"
    assert has(result.differs, "input_tokenizer=c/d", "the tokenizer of model.path")
    assert has(result.differs, "dtype=int8", "bfloat16 is used")
    assert has(result.without, "strategy=fsdp", "scoring.prm.gpus")


def _texts(by: str, over: str) -> dict[str, Any]:
    return {"by": by, "over": over}


BYPASS = ["algorithm.rollout_correction.bypass_mode=true"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["algorithm.adv_estimator=rloo"], "algorithm.advantage", {"name": "rloo"}),
        (["algorithm.adv_estimator=remax"], "algorithm.greedy_sibling", True),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], "algorithm.loss", "gmpo"),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=gspo", "algorithm.rollout_is=token"],
            "algorithm.loss",
            "gspo",
        ),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=sapo"], "algorithm.loss", "sapo"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=kl_cov"], "algorithm.loss", "kl_cov"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"], "algorithm.loss", "dppo_tv"),
        (["algorithm.rollout_correction.bypass_mode=true"], "algorithm.proximal", "behaviour"),
        (["algorithm.rollout_is=token", "algorithm.rollout_is_threshold=0.5_5.0"], "algorithm.correction", "mask"),
        (["trainer.total_epochs=3"], "learner.epochs", 3),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=sapo"], "algorithm.aggregation", "seq-mean-token-mean"),
        (["actor_rollout_ref.actor.policy_loss.loss_mode=geo_mean"], "algorithm.aggregation", "seq-mean-token-mean"),
        (
            ["actor_rollout_ref.actor.policy_loss.loss_mode=dppo_tv"],
            "algorithm.loss",
            {"name": "dppo_tv", "params": {"delta": 0.2, "delta_low": 0.2, "cap": 3.0}},
        ),
        ([*BYPASS, "algorithm.rollout_correction.loss_type=reinforce"], "algorithm.loss", "gpg"),
        (
            [*BYPASS, "algorithm.rollout_correction.loss_type=reinforce", "algorithm.rollout_is=sequence"],
            "algorithm.loss",
            {"name": "reinforce", "params": {"level": "sequence", "cap": 2.0}},
        ),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_is=token"],
            "algorithm.advantage",
            {"name": "optimal_token_baseline", "params": {"gamma": 1.0, "multi_turn": False, "cap": 2.0}},
        ),
        (["~trainer.total_epochs"], "learner.epochs", 30),
        (["custom_reward_function.path=rewards/mine.py"], "scoring.rule", "rewards.mine.compute_score"),
        (["data.custom_cls.path=mine.py", "data.custom_cls.name=Quiz"], "data.dataset", "mine.Quiz"),
        (["+actor_rollout_ref.actor.optim.lr=2e-6"], "learner.lr", 2e-6),
        (["data.train_files=[a.parquet,b.parquet]"], "data.train", ["a.parquet", "b.parquet"]),
    ],
)
def test_a_key_becomes_ours_and_asyncrl_takes_it(words: list[str], key: str, value: Any) -> None:
    found = from_words(*words).settings[key]
    first = found[0] if isinstance(found, list) and isinstance(found[0], dict) else found
    assert value in (found, first["name"] if isinstance(first, dict) else None)
    assert takes(translated(None, words, None)[1])


@pytest.mark.slow
def test_an_advantage_that_asyncrl_does_not_have_is_refused_and_not_replaced_by_another() -> None:
    words = ["algorithm.adv_estimator=grpoo", "actor_rollout_ref.actor.loss_agg_mode=token-mean"]
    assert has(from_words(*words).differs, "algorithm.adv_estimator=grpoo", "no advantage of this name")
    report = translated(None, words, None)[1]
    assert any("did you mean grpo?" in line for line in report[report.index("Fix before you start a run:") :])


def test_a_value_of_a_wrong_kind_is_named_and_the_rest_is_translated() -> None:
    result = from_words("data.train_batch_size=many", "data.shuffle=false")
    assert has(result.differs, "data.train_batch_size: its value cannot be read", "'many'", "is left out")
    assert result.settings["data.shuffle"] is False


@pytest.mark.parametrize(
    ("name", "over"), [("token", "token"), ("sequence", "sequence_sum"), ("geometric", "sequence_mean")]
)
def test_rejections_of_older_releases_bound_the_ratio(name: str, over: str) -> None:
    result = from_words(
        f"algorithm.rollout_correction.rollout_rs={name}",
        "algorithm.rollout_correction.rollout_rs_threshold=2.0",
        "algorithm.rollout_correction.rollout_rs_threshold_lower=0.25",
    )
    (rejection,) = [each for each in result.settings["algorithm.correction"] if each["name"] == "reject"]
    bounds = {"low": pytest.approx(-math.log(2)), "high": pytest.approx(math.log(4))}
    assert rejection["params"] == {"by": "k1", "over": over, **bounds}


def test_experts_of_the_rollout_are_replayed_and_those_of_other_passes_are_named() -> None:
    mode = "actor_rollout_ref.actor.router_replay.mode"
    replayed = from_words(f"{mode}=R3")
    assert replayed.settings["learner.router_replay"] is True
    assert replayed.settings["engine.return_routed_experts"] is True
    named = from_words(f"{mode}=R2")
    assert "learner.router_replay" not in named.settings
    assert has(named.differs, "only replays the rollout's experts")


def test_a_function_is_found_in_its_file_and_gets_its_parameters() -> None:
    function = "reward.custom_reward_function"
    at, bonus = f"{function}.path=/lib/my-rewards.py", f"+{function}.reward_kwargs.bonus.size=3"
    rule = from_words(at, bonus).settings["scoring.rule"]
    assert rule == [{"name": "/lib/my-rewards.py:compute_score", "params": {"bonus": {"size": 3}}}]
    assert from_words(f"{function}.path=../mine.py").settings["scoring.rule"] == "../mine.py:compute_score"
    settings = from_words(at, bonus, "reward.reward_manager.name=batch").settings
    assert settings["scoring.manager.compute_score_params"] == {"bonus": {"size": 3}}


def test_managers_for_single_rows_become_rules_or_managers() -> None:
    at, manager = "reward.custom_reward_function.path=mine.py", "reward.reward_manager.name"
    remote = from_words(at, f"{manager}=remote", "reward.num_workers=3").settings
    assert (remote["scoring.rule"], remote["scoring.rule_processes"]) == ("mine.compute_score", 3)
    limited = from_words(at, f"{manager}=rate_limited", "+reward.max_rpm=60", "+reward.timeout=9").settings
    assert limited["scoring.manager.name"] == "rate_limited"
    assert limited["scoring.manager.compute_score"] == "mine.compute_score"
    assert limited["scoring.manager.params"] == {"max_rpm": 60, "timeout": 9}
    named = from_words(at, f"{manager}=gdpo", "trainer.experiment_name=mine").settings
    assert named["scoring.manager.params"] == {"config": {"trainer": {"experiment_name": "mine"}}}


def test_what_verl_and_its_fork_freeze_is_frozen() -> None:
    tower, fork = "actor_rollout_ref.actor.freeze_vision_tower=True", "actor_rollout_ref.model.override_config"
    assert from_words(tower).settings["model.freeze"] == ["vision"]
    both = from_words(tower, f"+{fork}.moe_freeze_all=True", f"+{fork}.rope_theta=1e6")
    assert both.settings["model.freeze"] == ["vision", "verl_moe"]
    assert both.settings["model.override_config"] == {"rope_theta": 1e6}, "it is no field of a model's configuration"
    other = "+actor_rollout_ref.model.moe_freeze_all=True"
    assert from_words(other).settings["model.freeze"] == ["verl_moe"]
    assert "model.freeze" not in from_words(other, f"+{fork}.moe_freeze_all=False").settings
    plain = from_words(f"+{fork}.moe_freeze_all=False", tower.replace("True", "False"))
    assert not {"model.freeze", "model.override_config"} & set(plain.settings)


def test_parts_that_verl_freezes_beside_adapters_are_named() -> None:
    result = from_words("actor_rollout_ref.actor.freeze_vision_tower=True", "actor_rollout_ref.model.lora_rank=8")
    assert "model.freeze" not in result.settings
    assert has(
        result.differs, "freeze_vision_tower: LoRA trains only the adapters; name their layers in model.lora.targets"
    )


def test_minibatches_of_no_prompts_are_named() -> None:
    result = from_words("actor_rollout_ref.actor.ppo_mini_batch_size=0")
    assert has(result.differs, "data.train_batch_size=1024", "or a related one is wrong, and is left out")


def test_a_list_in_place_of_a_section_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("data: [1]\n")
    with pytest.raises(ConfigError, match="a list instead of the section"):
        translate(read_verl(tmp_path / "list.yaml", [], {}))


def test_keys_of_a_dataset_class_of_ones_own_are_its_parameters() -> None:
    result = from_words("data.custom_cls.path=/lib/mine.py", "data.custom_cls.name=Quiz", "+data.level=3")
    assert result.settings["data.dataset"] == "/lib/mine.py:Quiz"
    assert result.settings["data.dataset_params"] == {"level": 3}
    assert result.unknown == ()
    assert has(from_words("+data.level=3").unknown, "data.level=3")


def test_rejections_that_would_do_nothing_without_a_proximal_policy_are_named() -> None:
    correction = "algorithm.rollout_correction"
    words = [
        f"{correction}.bypass_mode=true",
        f"{correction}.rollout_rs=seq_max_k2",
        f"{correction}.rollout_rs_threshold=3",
    ]
    result = from_words(*words)
    assert (result.settings["algorithm.proximal"], result.settings["algorithm.correction"]) == ("behaviour", [])
    assert has(result.differs, "bypass_mode=true", "algorithm.proximal=recompute")


def test_a_coefficient_that_cannot_follow_the_policy_is_fixed() -> None:
    words = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive", "algorithm.kl_ctrl.target_kl=0.2"]
    adapted, fixed = from_words(*words), from_words(*words, *BYPASS)
    assert adapted.settings["algorithm.kl"]["params"]["target"] == 0.2
    assert "target" not in fixed.settings["algorithm.kl"]["params"]
    assert has(fixed.differs, "kl_ctrl.type=adaptive", "algorithm.proximal=recompute")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "advantage"),
    [("grpo", "process_grpo"), ("gae", "gae"), ("reinforce_plus_plus", "reinforce_pp"), ("rloo", "rloo")],
)
def test_raw_scores_of_steps_train_by_an_advantage_that_reads_them_or_are_named(estimator: str, advantage: str) -> None:
    words = [f"algorithm.adv_estimator={estimator}", "reward_model.reward_manager=skywork_prm"]
    words += ["reward_model.prm_model_path=a/b", "reward_model.prm_aggregation=raw", "actor_rollout_ref.rollout.n=4"]
    result = from_words(*words)
    assert result.settings["algorithm.advantage"]["name"] == advantage
    assert result.settings["scoring.shaping.prm_aggregation"] == "per_step"
    assert result.settings["scoring.shaping.process_weight"] == 0
    reads = result.settings.get("algorithm.advantage.params.step_weight") == 1.0 or advantage == "process_grpo"
    assert reads != has(result.differs, "choose an advantage that trains on step scores")
    assert takes(translated(None, words, None)[1])


def test_minibatches_that_do_not_divide_the_batch_are_told() -> None:
    result = from_words("data.train_batch_size=10", "actor_rollout_ref.actor.ppo_mini_batch_size=4")
    assert result.settings["learner.minibatches"] == 2
    assert has(result.differs, "ppo_mini_batch_size=4 does not divide")


def test_every_key_that_is_given_is_translated_or_named() -> None:
    sections = [key for key in BY_KEY if not key.endswith("*") and not BY_KEY[key].defaults]
    words = [f"{key}=1" for key in sections if not BY_KEY[key].alias_of]
    report = list(translate(read_verl(None, words, {})).report)
    assert [key for key in sections if not BY_KEY[key].alias_of and not has(report, f"{key}=1")] == []


def test_rows_name_keys_of_ours_that_exist_and_no_key_of_verl_twice() -> None:
    keys = [key for row in TABLE for key in row.there]
    assert len(keys) == len(set(keys))
    named = [key for row in TABLE if not row.alias_of for key in re.findall(r"[a-z_]+(?:\.[a-z_]+)+", row.here)]
    assert [key for key in named if not option_of(key) and not any(each.startswith(key) for each in OPTIONS)] == []
    settings = from_words("algorithm.adv_estimator=gae").settings
    assert [key for key in settings if key not in OPTIONS] == []


def test_a_script_is_read_with_its_variables_arrays_and_sums() -> None:
    text = """
    n=$((2 * (3 + 1)))
    export NAME=${NAME:-"${HOME}/x"}
    WORDS=(
        a.b=$n  # a comment
        +c.d='[1, 2]'
    )
    run "${WORDS[@]}" \\
        e.f="${NAME}/y" g=1 \\
        ~h.i $UNSET
    """
    words = ["a.b=8", "+c.d=[1, 2]", "e.f=/home/me/x/y", "~h.i"]
    assert script_words(text, {"HOME": "/home/me"}) == [(word, True) for word in words]


def test_a_value_that_only_the_running_script_knows_is_reported_and_left_out(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(
        "N=`nproc`\n"
        "run trainer.project_name=$(basename $PWD) actor_rollout_ref.rollout.n=`nproc` "
        "data.train_batch_size=$((N * 4)) "
        'data.train_files="$(ls data/*.parquet)" data.val_files=[$UNSET/test.parquet] trainer.experiment_name=at-$N '
        "actor_rollout_ref.model.path=${MODEL:?give a model} critic.model.path=${OTHER:?} "
        "data.max_prompt_length=\\`x\\` trainer.total_epochs='`y`' trainer.test_freq=cost$"
    )
    given = read_verl(script, [], {"PWD": "/work", "OTHER": "other"})
    assert (given["critic"]["model"]["path"], given["data"]["max_prompt_length"]) == ("other", "`x`")
    assert (given["trainer"]["total_epochs"], given["trainer"]["test_freq"]) == ("`y`", "cost$")
    result = translate(given)
    for key, written in {
        "trainer.project_name": "$(basename /work)",
        "trainer.experiment_name": "at-$(nproc)",
        "actor_rollout_ref.rollout.n": "$(nproc)",
        "data.train_batch_size": "$((N * 4))",
        "data.train_files": "$(ls data/*.parquet)",
        "data.val_files": "[$UNSET/test.parquet]",
        "actor_rollout_ref.model.path": "${MODEL:?give a model}",
    }.items():
        reason = f"{key}: its value cannot be read (only the running script knows this value: {written})"
        assert has(result.differs, reason, f"left out: give {key}=VALUE")
    assert has(result.differs, "give data.train_batch_size=VALUE, or verl's default 1024 counts")
    assert not any("verl's default ~/" in line for line in result.differs)
    assert not {"data.train", "data.eval", "model.path"} & result.settings.keys()
    assert not any("$" in str(value) for value in result.settings.values())


OVER_LINES = ["a.b=$(  date +%s )", "a.c=2", "a.d=$(  nproc )"]


@pytest.mark.slow
def test_a_path_that_only_the_running_script_knows_must_be_set_before_a_start(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text("run data.train_files=$TRAIN data.val_files=a.parquet actor_rollout_ref.model.path=$(\npick\n)")
    text, report = translated(script, [], None)
    assert "~/" not in text
    assert "deepseek" not in text
    fixes = report[report.index("Fix before you start a run:") :]
    for key in ("data.train", "model.path"):
        assert any(line.strip().startswith(f"{key}: set it") for line in fixes)
    assert has(report, "data.train_files: its value cannot be read", "$TRAIN")


def test_paths_that_a_script_leaves_to_verl_are_told() -> None:
    for key in ("data.train_files", "data.val_files", "actor_rollout_ref.model.path"):
        assert has(from_words("trainer.nnodes=1").differs, f"{key} is not given", "is set to verl's default")
        assert not has(from_words(f"{key}=mine").differs, f"{key} is not given")


WITH_SPACES = ["a.b=x-$(date +%s)", "a.c=9", "a.d=-3", "a.e=$((2 ** 3))"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run \\\r\n a.b=1 \\\r\n a.c=2\r\n", ["a.b=1", "a.c=2"]),
        ("W=(a.b=1)\nW+=(a.c=2\na.d=$((1+2)))\nrun ${W[@]}", ["a.b=1", "a.c=2", "a.d=3"]),
        (
            "export A=1 B=2\nlocal -r C=3; D=4;\nrun a.b=$A$B$C$D; run a.c=1 && run a.d=2",
            ["a.b=1234", "a.c=1", "a.d=2"],
        ),
        ("if x; then A=1; fi\nB=2 run a.b=$A$B", ["a.b=1$B"]),
        ("run a.b=x#y a.c='#z' a.d=${A##*/} # it's a.e=1", ["a.b=x#y", "a.c=#z", "a.d=${A##*/}"]),
        ("A=1\nrun a.b='$A' a.c=\\$A a.d=\"$A\"", ["a.b=$A", "a.c=$A", "a.d=1"]),
        ("run a.b=x-$(date +%s) a.c=$(( ((1+2) * 3) )) a.d=$((-3)) a.e=$((2 ** 3))", WITH_SPACES),
        ("A=\nrun a.b=$A a.c=${A:-1} a.d=${A-2} a.e=${B:=3}", ["a.b=", "a.c=1", "a.d=", "a.e=3"]),
        ("A=$A:x\nrun a.b=$A", ["a.b=$A:x"]),
        (f"run a.b=$(({'+'.join('1' * 5000)}))", [f"a.b=$(({'+'.join('1' * 5000)}))"]),
        ("T=$(\n  ls x.y=9 |  # all\n  head\n)\nrun a.b=$T a.c=1", ["a.b=$(   ls x.y=9 |     head )", "a.c=1"]),
        ("run a.b=$(\n date +%s\n) \\\n a.c=2\nrun a.d=`\n nproc\n` a.e=3", [*OVER_LINES, "a.e=3"]),
        ("run a.b=\"['x',\n'y']\" a.c=1", ["a.b=['x', 'y']", "a.c=1"]),
        ("F='x\ny'\nrun a.b=\"$F\" a.c=1", ["a.b=x y", "a.c=1"]),
        ('bash -c "\nrun a.b=1\n"\nrun a.c=2', ["a.b=1", "a.c=2"]),
        ("T=$(never closed\nrun a.b=1\nU='nor this\nrun a.c=2", ["a.b=1", "a.c=2"]),
        ("T=$(\n" + "x\n" * 200 + ")\nrun a.b=1", ["a.b=1"]),
        ("T=$(\n cat <<'E'\n it's (\"so\") \n)\nrun a.b=$T a.c=1", ["a.b=$()", "a.c=1"]),
        ('A="it\'s" B=\'"x"\' C=\'\\\'\nrun a.b=$A a.c="$B" a.d=$C', ["a.b=it's", 'a.c="x"', "a.d=\\"]),
        ('say "no key a.b=1 a.c=2\nrun a.b=3\n', ["a.b=1", "a.c=2", "a.b=3"]),
    ],
)
def test_a_script_is_read_as_a_shell_would(text: str, words: list[str]) -> None:
    assert [word for word, _ in script_words(text, {})] == words


@pytest.mark.slow
def test_variables_that_hold_each_other_many_times_take_no_memory() -> None:
    doubled = "".join(f"A{number}=$A{number - 1}$A{number - 1}\n" for number in range(1, 60))
    (word,) = script_words(f"A0=x\n{doubled}run a.b=$A59", {})
    assert len(word.text) < 1_000_000


def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path) -> None:
    (tmp_path / "list.yaml").write_text("- 1\n")
    for name in ("list.yaml", "missing.yaml"):
        with pytest.raises(ConfigError, match=name):
            read_verl(tmp_path / name, [], {})
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        read_verl(None, ["word"], {})


@pytest.mark.slow
def test_the_command_writes_the_file_and_prints_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    words = [str(HERE / "process_reward.yaml"), "trainer.nnodes=2"]
    main([*words, "--out", str(out)])
    report = capsys.readouterr().out
    assert "trainer.nnodes=2" in report
    assert f"experiment={out}" in out.read_text()
    main(words)
    printed = capsys.readouterr().out
    assert "# Different here:" in printed
    assert printed.replace("./mine.yaml", str(out)) == out.read_text(), "the file keeps the report, too"


def test_the_words_of_lora_scripts_become_adapters_that_are_trained() -> None:
    model = "actor_rollout_ref.model"
    found = from_words(f"{model}.lora_rank=64", f"{model}.lora_alpha=32", f"{model}.target_modules=all-linear").settings
    assert [found[f"model.lora.{name}"] for name in ("rank", "alpha", "targets")] == [64, 32, ["all-linear"]]
    megatron = from_words(
        f"{model}.lora.rank=8", f"{model}.lora.target_modules=[linear_qkv,linear_fc2]", f"{model}.lora.dropout=0.1"
    )
    assert megatron.settings["model.lora.rank"] == 8
    assert megatron.settings["model.lora.alpha"] == 32
    assert megatron.settings["model.lora.targets"] == ["q_proj", "k_proj", "v_proj", "down_proj"]
    assert has(megatron.differs, "lora.dropout=0.1", "no dropout")
    folder = from_words(f"{model}.lora.adapter_path=here", f"{model}.lora.rank=8").settings
    assert folder["model.lora.path"] == "here"
    assert "model.lora.rank" not in folder


def test_a_share_of_warm_up_steps_is_kept_where_the_number_of_steps_is_not_known() -> None:
    share = "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio=0.1"
    assert from_words(share).settings["learner.warmup_steps"] == 0.1
    assert from_words(share, "trainer.total_training_steps=50").settings["learner.warmup_steps"] == 5


def test_keys_that_the_users_manager_gets_are_not_called_unknown_or_left_out() -> None:
    manager = ["source=importlib", "name=Mine", "module.path=my_managers.py"]
    result = from_words(
        *(f"reward.reward_manager.{each}" for each in manager),
        "+reward.reward_kwargs.bonus=0.25",
        "+reward.reward_kwargs.strategy=fsdp",
        "+reward.reward_kwargs.overlong_buffer_cfg.log=false",
    )
    assert result.settings["scoring.manager.params"]["bonus"] == 0.25
    assert not result.unknown
    assert not has([*result.without, *result.off], "reward_kwargs")
    assert has(from_words("+reward.reward_kwargs.bonus=0.25").unknown, "reward.reward_kwargs.bonus=0.25")


def test_a_variable_that_nothing_sets_is_named_with_the_word_that_mends_it() -> None:
    result = from_words("trainer.n_gpus_per_node=${UNSET}")
    assert has(result.differs, "UNSET", "is left out: give trainer.n_gpus_per_node=VALUE")


@pytest.mark.slow
@pytest.mark.skipif("ASYNCRL_VERL_PYTHON" not in os.environ, reason="needs verl")
@pytest.mark.parametrize("engine", ["", "megatron_", "torchtitan_", "veomni_"])
def test_verls_own_configuration_has_no_key_that_the_table_does_not_know(engine: str) -> None:
    program = "import verl.trainer.config as c, os; print(os.path.dirname(c.__file__))"
    python = os.environ["ASYNCRL_VERL_PYTHON"]
    folder = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True).stdout.split()[-1]
    result = translate(read_verl(Path(folder) / f"_generated_ppo_{engine}trainer.yaml", [], {}))
    assert result.unknown == ()


def test_agent_loops_of_ones_own_play_the_episodes() -> None:
    rollout = "actor_rollout_ref.rollout"
    words = [
        f"{rollout}.agent.agent_loop_config_path=loops.yaml",
        f"{rollout}.agent.default_agent_loop=mine",
        f"{rollout}.multi_turn.enable=True",
        f"{rollout}.multi_turn.max_assistant_turns=5",
        f"{rollout}.multi_turn.max_parallel_calls=3",
        f"{rollout}.multi_turn.interaction_config_path=users.yaml",
    ]
    made = from_words(*words)
    assert made.settings["actor.agent"] == "verl"
    assert made.settings["actor.max_turns"] == 5
    assert made.settings["actor.agent_options"] == {
        "default_agent_loop": "mine",
        "agent_loop_config_path": "loops.yaml",
        "config": {
            "actor_rollout_ref": {
                "rollout": {"multi_turn": {"interaction_config_path": "users.yaml", "max_parallel_calls": 3}}
            }
        },
    }
    assert "actor.interactions" not in made.settings
    assert not has([*made.differs, *made.without], "max_parallel_calls")


@pytest.mark.parametrize("loop", ["single_turn_agent", "tool_agent"])
def test_the_loops_of_verl_itself_become_no_agent(loop: str) -> None:
    rollout = "actor_rollout_ref.rollout"
    made = from_words(f"{rollout}.agent.default_agent_loop={loop}", f"{rollout}.multi_turn.max_parallel_calls=3")
    assert "actor.agent" not in made.settings
    assert has(made.differs, "max_parallel_calls=3", "all calls of a turn run at once")
