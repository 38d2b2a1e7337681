"""Scripts and configurations like those of TRL's documentation become ours, and what has no counterpart is named."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.compat.trl.command import main, translate
from asyncrl.compat.trl.page import page
from asyncrl.compat.trl.source import read_trl
from asyncrl.compat.trl.table import BY_KEY, ROWS
from asyncrl.config.compose import read
from asyncrl.config.keys import SECTIONS, option_of
from asyncrl.config.other_words import KEYS, WITHOUT
from asyncrl.config.schema import ScoringConfig
from asyncrl.errors import ConfigError
from asyncrl.scoring.answers import rule_input
from asyncrl.scoring.rules.registry import load_rules
from tests.compat.trl.scripts import HERE, has, loaded, of_script
from tests.scoring.fakes import CharTokenizer, answered

PAGE = Path(__file__).parents[3] / "docs" / "trl.md"
GRPO_CONFIG = """
model_init_kwargs trust_remote_code router_aux_loss_coef disable_dropout cast_lm_head_to_fp32 remove_unused_columns
num_generations num_generations_eval max_completion_length ds3_gather_for_generation shuffle_dataset
pad_to_multiple_of generation_batch_size steps_per_generation temperature top_p top_k min_p generation_kwargs
chat_template_kwargs repetition_penalty cache_implementation use_vllm vllm_mode vllm_model_impl vllm_enable_sleep_mode
vllm_structured_outputs_regex vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout
vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size beta num_iterations
epsilon delta epsilon_high sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg
vespo_lambda_neg importance_sampling_level reward_weights multi_objective_aggregation scale_rewards loss_type
mask_truncated_completions sync_ref_model ref_model_mixup_alpha ref_model_sync_steps top_entropy_quantile entropy_coef
use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target max_tool_calling_iterations
vllm_importance_sampling_correction vllm_importance_sampling_mode vllm_importance_sampling_clip_max
vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_completions log_multimodal
num_completions_to_print log_unique_prompts log_completions_hub_repo use_transformers_continuous_batching
transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap
"""
"""The fields of GRPOConfig in TRL 1.16 that transformers' TrainingArguments lacks."""
TRAINER = """
model reward_funcs train_dataset eval_dataset processing_class reward_processing_classes callbacks optimizers
quantization_config peft_config tools rollout_func environment_factory
"""


PLAIN = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}


@pytest.mark.slow
def test_a_script_of_the_quick_start(tmp_path: Path) -> None:
    config, report = loaded("grpo_gsm8k.py", tmp_path)
    assert config.data.train == ["hub:openai/gsm8k?config=main&split=train"]
    assert (config.data.max_prompt_length, config.data.truncation) == (256, "left")
    assert (config.learner.batch_size, config.learner.group_size, config.learner.minibatches) == (16, 8, 1)
    assert (config.actor.max_turn_tokens, config.actor.max_tokens, config.learner.micro_tokens) == (786, 1042, 4 * 1042)
    assert (config.learner.lr, config.learner.betas, config.learner.warmup_steps) == (5e-6, [0.9, 0.99], 0.1)
    assert (config.learner.schedule, config.learner.epochs, config.learner.max_grad_norm) == ("cosine", 1, 0.1)
    lora = config.model.lora
    assert (config.model.path, lora.rank, lora.alpha) == ("Qwen/Qwen2.5-0.5B-Instruct", 16, 64)
    assert lora.targets == ["q_proj", "v_proj"]
    assert [(each["name"], each["weight"]) for each in config.scoring.rule] == [
        ("format", 0.5),
        ("grpo_gsm8k.correctness", 2.0),
    ]
    assert config.algorithm.kl.params == {"weight": 0.04, "place": "loss", "importance_weighted": True}
    assert config.algorithm.aggregation.params == {"norm": 786}
    assert config.algorithm.advantage.params == {"normalise_std": False}
    assert (config.run.dir, config.run.name, config.run.seed) == ("runs", "Qwen2.5-0.5B-GRPO", 42)
    assert config.observe.sinks == ["console", "wandb"]
    for parts in (
        ("run_name: only the running script knows", "give run_name=VALUE"),
        ("grpo_gsm8k.correctness", "importing grpo_gsm8k.py would start its training"),
        ("report_to: swanlab is left out",),
        ("lora_dropout=0.05", "no dropout"),
        ("top_p=0.9", "whole distribution"),
        ("no_such_key", "lacks this key"),
    ):
        assert has(report, *parts), parts


