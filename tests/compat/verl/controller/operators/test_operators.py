"""The operators on workers of this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from asyncrl.commands.demo.tokenizer import build_tokenizer
from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from asyncrl.compat.verl.controller.operators import (
    ActorRolloutRefWorker,
    CriticWorker,
    PromptFeed,
    RewardModelWorker,
    compute_advantage,
    open_algorithm,
    reward,
)
from asyncrl.compat.verl.controller.operators.parts import by_trajectory, evenly
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError, DataProtoError, ScoringError, WorkerError
from asyncrl.modelling.tokenizer import open_tokenizer
from tests.compat.verl.controller.operators.support import GROUP, GROUPS, config
from tests.learner.support import VOCABULARY
from tests.mixtures import save_mixture
from tests.one_rank import frozen_heap

pytestmark = pytest.mark.slow

Open = Callable[..., Any]
KL = "algorithm.kl={name: k3, params: {weight: 0.1}}"


@pytest.fixture
def open_workers() -> Iterator[Open]:
    """Makes a worker group of a class, with its models loaded."""
    torch.set_num_threads(1)
    with frozen_heap(), ExitStack() as stack:

        def make(kind: type, settings: TrainConfig, count: int = 1) -> Any:
            group = LocalWorkerGroup(ClassWithInitArgs(kind, settings), ResourcePool([count]))
            stack.enter_context(group)
            group.init_model()
            return group

        yield make


def prompts(settings: TrainConfig) -> DataProto:
    return PromptFeed(settings).next().repeat(settings.learner.group_size)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Load the tensors of the newest checkpoint in a folder."""
    newest = max(folder.glob("step-*"))
    return load_file(newest / "rank-00000.safetensors")


