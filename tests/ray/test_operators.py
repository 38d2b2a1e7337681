"""verl's operators on two Ray workers that hold a policy together: what one worker in this process computes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import torch

from asyncrl.compat.verl import DataProto
from asyncrl.compat.verl.controller import (
    ClassWithInitArgs,
    LocalWorkerGroup,
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
)
from asyncrl.compat.verl.controller.operators import (
    ActorRolloutRefWorker,
    CriticWorker,
    PromptFeed,
    RewardModelWorker,
    compute_advantage,
    open_algorithm,
)
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import WorkerError
from tests.compat.verl.controller.operators.support import GROUP, config

ALONE = ("engine.slots=1", "actor.concurrency=1")
KL = "algorithm.kl={name: k3, params: {weight: 0.1}}"


@pytest.fixture(scope="module")
def pool() -> Iterator[RayResourcePool]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        with RayResourcePool([2], use_gpu=False) as pool:
            yield pool
    finally:
        ray.shutdown()


def scored(policy: Any, rewards: Any, settings: TrainConfig) -> DataProto:
    """A batch of three groups with all that a step needs."""
    prompts = PromptFeed(settings).next(3).repeat(GROUP)
    data: DataProto = rewards.compute_reward(policy.generate_sequences(prompts))
    data = data.union(policy.compute_log_prob(data)).union(policy.compute_ref_log_prob(data))
    return data


def test_two_workers_compute_and_train_what_one_does(pool: RayResourcePool, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = config(tmp_path, KL, *ALONE)
    with (
        LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, settings)) as one,
        LocalWorkerGroup(ClassWithInitArgs(RewardModelWorker, settings)) as rewards,
        RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, settings)) as two,
        RayWorkerGroup(pool, RayClassWithInitArgs(RewardModelWorker, settings)) as two_rewards,
    ):
        for group in (one, rewards, two, two_rewards):
            group.init_model()
        expected, found = scored(one, rewards, settings), scored(two, two_rewards, settings)
        assert found.batch.keys() == expected.batch.keys()
        for name in expected.batch.keys():  # noqa: SIM118
            torch.testing.assert_close(found.batch[name], expected.batch[name])
        assert found.non_tensor_batch["trajectory_id"].tolist() == expected.non_tensor_batch["trajectory_id"].tolist()
        algorithm = open_algorithm(settings)
        metrics = [
            group.update_actor(compute_advantage(data, algorithm)).meta_info["metrics"]
            for group, data in ((one, expected), (two, found))
        ]
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-4, abs=1e-6)
        # Of the weights that were trained, which both engines serve now.
        after = [group.compute_log_prob(expected).batch["old_log_probs"] for group in (one, two)]
        assert not torch.equal(after[0], expected.batch["old_log_probs"])
        torch.testing.assert_close(after[1], after[0], rtol=1e-4, atol=1e-4)
        again = two.generate_sequences(PromptFeed(settings).next(3).repeat(GROUP))
        assert (again.batch["versions"][again.batch["response_mask"].bool()] == 1).all()
        two.save_checkpoint(str(tmp_path / "two"))
        assert one.load_checkpoint(str(tmp_path / "two")) == 1
        reloaded = one.compute_log_prob(expected).batch["old_log_probs"]
        torch.testing.assert_close(reloaded, after[1])


def test_an_error_of_one_worker_ends_a_call_that_the_other_still_computes(
    pool: RayResourcePool, tmp_path: Path
) -> None:
    settings = config(tmp_path)
    with RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, settings)) as policy:
        policy.init_model()
        data = policy.generate_sequences(PromptFeed(settings).next().repeat(GROUP))
        with pytest.raises(WorkerError, match=r"rank . of 2: ActorRolloutRefWorker\.update_actor failed: .*advantages"):
            policy.update_actor(data)


def test_a_critic_on_two_workers_is_trained(pool: RayResourcePool, tmp_path: Path) -> None:
    settings = config(tmp_path, "algorithm=ppo", *ALONE)
    with (
        RayWorkerGroup(pool, RayClassWithInitArgs(ActorRolloutRefWorker, settings)) as policy,
        RayWorkerGroup(pool, RayClassWithInitArgs(CriticWorker, settings)) as critic,
        RayWorkerGroup(pool, RayClassWithInitArgs(RewardModelWorker, settings)) as rewards,
    ):
        for group in (policy, critic, rewards):
            group.init_model()
        data = rewards.compute_reward(policy.generate_sequences(PromptFeed(settings).next().repeat(GROUP)))
        data = data.union(policy.compute_log_prob(data)).union(critic.compute_values(data))
        data = compute_advantage(data, open_algorithm(settings))
        assert critic.update_critic(data).meta_info["metrics"]["critic/grad_norm"] > 0
        assert policy.update_actor(data).meta_info["metrics"]["actor/grad_norm"] > 0