@pytest.mark.slow
def test_a_script_of_an_agent_with_vllm(tmp_path: Path) -> None:
    config, report = loaded("grpo_agent.py", tmp_path, ["output_dir=out/agent", "num_processes=4"])
    assert (config.run.dir, config.run.name) == ("out", "agent")
    assert (config.data.train, config.data.eval) == (["train.parquet"], ["held_out.jsonl"])
    assert (config.engine.kind, config.engine.server.tp_size) == ("sglang", 2)
    assert config.engine.server.memory == 0.8
    assert config.actor.environment == "my_environments.Search"
    assert (config.actor.max_turns, config.actor.max_tokens, config.actor.temperature) == (6, 4096, 0.8)
    assert config.actor.template_kwargs == {"enable_thinking": False}
    assert (config.learner.batch_size, config.learner.minibatches, config.learner.steps) == (128, 4, 100)
    assert (config.learner.checkpoint_every, config.learner.eval_every, config.learner.eval_attempts) == (25, 10, 16)
    assert config.replay.sampler.max_times_sampled == 2
    assert config.algorithm.advantage.params == {"weights": {"rule/found": 1.0, "rule/brevity": 1.0}}
    assert [each["name"] for each in config.scoring.rule] == ["my_rewards.found", "rewards.style.brevity"]
    assert config.algorithm.loss.params == {"clip_low": 3e-4, "clip_high": 4e-4, "dual_clip": None}
    [correction] = config.algorithm.correction
    assert (correction.name, correction.params) == ("truncate", {"level": "geometric", "cap": 2.5, "floor": 0.0})
    assert config.model.activations == 1.0
    assert not has(report, "output_dir"), "a word gives the value that only the script knew"
    assert not has(report, "would start its training")
    for parts in (
        ("train_dataset: the script changes rows by .map()", "by train.to_parquet('train.parquet')"),
        ("vllm_server_base_url=http://10.0.0.7:8000",),
        ("deepspeed=zero3.json",),
        ("push_to_hub=true",),
    ):
        assert has(report, *parts), parts


@pytest.mark.slow
def test_a_file_of_the_command_line_and_json(tmp_path: Path) -> None:
    config, _ = loaded("grpo.yaml", tmp_path)
    assert config.data.train == ["hub:trl-lib/DeepMath-103K?split=train"]
    assert (config.model.dtype, config.model.lora.rank, config.model.lora.targets) == ("bfloat16", 32, ["all-linear"])
    assert config.scoring.rule[0] == {"name": "math", "as": "accuracy_reward", "weight": 1.0}
    assert config.algorithm.loss.params == {"clip_low": 1.0, "clip_high": 4.0}
    assert (config.learner.warmup_steps, config.observe.sinks) == (0.05, ["console", "trackio"])
    (tmp_path / "config.json").write_text('{"learning_rate": 2e-6, "reward_funcs": "my_rewards.score", "fp16": true}')
    given, _ = read_trl(tmp_path / "config.json", ["beta=0.1"])
    settings = translate(given).settings
    assert (settings["learner.lr"], settings["model.dtype"]) == (2e-6, "float16")
    assert (settings["scoring.rule"], settings["algorithm.kl"]["params"]["weight"]) == ("my_rewards.score", 0.1)


def test_every_field_of_a_grpo_config_and_every_argument_of_its_trainer_has_a_row() -> None:
    transformers = pytest.importorskip("transformers")
    names = [*GRPO_CONFIG.split(), *TRAINER.split(), *(each.name for each in fields(transformers.TrainingArguments))]
    assert [name for name in names if name not in BY_KEY] == []
    assert len(BY_KEY) == sum(len(row.there) for row in ROWS), "no word has two rows"


