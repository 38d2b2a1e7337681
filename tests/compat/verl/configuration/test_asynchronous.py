"""Configurations of verl's asynchronous trainers: their steps, their versions, and the age of their data."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
FULLY_ASYNC = [
    *("algorithm.adv_estimator=grpo", "data.train_batch_size=0", "data.gen_batch_size=1", f"{ROLLOUT}.n=16"),
    *(f"{ACTOR}.ppo_mini_batch_size=32", "trainer.test_freq=10", "trainer.n_gpus_per_node=4", "rollout.nnodes=1"),
    *("rollout.n_gpus_per_node=2", "rollout.total_rollout_steps=51200", "async_training.require_batches=2"),
    *("async_training.staleness_threshold=0.5", "async_training.trigger_parameter_sync_step=3"),
]


def from_words(*words: str) -> Translated:
    return translate(read_verl(None, words, {}))


def has(result: Translated, *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in result.differs)


@pytest.mark.slow
def test_a_recipe_of_the_fully_asynchronous_trainer_becomes_a_run_that_starts() -> None:
    _, report = translated(None, [*FULLY_ASYNC, f"{ROLLOUT}.name=sglang"], None)
    assert not any("Fix before" in line or "lacks this key" in line or "zero" in line for line in report)
    assert not any("alternates" in line for line in report)


def test_its_steps_are_minibatches_and_its_versions_are_publishes() -> None:
    result = from_words(*FULLY_ASYNC)
    settings = result.settings
    assert {key: settings[key] for key in settings if key.startswith(("replay", "learner.p", "learner.minib"))} == {
        "replay.max_lag": 1,
        "learner.publish_every": 3,
        "learner.minibatches": 2,
    }
    assert (settings["learner.batch_size"], settings["learner.group_size"]) == (32 * 2 * 16, 16)
    # 51200 prompts are 800 steps of 64; the last version is whole, so the run has a multiple of 3.
    assert (settings["learner.steps"], settings["learner.eval_every"]) == (798, 30)
    assert settings["learner.checkpoint_every"] % 3 == 0
    assert settings["cluster.pools"] == {"train": {"nodes": 1, "gpus": 4}, "actor": {"nodes": 1, "gpus": 2}}
    assert settings["algorithm.proximal"] == "behaviour", "the recipe's own default is bypass mode"
    assert has(result, "data.train_batch_size=0", "ppo_mini_batch_size * require_batches = 64 prompts")
    assert has(result, "rollout.total_rollout_steps=51200", "learner.steps=798", "trainer.total_epochs")


@pytest.mark.parametrize(("staleness", "lag"), [("0", 0), ("0.1", 1), ("1", 1), ("1.5", 2)])
def test_a_share_of_stale_samples_is_rounded_up_to_versions(staleness: str, lag: int) -> None:
    result = from_words(*FULLY_ASYNC, f"async_training.staleness_threshold={staleness}")
    assert result.settings["replay.max_lag"] == lag


def test_episodes_that_would_wait_for_new_weights_are_told() -> None:
    assert not has(from_words(*FULLY_ASYNC), "partial_rollout")
    assert has(from_words(*FULLY_ASYNC, "async_training.partial_rollout=false"), "here they go on with the new ones")


def test_without_a_number_of_prompts_the_epochs_count() -> None:
    settings = from_words(*FULLY_ASYNC, "rollout.total_rollout_steps=null", "trainer.total_epochs=4").settings
    assert settings["learner.epochs"] == 4
    assert "learner.steps" not in settings


def test_the_configuration_that_verl_ships_for_a_recipe_has_its_values(tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    for name, lag in {"fully_async_ppo_trainer.yaml": 1, "one_step_off_ppo_megatron_trainer": 1}.items():
        script.write_text(f"python3 -m verl.x --config-name='{name}' data.train_batch_size=64\n")
        settings = translate(read_verl(script, [], {})).settings
        assert settings["replay.max_lag"] == lag
        assert settings["algorithm.proximal"] == "behaviour"
    own = tmp_path / "own.yaml"
    own.write_text("defaults: [fully_async_ppo_trainer, _self_]\nasync_training: {require_batches: 2}\n")
    settings = translate(read_verl(own, [], {})).settings
    assert (settings["learner.publish_every"], settings["learner.minibatches"]) == (4, 2)


def test_one_step_off_policy_trains_data_of_the_version_before() -> None:
    result = from_words("rollout.nnodes=1", "rollout.n_gpus_per_node=2", "data.train_batch_size=64")
    assert (result.settings["replay.max_lag"], result.settings["learner.batch_size"]) == (1, 64)
    assert not has(result, "alternates")


def test_the_modes_of_the_newer_trainer_limit_the_age_of_the_data() -> None:
    mode = "trainer.v1.trainer_mode=separate_async"
    assert from_words(mode).settings["replay.max_lag"] == 7
    assert from_words(mode, "trainer.v1.sampler.max_off_policy_threshold=3").settings["replay.max_lag"] == 2
    assert not has(from_words(mode), "alternates")
    unbounded = from_words(mode, "trainer.v1.sampler.max_off_policy_threshold=null")
    assert "replay.max_lag" not in unbounded.settings
    assert has(unbounded, "max_off_policy_threshold=null", "keeps its default 2")
    assert has(from_words(), "verl alternates")


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("data.train_batch_size=0", "data.train_batch_size=0"),
        (f"{ACTOR}.ppo_mini_batch_size=0", "ppo_mini_batch_size=0"),
        (f"{ROLLOUT}.n=0", "rollout.n=0"),
    ],
)
def test_a_batch_of_nothing_is_named(word: str, key: str) -> None:
    result = from_words(word)
    assert has(result, key, "1 or more")
    assert not has(result, "zero")
    assert "learner.batch_size" not in result.settings
