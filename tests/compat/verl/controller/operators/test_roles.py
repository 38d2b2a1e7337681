"""Workers with a part of the policy, several roles in one process, and the rollout without a worker group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.compat.verl import BaseRollout, DataProto
from asyncrl.compat.verl.controller import ClassWithInitArgs, LocalWorkerGroup, create_colocated_worker_cls
from asyncrl.compat.verl.controller.operators import (
    ActorRolloutRefWorker,
    CriticWorker,
    EngineRollout,
    PromptFeed,
    RewardModelWorker,
    compute_advantage,
    open_algorithm,
    policy_parts,
)
from asyncrl.compat.verl.controller.operators.rollout import Rollout, RolloutLimits
from asyncrl.config.schema import TrainConfig
from asyncrl.data.writing import write_tasks
from asyncrl.engine.base import Engine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import ConfigError, DispatchError, EngineError, WeightsError, WorkerError
from tests.compat.verl.controller.operators.support import config
from tests.helpers import make_task

pytestmark = pytest.mark.slow

KL = "algorithm.kl={name: k3, params: {weight: 0.1}}"
Open = Callable[..., Any]


@pytest.fixture
def open_role() -> Iterator[Open]:
    """Makes a worker of a role, with its models loaded."""
    torch.set_num_threads(1)
    with ExitStack() as stack:

        def make(settings: TrainConfig, role: str) -> Any:
            group: Any = stack.enter_context(
                LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, settings, role=role))
            )
            group.init_model()
            return group

        yield make


def prompts(settings: TrainConfig) -> DataProto:
    return PromptFeed(settings).next().repeat(settings.learner.group_size)


def rewarded(data: DataProto) -> DataProto:
    scores = torch.zeros(data.batch["responses"].shape)
    scores[::2, 0] = 1.0
    data.batch["token_level_scores"] = scores
    return data


def same_tensors(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def test_prompts_that_are_too_long_are_left_out_as_in_a_run(tmp_path: Path) -> None:
    settings = config(tmp_path, "data.max_prompt_length=60", "data.filter_overlong=true")
    long = [{"role": "user", "content": "1+" * 40}]
    tasks = [make_task(0), make_task(1, messages=long), make_task(2)]
    write_tasks(tmp_path / "tasks.parquet", tasks)
    rows = PromptFeed(settings).next(4).non_tensor_batch["raw_prompt"]
    assert {row[0]["content"] for row in rows} == {task.messages[0]["content"] for task in (tasks[0], tasks[2])}


def test_an_actor_a_rollout_and_a_reference_compute_what_one_worker_with_all_roles_computes(
    open_role: Open, tmp_path: Path
) -> None:
    settings = config(tmp_path, KL, "engine.slots=1", "actor.concurrency=1")
    actor, rollout, ref = (open_role(settings, role) for role in ("actor", "rollout", "ref"))
    whole = open_role(settings, "actor_rollout_ref")
    rollout.update_weights(actor.get_weights())
    algorithm = open_algorithm(settings)
    for step in range(2):
        data, expected = (each.generate_sequences(prompts(settings)) for each in (rollout, whole))
        assert torch.equal(data.batch["input_ids"], expected.batch["input_ids"])
        assert data.meta_info["version"] == expected.meta_info["version"] == step
        data = data.union(actor.compute_log_prob(data)).union(ref.compute_ref_log_prob(data))
        expected = expected.union(whole.compute_log_prob(expected)).union(whole.compute_ref_log_prob(expected))
        for name in ("old_log_probs", "ref_log_prob"):
            assert torch.equal(data.batch[name], expected.batch[name])
        actor.update_actor(compute_advantage(rewarded(data), algorithm))
        whole.update_actor(compute_advantage(rewarded(expected), algorithm))
        assert same_tensors(actor.get_weights(), whole.get_weights())
        rollout.update_weights(actor.get_weights())


def test_a_role_refuses_what_it_has_no_part_for(open_role: Open, tmp_path: Path) -> None:
    settings = config(tmp_path)
    rollout, ref, both = (open_role(settings, role) for role in ("rollout", "ref", "actor_rollout"))
    with pytest.raises(WorkerError, match="the engine has no weights yet: call update_weights"):
        rollout.generate_sequences(prompts(settings))
    with pytest.raises(WorkerError, match="role=rollout: this worker has no policy to train; use a role with actor"):
        rollout.save_checkpoint(str(tmp_path / "saved"))
    with pytest.raises(WorkerError, match="role=ref: this worker has no engine; use a role with rollout"):
        ref.generate_sequences(prompts(settings))
    data = both.generate_sequences(prompts(settings))
    with pytest.raises(WorkerError, match="there is no reference policy"):
        both.compute_ref_log_prob(data)
    # The algorithm needs no reference, but a worker of this role has one.
    assert (ref.compute_ref_log_prob(data).batch["ref_log_prob"] < 0).any()
    with pytest.raises(
        ConfigError, match="role=critic does not exist; the roles are actor, rollout, ref, actor_rollout"
    ):
        LocalWorkerGroup(ClassWithInitArgs(ActorRolloutRefWorker, settings, "critic"))


def test_weights_may_be_pushed_between_the_steps_that_publish(open_role: Open, tmp_path: Path) -> None:
    settings = config(tmp_path, "learner.publish_every=2", "learner.steps=4", "learner.checkpoint_every=4")
    worker = open_role(settings, "actor_rollout")
    algorithm = open_algorithm(settings)

    def trained() -> int:
        data = worker.generate_sequences(prompts(settings))
        data = data.union(worker.compute_log_prob(data))
        worker.update_actor(compute_advantage(rewarded(data), algorithm))
        return int(data.meta_info["version"])

    assert trained() == 0
    worker.update_weights()
    worker.update_weights()
    assert trained() == 1, "the same weights are not pushed again"
    assert trained() == 2, "the second step publishes"


def test_roles_in_one_process_train_policy_and_critic(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    settings = config(tmp_path, "algorithm=ppo")
    roles = {
        "actor_rollout": ClassWithInitArgs(ActorRolloutRefWorker, settings, role="actor_rollout"),
        "critic": ClassWithInitArgs(CriticWorker, settings),
        "reward": ClassWithInitArgs(RewardModelWorker, settings),
    }
    with LocalWorkerGroup(create_colocated_worker_cls(roles)) as group:
        groups: Any = group.spawn(roles)
        for each in groups.values():
            each.init_model()
        data = groups["reward"].compute_reward(groups["actor_rollout"].generate_sequences(prompts(settings)))
        data = data.union(groups["actor_rollout"].compute_log_prob(data)).union(groups["critic"].compute_values(data))
        data = compute_advantage(data, open_algorithm(settings))
        assert groups["critic"].update_critic(data).meta_info["metrics"]["critic/grad_norm"] > 0
        assert groups["actor_rollout"].update_actor(data).meta_info["metrics"]["actor/grad_norm"] > 0


def test_a_process_that_holds_a_rank_refuses_to_be_one_of_several(
    open_role: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = config(tmp_path)
    open_role(settings, "actor")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    worker = ActorRolloutRefWorker(settings, "ref")
    with pytest.raises(DispatchError, match="give each role a worker group of its own"):
        worker.init_model()


def test_a_rollout_without_a_group_generates_with_the_weights_that_it_was_given_last(
    open_role: Open, tmp_path: Path
) -> None:
    settings = config(tmp_path, "engine.slots=1", "actor.concurrency=1")
    worker = open_role(settings, "actor_rollout")
    expected, weights = worker.generate_sequences(prompts(settings)), worker.get_weights()
    other = {name: tensor * 1.5 for name, tensor in weights.items()}
    buffer = {name: tensor.clone() for name, tensor in weights.items()}

    async def serve(rollout: EngineRollout) -> None:
        await rollout.update_weights((name, tensor) for name, tensor in other.items())
        changed = rollout.generate_sequences(prompts(settings))
        assert not torch.equal(changed.batch["rollout_log_probs"], expected.batch["rollout_log_probs"])
        await rollout.release()
        with pytest.raises(EngineError, match="kv_cache, weights: this memory is released; call resume"):
            rollout.generate_sequences(prompts(settings))
        with pytest.raises(EngineError, match="the memory of the weights is released"):
            await rollout.update_weights(iter(weights.items()))
        await rollout.resume(["weights"])
        await rollout.update_weights(((name, tensor) for name, tensor in buffer.items()), global_steps=7)
        for tensor in buffer.values():
            tensor.zero_()  # A trainer may gather the next weights into the same memory.
        with pytest.raises(EngineError, match="kv_cache: this memory is released"):
            rollout.generate_sequences(prompts(settings))
        await rollout.resume(tags=["kv_cache"])

    with EngineRollout(policy_parts(settings)) as rollout:
        assert isinstance(rollout, BaseRollout)
        with pytest.raises(EngineError, match="the engine has no weights: call update_weights"):
            rollout.generate_sequences(prompts(settings))
        asyncio.run(serve(rollout))
        data = rollout.generate_sequences(prompts(settings))
        assert (rollout.version, data.meta_info["version"]) == (7, 7)
        for name in ("input_ids", "rollout_log_probs"):
            assert torch.equal(data.batch[name], expected.batch[name])
    with pytest.raises(EngineError, match="the rollout is closed; make another one"):
        rollout.generate_sequences(prompts(settings))


def test_a_rollout_refuses_weights_and_tags_that_it_cannot_take(tmp_path: Path) -> None:
    with EngineRollout(policy_parts(config(tmp_path))) as rollout:
        with pytest.raises(WeightsError, match="tensors are missing or unknown, the first is"):
            asyncio.run(rollout.update_weights(iter([("unknown", torch.zeros(1))])))
        assert rollout.version == -1
        with pytest.raises(ConfigError, match="wire_format=delta_flush: give all weights as named_tensors"):
            asyncio.run(rollout.update_weights(iter([]), wire_format="delta_flush"))
        with pytest.raises(ConfigError, match="merge adapters into the weights"):
            asyncio.run(rollout.update_weights(iter([]), peft_config={"r": 8}))
        with pytest.raises(ConfigError, match="bucket: weights are updated without such arguments"):
            asyncio.run(rollout.update_weights(iter([]), bucket=1))
        with pytest.raises(ConfigError, match=r"tags=\['gpu'\]: the tags are weights and kv_cache"):
            asyncio.run(rollout.resume(["gpu"]))
    closed = list[bool]()

    async def fail(stack: AsyncExitStack) -> tuple[Engine, EpisodeRunner]:
        stack.callback(closed.append, True)
        raise ConfigError("no such tool")

    with pytest.raises(ConfigError, match="no such tool"):
        Rollout(fail, RolloutLimits(1, 1, 1.0))
    assert closed == [True]
    servers = config(tmp_path, "engine=sglang", "engine.urls=[http://127.0.0.1:1]")
    with pytest.raises(ConfigError, match=r"engine\.kind=sglang: workers generate with the embedded engine"):
        EngineRollout(policy_parts(servers))