def test_every_key_that_a_row_names_exists() -> None:
    for row in ROWS:
        for key in re.findall(r"`([a-z_.]+)`", row.here if "`" in row.here else f"`{row.here}`"):
            if key:
                short = key.removesuffix(f".{key.rpartition('.')[2]}")
                assert key in SECTIONS or option_of(key) or option_of(short), key


def test_the_hints_of_refused_words_and_the_translation_agree() -> None:
    for word, row in BY_KEY.items():
        if word in KEYS and row.here:
            ours = set(re.split(" or | and ", KEYS[word]))
            here = {each.strip("`") for each in row.here.split(", ")}
            assert any(a.startswith(b) or b.startswith(a) for a in ours for b in here), word
        assert not (word in KEYS and not row.here), word
        if word in WITHOUT and row.here:
            assert f"{row.here.strip('`').partition('.')[0]}=" in WITHOUT[word] or word == "logging_steps", word


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        ("loss_type=sapo", {"algorithm.loss": {"name": "sapo", "params": {"tau_pos": 1.0, "tau_neg": 1.05}}}),
        ("loss_type=grpo", {"algorithm.aggregation": {"name": "seq-mean-token-mean"}}),
        (
            "delta=4.0",
            {"algorithm.loss": {"name": "ppo", "params": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 4.0}}},
        ),
        ("scale_rewards=batch", {"algorithm.advantage": {"name": "reinforce_pp_baseline"}}),
        ("warmup_steps=30", {"learner.warmup_steps": 30}),
        ("max_steps=7", {"learner.steps": 7}),
        ("eval_strategy=no", {}),
        (
            "reward_funcs=[a.b,org/reward-model]",
            {"scoring.outcome_model.path": "org/reward-model", "scoring.rule": "a.b"},
        ),
    ],
)
def test_single_words(text: str, settings: dict[str, Any]) -> None:
    given, _ = read_trl(None, [text])
    assert settings.items() <= translate(given).settings.items()


def test_a_script_is_not_run_and_its_values_are_limited(tmp_path: Path) -> None:
    bomb = "\n".join(["a0 = 'x' * 1", "b0 = 'xxxxxxxx'", *(f"b{n + 1} = b{n} + b{n}" for n in range(40))])
    lists = "\n".join(["c0 = [1]", *(f"c{n + 1} = [c{n}, c{n}]" for n in range(40))])
    (tmp_path / "bomb.py").write_text(
        f"raise SystemExit\n{bomb}\n{lists}\nGRPOConfig(run_name=b40, report_to=c40, seed=10**9**9, beta=0.5)"
    )
    given, remarks = read_trl(tmp_path / "bomb.py", [])
    assert given == {"beta": 0.5} or "beta" not in given
    assert len(remarks) >= 3
    with pytest.raises(ConfigError, match="neither GRPOConfig nor GRPOTrainer"):
        of_script(tmp_path, "print(1)")
    with pytest.raises(ConfigError, match="cannot be read"):
        of_script(tmp_path, "GRPOConfig(")
    with pytest.raises(ConfigError, match=r"bomc\.py: there is no such file; did you mean .*bomb\.py"):
        read_trl(tmp_path / "bomc.py", [])


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        ("n = 10", "max_steps=n", ""),
        ("n = 3", "max_steps=1", "config.max_steps = other = 10"),
        ("n = 3", "max_steps=1", "config.max_steps: int = 10"),
        ("n = 3", "max_steps=1", "setattr(config, 'max_steps', 10)"),
        ("n = 10\ndef other(n):\n    n = 3\nm = [n for n in (1, 2)]", "max_steps=n", ""),
        ("if __name__ == '__main__':\n    n = 10\n    m = n", "max_steps=10", ""),
    ],
)
def test_a_value_of_a_script_is_its_last_one(tmp_path: Path, before: str, call: str, after: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"{before}\nconfig = GRPOConfig({call})\n{after}\n")
    assert read_trl(file, []) == ({"max_steps": 10}, [])


