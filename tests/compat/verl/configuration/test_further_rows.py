"""Words of rollouts, adapters, other engines' optimizers and kept generations have a counterpart, or are told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
OPTIM = f"{ACTOR}.optim"


def from_words(*words: str) -> Translated:
    return translate(read_verl(None, words, {}))


def has(report: Sequence[str], *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in report)


def test_words_for_the_server_become_options_of_sglang() -> None:
    kwargs = f"+{ROLLOUT}.engine_kwargs.sglang"
    words = [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.enforce_eager=True", f"{ROLLOUT}.enable_prefix_caching=False"]
    words += [f"{ROLLOUT}.max_num_seqs=64", f"{ROLLOUT}.max_model_len=4096", f"{ROLLOUT}.expert_parallel_size=1"]
    words += [f"{kwargs}.attention_backend=fa3", f"{kwargs}.enable_dp_attention=true", f"{kwargs}.stream_interval=2"]
    found = from_words(*words, f"{kwargs}.custom_weight_loader=[x.y]", f"{kwargs}.skip_server_warmup=false")
    assert found.settings["engine.server.arguments"] == [
        *("--disable-cuda-graph", "--disable-radix-cache", "--max-running-requests", "64", "--context-length", "4096"),
        *("--attention-backend", "fa3", "--enable-dp-attention", "--stream-interval", "2"),
    ]
    for name in ("custom_weight_loader", "skip_server_warmup"):
        assert has(found.differs, f"engine_kwargs.sglang.{name}: left out")
    assert "engine.server.arguments" not in from_words(f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.max_num_seqs=256").settings
    assert "engine.server.arguments" not in from_words(f"{ROLLOUT}.name=hf", f"{ROLLOUT}.enforce_eager=True").settings


@pytest.mark.slow
def test_options_of_sglang_are_taken_by_asyncrl() -> None:
    words = [f"{ROLLOUT}.enforce_eager=True", f"+{ROLLOUT}.engine_kwargs.sglang.attention_backend=fa3"]
    assert "Fix before you start a run:" not in translated(None, words, None)[1]


def test_generations_of_validations_are_a_table_and_folders_of_samples_are_the_store() -> None:
    settings = from_words("trainer.log_val_generations=10").settings
    assert (settings["observe.keep_evaluated"], settings["observe.upload"]) == (10, ["episodes"])
    assert from_words("trainer.log_val_generations=9999").settings["observe.keep_evaluated"] == 512
    assert not {"observe.upload", "replay.retention"} & set(from_words("trainer.log_val_generations=0").settings)
    for key, state in {"rollout_data_dir": "trained", "validation_data_dir": "evaluated"}.items():
        found = from_words(f"trainer.{key}=dumps")
        assert found.settings["replay.retention"] == "all"
        assert has(found.differs, f"trainer.{key}", f"asyncrl inspect export RUN --to DIR --state {state}")


def test_gradients_are_clipped_at_the_number_that_verls_engines_read() -> None:
    older, newer = f"{ACTOR}.grad_clip=0.5", f"{OPTIM}.clip_grad=0.3"
    assert from_words().settings["learner.max_grad_norm"] == 1.0
    assert from_words(older).settings["learner.max_grad_norm"] == 0.5
    both = from_words(older, newer)
    assert both.settings["learner.max_grad_norm"] == 0.3
    assert has(both.differs, f"{ACTOR}.grad_clip=0.5", "verl clips at")


@pytest.mark.parametrize(
    ("words", "schedule", "floor"),
    [
        (["lr_decay_style=cosine", "min_lr=1e-7"], "cosine", 0.1),
        (["lr_scheduler_type=cosine", "lr_min=5e-7"], "cosine", 0.5),
        (["decay_type=linear", "min_lr_factor=0.2", "name=AdamW"], "linear", 0.2),
        (["lr_decay_style=constant", "min_lr=1e-7"], "constant", None),
    ],
)
def test_schedules_of_other_engines_are_read(words: list[str], schedule: str, floor: float | None) -> None:
    settings = from_words(f"{OPTIM}.lr=1e-6", *(f"{OPTIM}.{word}" for word in words)).settings
    assert settings["learner.schedule"] == schedule
    assert settings.get("learner.lr_floor") == (None if floor is None else pytest.approx(floor))


def test_megatrons_optimizer_dtype_offload_and_replay_are_read() -> None:
    megatron = f"{ACTOR}.megatron"
    found = from_words(
        f"{OPTIM}.optimizer=adam",
        f"{megatron}.dtype=float16",
        f"{megatron}.optimizer_offload=true",
        f"{megatron}.router_replay.mode=R3",
        "actor_rollout_ref.ref.megatron.param_offload=true",
    )
    settings = found.settings
    assert (settings["learner.optimizer"], settings["model.dtype"]) == ("adamw", "float16")
    assert not has(found.differs, "optim.optimizer")
    for key in ("learner.optimizer_on_host", "learner.reference_on_host", "learner.router_replay"):
        assert settings[key] is True
    assert settings["engine.return_routed_experts"] is True


def test_adapters_of_patterns_of_the_critic_and_of_other_kinds() -> None:
    pattern = from_words(f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules='.*language_model.*proj'")
    assert "model.lora.targets" not in pattern.settings
    assert has(pattern.differs, "patterns are not read, so all linear layers get adapters")
    canonical = from_words(
        f"{MODEL}.lora.rank=8", f"{MODEL}.lora.type=canonical_lora", f"{MODEL}.lora.target_modules=[linear_q,linear_v]"
    )
    assert canonical.settings["model.lora.targets"] == ["q_proj", "v_proj"]
    assert has(from_words(f"{MODEL}.lora.rank=8", f"{MODEL}.lora.type=dora").differs, "adapters are plain LoRA here")
    critic = ["critic.model.lora_rank=16", "critic.model.lora_alpha=8"]
    settings = from_words("algorithm.adv_estimator=gae", *critic).settings
    assert [settings[f"critic.lora.{name}"] for name in ("rank", "alpha", "targets")] == [16, 8, ["all-linear"]]
    assert "critic.lora.rank" not in from_words("algorithm.adv_estimator=grpo", *critic).settings


def test_the_largest_numbers_of_samples_are_limits_of_tasks_and_negative_ones_are_none() -> None:
    settings = from_words("data.train_max_samples=1000", "data.val_max_samples=200").settings
    assert (settings["data.limit"], settings["data.eval_limit"]) == (1000, 200)
    assert not {"data.limit", "data.eval_limit"} & set(from_words("data.train_max_samples=-1").settings)
