"""Keys of verl that divide GPUs become ranks and pools, and the runs that come out can be placed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from asyncrl.compat.report import Translated
from asyncrl.compat.verl.configuration.command import translated
from asyncrl.compat.verl.configuration.source import read_verl
from asyncrl.compat.verl.configuration.translation import translate
from asyncrl.config.compose import read
from asyncrl.launch.placement.placement import Placement, place
from asyncrl.launch.placement.pools import Host

ACTOR, ROLLOUT, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
MEGATRON = f"{ACTOR}.megatron"
RANKS = ("context", "tensor", "expert")


def from_words(*words: str) -> Translated:
    return translate(read_verl(None, words, {}))


def has(report: Sequence[str], *parts: str) -> bool:
    return any(all(part in line for part in parts) for line in report)


def placed(tmp_path: Path, hosts: Sequence[Host], *words: str) -> Placement:
    """Return the placement of the translated run's processes on these hosts."""
    text, report = translated(None, ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm", *words], None)
    assert "Fix before you start a run:" not in report
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    return place(read([f"experiment={file}"], names_missing_data=False), hosts)


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ([f"{ACTOR}.ulysses_sequence_parallel_size=4"], (4, 1, 1)),
        ([f"{MEGATRON}.tensor_model_parallel_size=4"], (1, 4, 1)),
        ([f"{MEGATRON}.context_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=4"], (2, 1, 4)),
        ([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.expert_model_parallel_size=8"], (2, 1, 8)),
        ([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MEGATRON}.context_parallel_size=2"], (4, 1, 1)),
        ([f"{MEGATRON}.tensor_model_parallel_size=2", f"{MODEL}.lora.rank=8"], (2, 1, 1)),
        ([f"{MEGATRON}.expert_model_parallel_size=8", f"{MODEL}.lora_rank=8"], (1, 1, 1)),
        ([f"{ACTOR}.torchtitan.tensor_parallel_size=2"], (1, 2, 1)),
        ([f"{ACTOR}.veomni.ulysses_parallel_size=2", f"{ACTOR}.veomni.expert_parallel_size=2"], (2, 1, 2)),
    ],
)
def test_the_sizes_of_every_engine_become_ranks_that_can_be_combined(words: list[str], ranks: tuple[int, ...]) -> None:
    settings = from_words(*words).settings
    assert tuple(settings.get(f"learner.{kind}_ranks", 1) for kind in RANKS) == ranks


def test_sizes_without_a_counterpart_are_told() -> None:
    report = from_words(
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.expert_model_parallel_size=2",
        f"{MODEL}.lora_rank=8",
    ).differs
    assert has(report, "pipeline_model_parallel_size=2: there are no pipeline stages here")
    assert has(report, "tensor_model_parallel_size=2: learner.tensor_ranks cannot be combined with adapters")
    assert has(report, "expert_model_parallel_size=2", "learner.expert_ranks is 1")


@pytest.mark.parametrize("name", ["flash_attention_2", "flex_attention"])
def test_attention_that_ranks_cannot_share_is_left_to_asyncrl(name: str) -> None:
    attention = f"+{MODEL}.override_config.attn_implementation={name}"
    assert from_words(attention).settings["model.attention"] == name
    shared = from_words(attention, f"{ACTOR}.ulysses_sequence_parallel_size=2")
    assert shared.settings["model.attention"] == "auto"
    assert has(shared.differs, f"attn_implementation={name}", "model.attention is auto")


@pytest.mark.slow
@pytest.mark.parametrize("section", ["reward.reward_model", "reward_model"])
def test_a_resource_pool_of_the_reward_model_is_a_pool_of_scorers(tmp_path: Path, section: str) -> None:
    path = "model_path" if section.startswith("reward.") else "model.path"
    words = [f"{section}.enable=true", f"{section}.{path}=a/b", "trainer.n_gpus_per_node=6"]
    words += [f"{section}.enable_resource_pool=true", f"{section}.nnodes=1", f"{section}.n_gpus_per_node=2"]
    found = placed(tmp_path, [Host(8, 32)], *words)
    assert [(role.gpus, role.pool) for role in found.of("scoring")] == [((6,), "scoring"), ((7,), "scoring")]
    assert {role.pool for module in ("learner", "actor", "replay") for role in found.of(module)} == {"train"}
    on_two = placed(tmp_path, [Host(6, 32), Host(6, 32)], *words)
    assert {role.node for role in on_two.of("scoring")} != {role.node for role in on_two.of("learner")}


def test_a_pool_needs_a_reward_model_and_a_size() -> None:
    pool = "reward.reward_model.enable_resource_pool=true"
    assert "cluster.pools" not in from_words(pool, "reward.reward_model.nnodes=1").settings
    without = from_words(pool, "reward.reward_model.enable=true", "trainer.n_gpus_per_node=4")
    assert without.settings["cluster.gpus"] == 4
    assert has(without.differs, "reward.reward_model.nnodes=0", "both must be above 0")


@pytest.mark.slow
def test_nodes_for_rollouts_alone_are_a_pool_of_actors(tmp_path: Path) -> None:
    words = ["trainer.n_gpus_per_node=4", f"{ROLLOUT}.nnodes=1", f"{ROLLOUT}.n_gpus_per_node=2"]
    found = placed(tmp_path, [Host(4, 16), Host(2, 16)], *words)
    assert [(role.node, role.gpus) for role in found.of("learner")] == [(0, (0, 1, 2, 3))]
    assert [(role.node, role.gpus) for role in found.of("actor")] == [(1, (0, 1))]
    several = from_words("trainer.nnodes=2", f"{ROLLOUT}.nnodes=3")
    assert has(several.differs, "for 5 hosts, set cluster.launcher")


@pytest.mark.slow
def test_the_words_of_verls_lora_and_megatron_scripts_come_out_as_a_run_that_can_be_placed(tmp_path: Path) -> None:
    lora = [f"{MODEL}.lora_rank=64", f"{MODEL}.lora_alpha=32", f"{MODEL}.target_modules=all-linear"]
    lora += [f"{ROLLOUT}.load_format=safetensors", f"{ROLLOUT}.layered_summon=True", "trainer.n_gpus_per_node=8"]
    found = placed(tmp_path, [Host(8, 32)], *lora, f"{MEGATRON}.tensor_model_parallel_size=2")
    assert [len(role.gpus or ()) for role in found.of("learner")] == [4]
    megatron = [f"{MEGATRON}.tensor_model_parallel_size=4", f"{MEGATRON}.pipeline_model_parallel_size=2"]
    found = placed(tmp_path, [Host(8, 32)], "trainer.n_gpus_per_node=8", *megatron)
    assert [len(role.gpus or ()) for role in found.of("learner")] == [4]
    one = ["trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1"]
    assert [role.gpus for role in placed(tmp_path, [Host(1, 8)], *one).of("learner")] == [(0,)]