@pytest.mark.parametrize(
    ("before", "call", "after"),
    [
        ("n = 3\nn *= 2", "max_steps=n", ""),
        ("n = 3\nn, m = 6, 7", "max_steps=n", ""),
        ("n = 3\nfor n in (6, 7): pass", "max_steps=n", ""),
        ("import sys\nif sys.argv:\n    n = 3\nelse:\n    n = 6", "max_steps=n", ""),
        ("n = 3", "max_steps=n", "config.max_steps += 1"),
        ("n = 3", "max_steps=n", "if n:\n    config.max_steps = 4"),
        ("n = 3", "max_steps=n / 2 * 0x" + "f" * 1000, ""),
        ("n = 'x' * 2", "max_steps=n", ""),
        ("n = 'x'", "max_steps=f'{n!r}'", ""),
        ("n = 'x'", "max_steps=f'{n=}'", ""),
        ("n = 0", "max_steps=3 / n", ""),
    ],
)
def test_a_value_that_only_the_running_script_knows_is_not_guessed(
    tmp_path: Path, before: str, call: str, after: str
) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"{before}\nconfig = GRPOConfig({call})\n{after}\n")
    given, [remark] = read_trl(file, [])
    assert given == {}
    assert remark.startswith("max_steps: only the running script knows this value (")


def test_a_division_by_zero_is_named_as_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text("config = GRPOConfig(max_steps=3 // 0)\n")
    _, [remark] = read_trl(file, [])
    assert "(a division by zero)" in remark


@pytest.mark.parametrize("change", ["k['beta'] = 1", "k.update(beta=1)", "del k['max_steps']"])
def test_options_that_a_script_changes_are_not_guessed(tmp_path: Path, change: str) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"k = dict(max_steps=3)\n{change}\nconfig = GRPOConfig(**k)\n")
    given, [remark] = read_trl(file, [])
    assert given == {}
    assert remark.endswith("(k, which line 2 sets); give KEY=VALUE for each of its keys")


def test_a_script_of_deep_nesting_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(f"GRPOConfig(beta={'-' * 100_000}1)")
    with pytest.raises(ConfigError, match="cannot be read: its expressions are nested too deeply"):
        read_trl(file, [])


@pytest.mark.parametrize(("loss", "ours"), [("later", "gspo"), ("grpo", "gspo"), ("cispo", "cispo"), ("sapo", "sapo")])
def test_ratios_of_sequences_are_translated_or_reported(loss: str, ours: str) -> None:
    result = translate({"loss_type": loss, "importance_sampling_level": "sequence"})
    assert result.settings["algorithm.loss"]["name"] == ours
    assert has(result.differs, "importance_sampling_level=sequence: left out") == (ours != "gspo")
    assert has(result.differs, "loss_type=later", "uses gspo") == (loss == "later")
    [correction] = result.settings["algorithm.correction"]
    assert correction["params"]["level"] == ("geometric" if ours == "gspo" else "token")
    assert has(translate({"importance_sampling_level": "word"}).differs, "importance_sampling_level=word: left out")


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss", "uses_delta"), [("grpo", True), ("luspo", True), ("cispo", False), ("vespo", False)])
def test_two_sided_clipping_is_translated_or_reported(loss: str, uses_delta: bool, level: str) -> None:
    result = translate({"loss_type": loss, "importance_sampling_level": level, "delta": 4.0})
    assert result.settings["algorithm.loss"]["params"].get("dual_clip") == (4.0 if uses_delta else None)
    assert has(result.differs, "delta=4.0: left out", f"loss_type={loss}") == (not uses_delta)


def test_null_is_not_read_as_a_default_without_a_remark() -> None:
    result = translate({"max_completion_length": None, "weight_decay": None, "epsilon_high": None})
    assert result.settings["actor.max_turn_tokens"] == 512
    assert has(result.differs, "max_completion_length=null: TRL's default 512 counts; give max_completion_length=VALUE")
    assert has(result.differs, "weight_decay=null: TRL's default 0.0 counts")
    assert not has(result.differs, "epsilon_high=null"), "null is its default"
    long = translate({"max_completion_length": None, "vllm_max_model_length": 4096})
    assert (long.settings["actor.max_turn_tokens"], long.settings["actor.max_tokens"]) == (4096, 4096)
    assert not has(long.differs, "=null")