def test_prompts_become_whole_groups_of_episodes(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(prompts(settings))
    assert data.non_tensor_batch["uid"].tolist() == ["t000000000"] * GROUP + ["t000000001"] * GROUP
    assert data.non_tensor_batch["member"].tolist() == list(range(GROUP)) * GROUPS
    assert data.non_tensor_batch["trajectory_id"][1] == "t000000000.1.0"
    sampled = data.batch["response_mask"].bool()
    assert sampled.any(-1).all()
    assert (data.batch["versions"][sampled] == 0).all()
    assert data.meta_info == {"version": 0, "groups_dropped": 0}


def test_validation_samples_greedily(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    given = prompts(settings)
    given.meta_info["validate"] = True
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(given)
    assert (data.batch["responses"][:GROUP] == data.batch["responses"][0]).all()


def test_log_probs_of_the_policy_are_those_with_which_it_sampled(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, KL)
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = policy.generate_sequences(prompts(settings))
    data = data.union(policy.compute_log_prob(data)).union(policy.compute_ref_log_prob(data))
    sampled = data.batch["response_mask"].bool()
    torch.testing.assert_close(data.batch["old_log_probs"][sampled], data.batch["rollout_log_probs"][sampled])
    # No step was trained yet.
    assert torch.equal(data.batch["ref_log_prob"], data.batch["old_log_probs"])
    assert (data.batch["old_log_probs"][~sampled] == 0).all()


def test_rewards_are_those_of_the_rule_on_the_last_token(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(prompts(settings))
    scored = open_workers(RewardModelWorker, settings, 3).compute_reward(data)
    for row in range(len(scored)):
        length = int(scored.batch["response_mask"][row].sum())
        tokens = scored.batch["input_ids"][row][scored.batch["attention_mask"][row].bool()]
        expected = float(np.float32((tokens % 2 == 0).double().mean()))
        assert scored.batch["token_level_scores"][row].nonzero()[:, 0].tolist() == [length - 1]
        assert float(scored.batch["token_level_scores"][row, length - 1]) == expected
    assert scored.non_tensor_batch["uid"].tolist() == data.non_tensor_batch["uid"].tolist()


def test_scores_alone_are_those_of_compute_reward_in_the_order_of_the_rows(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(prompts(settings))
    rewards = open_workers(RewardModelWorker, settings, 2)
    alone, whole = rewards.compute_rm_score(data), rewards.compute_reward(data)
    assert set(alone.batch.keys()) == {"rm_scores", "token_level_scores"}
    for name in alone.batch.keys():  # noqa: SIM118
        assert torch.equal(alone.batch[name], whole.batch["token_level_scores"])
    assert len(data.union(alone)) == len(whole)


def test_only_workers_that_collect_have_the_models_and_the_others_answer_empty(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = config(tmp_path)
    with LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, settings), ResourcePool([1])) as policy:
        policy.init_model()
        data = policy.generate_sequences(prompts(settings))
    opened, scored = [], []
    monkeypatch.setattr(reward, "open_tokenizer", lambda model: opened.append(model) or open_tokenizer(model))
    whole = reward.RewardWorker._scored

    def recorded(worker: Any, part: DataProto) -> Any:
        found = whole(worker, part)
        scored.append((worker.rank, worker.collects, len(part), found.data is None))
        return found

    monkeypatch.setattr(reward.RewardWorker, "_scored", recorded)
    workers = ClassWithInitArgs(RewardModelWorker, settings, workers_per_model=2)
    with LocalWorkerGroup(workers, ResourcePool([4])) as group:
        group.init_model()
        found = group.compute_rm_score(data)
    assert len(opened) == 2
    half = len(data) // 2
    assert sorted(scored) == [(0, True, half, False), (1, False, 0, True), (2, True, half, False), (3, False, 0, True)]
    with LocalWorkerGroup(ClassWithInitArgs(RewardModelWorker, settings), ResourcePool([1])) as one:
        one.init_model()
        assert torch.equal(found.batch["rm_scores"], one.compute_rm_score(data).batch["rm_scores"])


def test_scores_alone_are_refused_if_a_group_cannot_be_scored(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    given = prompts(settings)
    for row in range(GROUP):
        given.non_tensor_batch["reward_model"][row] = {"ground_truth": "unjudgeable"}
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(given)
    with pytest.raises(ScoringError, match=r"group t000000000 cannot be scored: .*nobody can say"):
        open_workers(RewardModelWorker, settings).compute_rm_score(data)


def test_a_manager_of_whole_groups_is_refused_since_workers_get_parts_of_a_batch(
    open_workers: Open, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="make the manager by load_reward_manager"):
        open_workers(RewardModelWorker, config(tmp_path, "scoring.manager.name=naive"))


def test_groups_that_cannot_be_scored_are_left_out_and_counted(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    given = prompts(settings)
    for row in range(GROUP):
        given.non_tensor_batch["reward_model"][row] = {"ground_truth": "unjudgeable"}
    data = open_workers(ActorRolloutRefWorker, settings).generate_sequences(given)
    rewards = open_workers(RewardModelWorker, settings, 2)
    scored = rewards.compute_reward(data)
    assert scored.non_tensor_batch["uid"].tolist() == ["t000000001"] * GROUP
    assert scored.meta_info["groups_dropped"] == 1
    with pytest.raises(ScoringError, match=r"no group can be scored: .*nobody can say"):
        rewards.compute_reward(data[:GROUP])


def test_groups_whose_episodes_fail_are_left_out_and_counted(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, "replay.max_attempts=2")
    given = prompts(settings)
    # A prompt that does not fit the engine fails each time.
    given.non_tensor_batch["raw_prompt"][0] = [{"role": "user", "content": "1+" * 200}]
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = policy.generate_sequences(given)
    assert data.non_tensor_batch["uid"].tolist() == ["t000000001"] * GROUP
    assert data.meta_info["groups_dropped"] == 1
    with pytest.raises(Exception, match="no group is complete"):
        policy.generate_sequences(given[:GROUP])


def test_a_run_that_resumes_from_a_checkpoint_ends_with_the_same_weights(open_workers: Open, tmp_path: Path) -> None:
    # One episode at a time: else the last bits of log-probs depend on which episodes happen to be in one pass.
    settings = config(tmp_path, "engine.slots=1", "actor.concurrency=1")

    def train(policy: Any, rewards: Any, first: int, last: int, folder: Path) -> None:
        feed, algorithm = PromptFeed(settings, first), open_algorithm(settings)
        for _ in range(first, last):
            data = rewards.compute_reward(policy.generate_sequences(feed.next().repeat(GROUP)))
            policy.update_actor(compute_advantage(data, algorithm))
        policy.save_checkpoint(str(folder))

    rewards = open_workers(RewardModelWorker, settings)
    whole, first, second = (open_workers(ActorRolloutRefWorker, settings) for _ in range(3))
    assert whole.load_checkpoint(str(tmp_path / "none")) == 0
    train(whole, rewards, 0, 2, tmp_path / "whole")
    train(first, rewards, 0, 1, tmp_path / "parts")
    assert second.load_checkpoint(str(tmp_path / "parts")) == 1
    train(second, rewards, 1, 2, tmp_path / "parts")
    expected, found = weights(tmp_path / "whole"), weights(tmp_path / "parts")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_critic_tells_values_and_is_trained_on_returns(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, "algorithm=ppo", "critic.lr=0.01")
    policy = open_workers(ActorRolloutRefWorker, settings)
    critic = open_workers(CriticWorker, settings)
    data = open_workers(RewardModelWorker, settings).compute_reward(policy.generate_sequences(prompts(settings)))
    data = data.union(policy.compute_log_prob(data)).union(critic.compute_values(data))
    assert (data.batch["values"] == 0).all(), "the head of a new critic is zero"
    data = compute_advantage(data, open_algorithm(settings))
    sampled = data.batch["response_mask"].bool()

    def error() -> float:
        values = critic.compute_values(data).batch["values"]
        return float((values - data.batch["returns"])[sampled].square().mean())

    before = error()
    for _ in range(5):
        metrics = critic.update_critic(data).meta_info["metrics"]
    assert metrics["critic/grad_norm"] > 0
    assert error() < before
    critic.save_checkpoint(str(tmp_path / "critic"))
    assert critic.load_checkpoint(str(tmp_path / "critic")) == 5


def test_an_algorithm_that_reads_a_named_score_gets_it_from_every_row_or_names_what_is_missing(
    open_workers: Open, tmp_path: Path
) -> None:
    words = ("algorithm.proximal=recompute", "algorithm.advantage={name: gdpo, params: {weights: {style: 1.0}}}")
    settings = config(tmp_path, *words)
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = policy.generate_sequences(prompts(settings))
    data = data.union(policy.compute_log_prob(data))
    data.batch["token_level_scores"] = data.batch["response_mask"].float()
    with pytest.raises(DataProtoError, match=r"reads the scores \['style'\].*add the missing scores to `extra_scores`"):
        compute_advantage(data, open_algorithm(settings))
    styles = [{"style": float(row)} for row in range(len(data))]
    data.non_tensor_batch["extra_scores"] = np.array(styles, dtype=object)
    assert compute_advantage(data, open_algorithm(settings)).batch["advantages"].count_nonzero()


def test_what_an_operator_lacks_is_named_with_the_operator_that_gives_it(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, "learner.minibatches=2", KL)
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = policy.generate_sequences(prompts(settings))
    algorithm = open_algorithm(settings)
    with pytest.raises(DataProtoError, match=r"needs old_log_probs.* call compute_log_prob"):
        compute_advantage(data, algorithm)
    data = data.union(policy.compute_log_prob(data))
    with pytest.raises(DataProtoError, match=r"needs ref_log_prob.* call compute_ref_log_prob"):
        compute_advantage(data, algorithm)
    data = data.union(policy.compute_ref_log_prob(data))
    with pytest.raises(DataProtoError, match="no token_level_scores: call compute_reward"):
        compute_advantage(data, algorithm)
    with pytest.raises(WorkerError, match="no advantages: call compute_advantage"):
        policy.update_actor(data)
    with pytest.raises(DataProtoError, match="no uid"):
        policy.generate_sequences(DataProto(None, {"raw_prompt": np.array([[]], dtype=object)}))


def test_configurations_that_workers_cannot_have_are_refused(open_workers: Open, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs no critic"):
        LocalWorkerGroup(ClassWithInitArgs(CriticWorker, config(tmp_path)))
    with pytest.raises(WorkerError, match="as processes of one machine: use RayWorkerGroup"):
        open_workers(ActorRolloutRefWorker, config(tmp_path), 2)
    servers = config(tmp_path, "engine=sglang", "engine.urls=[http://127.0.0.1:1]")
    with pytest.raises(WorkerError, match=r"engine\.kind=sglang: workers generate with the embedded engine"):
        open_workers(ActorRolloutRefWorker, servers)
    shown = config(tmp_path, "algorithm.sft.path=shown.parquet")
    with pytest.raises(ConfigError, match=r"algorithm\.sft\.path: operators cannot train on demonstrations"):
        LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, shown))
    with pytest.raises(WorkerError, match=r"balance_weight=0\.5: experts of a qwen3 model cannot be balanced"):
        open_workers(ActorRolloutRefWorker, config(tmp_path, "algorithm.balance_weight=0.5"))


def test_the_biases_of_a_mixture_move_as_in_a_run(open_workers: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, "algorithm.balance_bias_rate=0.5")
    settings.model.path = str(save_mixture(tmp_path / "mixture", "glm4_moe", vocab_size=VOCABULARY))
    build_tokenizer().save_pretrained(settings.model.path)
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = open_workers(RewardModelWorker, settings).compute_reward(policy.generate_sequences(prompts(settings)))
    data = compute_advantage(data.union(policy.compute_log_prob(data)), open_algorithm(settings))
    policy.update_actor(data)
    policy.save_checkpoint(str(tmp_path / "saved"))
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = load_file(tmp_path / "mixture" / "model.safetensors")[bias]
    moved = (weights(tmp_path / "saved")[f"policy/weights/model.{bias}"] - before).abs()
    assert set(moved.round(decimals=4).tolist()) <= {0.0, 0.5}
    assert moved.any()


def test_an_adaptive_kl_goes_from_the_advantages_to_the_loss(open_workers: Open, tmp_path: Path) -> None:
    settings = config(
        tmp_path, "algorithm.kl={name: k1, params: {weight: 0.5, place: reward, target: 0.1, horizon: 8}}"
    )
    policy = open_workers(ActorRolloutRefWorker, settings)
    data = open_workers(RewardModelWorker, settings).compute_reward(policy.generate_sequences(prompts(settings)))
    data = data.union(policy.compute_log_prob(data)).union(policy.compute_ref_log_prob(data))
    data = compute_advantage(data, open_algorithm(settings))
    weight = data.meta_info["algorithm_state"]["kl_weight"]
    assert weight != 0.5
    assert policy.update_actor(data).meta_info["metrics"]["kl_reference/weight"] == weight


def test_batches_are_shared_out_evenly_with_the_rows_of_a_trajectory_together() -> None:
    names = np.array(["a", "a", "a", "b", "c"], dtype=object)
    data = DataProto(None, {"trajectory_id": names})
    assert evenly(data, 2) == [0, 2, 5]
    assert by_trajectory(data, 2) == [0, 3, 5]
    assert by_trajectory(data, 4) == [0, 0, 3, 4, 5]
    assert by_trajectory(data[:0], 2) == [0, 0, 0]