@pytest.mark.parametrize(("mode", "bound"), [("sequence_mask", "high"), ("token_truncate", "cap")])
def test_a_correction_without_an_upper_bound_has_none(mode: str, bound: str) -> None:
    clip_max = "vllm_importance_sampling_clip_max"
    given = {"use_vllm": True, "vllm_importance_sampling_mode": mode, clip_max: None}
    result = translate(given)
    [correction] = result.settings["algorithm.correction"]
    assert correction["params"][bound] == float("inf")
    assert not has(result.differs, f"{clip_max}=null")


def test_luspo_is_gspo_with_the_sums_of_its_sequences() -> None:
    result = translate({"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon_high": 0.3})
    assert result.settings["algorithm.loss"] == {"name": "gspo", "params": {**PLAIN, "clip_high": 0.3}}
    assert result.settings["algorithm.aggregation"] == {"name": "seq-mean-token-sum"}
    assert not has(result.differs, "loss_type=luspo")
    assert has(translate({"loss_type": "luspo"}).differs, "loss_type=luspo: without importance_sampling_level")


@pytest.mark.parametrize("uses_vllm", [True, False])
def test_vespo_keeps_its_name_and_weighs_by_the_exact_ratio(uses_vllm: bool) -> None:
    result = translate(
        {"loss_type": "vespo", "vespo_k_neg": 2.5, "use_vllm": uses_vllm, "off_policy_mask_threshold": 0.5}
    )
    params = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 2.5, "lambda_neg": 2.0}
    assert result.settings["algorithm.loss"] == {"name": "vespo", "params": params}
    assert result.settings["algorithm.aggregation"] == {"name": "token-mean"}
    assert result.settings["algorithm.correction"] == [{"name": "opsm", "params": {"delta": 0.5}}]
    assert has(result.differs, "loss_type=vespo: its weight is computed with the exact ratio") == uses_vllm


@pytest.mark.slow
def test_a_file_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    loading = "import sys; import asyncrl.compat.trl.command; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", loading], check=True, cwd=Path(__file__).parents[3])
    with pytest.raises(ConfigError, match=r"nix\.py: there is no such file$"):
        main([str(tmp_path / "nix.py")])


@pytest.mark.slow
def test_the_command_writes_the_file_with_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "mine.yaml"
    main([str(HERE / "grpo.yaml"), "seed=3", "--out", str(out)])
    printed = capsys.readouterr().out
    assert "Different here:" in printed
    assert all(f"# {line}" in out.read_text().splitlines() for line in printed.splitlines())
    assert read([f"experiment={out}"], names_missing_data=False).run.seed == 3


def test_the_page_has_the_table_as_it_is() -> None:
    text = PAGE.read_text()
    assert "`num_generations`" in text
    assert page(text) == text, "run `make docs`"


def test_the_rewards_on_the_page_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text()
    (source,) = re.findall(r'```python\n("""trl_rewards\.py""".*?)```', text, re.DOTALL)
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (tmp_path / "trl_rewards.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    rules = load_rules(ScoringConfig(rule=yaml.safe_load(block)["scoring"]["rule"]))
    task, trajectory = answered("1. add\n2. so 72")
    hard = replace(task, extra_info={"answer": "72", "level": "hard"})
    found = rules.score(rule_input(hard, trajectory, CharTokenizer()))
    # 1.0 * 1 for the answer, and 0.5 * 2 / 3 for two steps.
    assert found.total == pytest.approx(1 + 0.5 * 2 / 3)
    assert found.scores["shows_steps/steps"] == 2.0
    easy = replace(task, extra_info={"answer": "72", "level": "easy"})
    assert rules.score(rule_input(easy, trajectory, CharTokenizer())).total == 1.0
