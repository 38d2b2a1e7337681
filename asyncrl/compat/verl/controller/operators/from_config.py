"""The operators that take a run's configuration: verl's workers, the feed of prompts, and the algorithm.

Each class gives its base class plain values, and functions that open a model or an engine in the worker's process.
"""

from __future__ import annotations

import threading
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

from asyncrl.actor.from_config import open_runner
from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.from_config import label_needs
from asyncrl.chat.from_config import open_chat
from asyncrl.compat.verl.controller.operators.critic import CriticParts, ValueWorker
from asyncrl.compat.verl.controller.operators.generation import PromptSampling
from asyncrl.compat.verl.controller.operators.joining import joined_workers
from asyncrl.compat.verl.controller.operators.plans import Batches
from asyncrl.compat.verl.controller.operators.policy import ROLES, PolicyParts, PolicyWorker
from asyncrl.compat.verl.controller.operators.prompts import TaskPrompts
from asyncrl.compat.verl.controller.operators.reward import RewardWorker
from asyncrl.compat.verl.controller.operators.rollout import Rollout, RolloutLimits
from asyncrl.config.schema import TrainConfig
from asyncrl.data.from_config import run_tasks
from asyncrl.engine.base import Engine
from asyncrl.engine.from_config import open_engine
from asyncrl.episode.episode import EpisodeRunner
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.batches import BatchSource
from asyncrl.learner.batch.fetching import BatchFetcher, PackedModel
from asyncrl.learner.batch.settings import BatchSettings
from asyncrl.learner.model.critic import Critic, load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.model.policy import Policy, load_policy, load_reference, reference_of
from asyncrl.learner.model.router_balance import Balance
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.tools.offered import Offer
from asyncrl.tools.prompts import measured


class ActorRolloutRefWorker(PolicyWorker):
    """The policy of `config`, the reference policy if the algorithm needs one, and an embedded engine on each worker.

    The models are sharded over the workers of a group. Call `init_model` before other methods. The engines get new
    weights in `load_checkpoint`, in every `learner.publish_every`-th `update_actor`, and by `update_weights`.

    `role` is one of ROLES, and names the worker's parts: `actor` is the policy, `rollout` the engine, `ref` the
    reference. A worker with `role="ref"` has the reference even if the algorithm needs none.
    """

    def __init__(self, config: TrainConfig, role: str = ROLES[-1]) -> None:
        if config.implicit.train:
            raise ConfigError(
                "implicit.train=true: operators cannot train an implicit process model; use `asyncrl train`"
            )
        if config.learner.router_replay:
            raise ConfigError("learner.router_replay=true: operators cannot replay routed experts; use `asyncrl train`")
        if config.algorithm.sft.path:
            raise ConfigError(
                "algorithm.sft.path: operators cannot train on demonstrations; use `asyncrl sft` first, or "
                "`asyncrl train`"
            )
        super().__init__(policy_parts(config), config.model, role, config.run.seed, config.learner.publish_every)


class CriticWorker(ValueWorker):
    """The critic of `config`, which is sharded over the workers of a group. Call `init_model` before other methods.

    Raises ConfigError: the algorithm needs no critic, or `critic.shared` is true.
    """

    def __init__(self, config: TrainConfig) -> None:
        algorithm, learner = open_algorithm(config), config.learner
        if not algorithm.needs_critic:
            raise ConfigError(
                f"algorithm.advantage={config.algorithm.advantage.name} needs no critic: leave this worker out, or set "
                "algorithm.advantage=gae"
            )
        if config.critic.shared:
            raise ConfigError("critic.shared=true: this worker trains a separate critic; set critic.shared=false")

        def critic(ranks: Ranks) -> Trainable[Critic]:
            loaded = load_critic(config.critic, config.model, ranks, config.actor.max_tokens, config.run.seed)
            return Trainable(loaded, config.critic.lr, learner, config.model.dtype)

        parts = policy_parts(config)
        super().__init__(CriticParts(parts.join, critic, parts.batches), algorithm)


class RewardModelWorker(RewardWorker):
    """The rules and models of `scoring` in `config`.

    `workers_per_model` workers form one data-parallel rank. In each rank, only the worker that collects loads the rules
    and models, and scores a part of a batch. The others get and return no rows. Call `init_model` before other methods.
    """

    def __init__(self, config: TrainConfig, workers_per_model: int = 1) -> None:
        super().__init__(config.scoring, config.model, config.replay.max_attempts, workers_per_model)


class PromptFeed(TaskPrompts):
    """The tasks of `data.train`, in the order in which the replay of a run with this configuration feeds them. If
    `data.filter_overlong` is true, it first measures all prompts, and leaves out tasks whose prompts are too long.

    `step` is the number of learner steps whose tasks are skipped, for a program that resumes.

    Raises ConfigError: `data.band` or `data.demonstration` is set: both need a replay. Raises DataError: the tasks
    cannot be used.
    """

    def __init__(self, config: TrainConfig, step: int = 0) -> None:
        data, groups = config.data, config.learner.batch_size // config.learner.group_size
        if data.band:
            raise ConfigError("data.band needs the success rates of tasks, which a replay keeps: set data.band=null")
        if data.demonstration is not None:
            raise ConfigError(
                "only a replay can add demonstrations: set data.demonstration=null, and add them yourself"
            )
        tasks = run_tasks(config).all(data.train)
        if data.filter_overlong and data.max_prompt_length is not None:
            tasks = tasks.left(measured(open_chat(config), Offer(config.actor), tasks) <= data.max_prompt_length)
        super().__init__(tasks, groups, config.run.seed, data.shuffle, data.weights, step)


def open_algorithm(config: TrainConfig) -> Algorithm:
    """The algorithm of a configuration, for `compute_advantage`.

    Use the same object in every step: it holds the adaptive KL coefficient. Raises ConfigError: parts conflict.
    """
    return Algorithm.from_config(config.algorithm, config.learner.minibatches)


def policy_parts(config: TrainConfig) -> PolicyParts:
    """Functions that open the parts of the worker with the policy. The worker with the critic uses two of them."""
    settings, needs = BatchSettings.of(config.learner, config.algorithm), label_needs(config.algorithm)
    # A program may drop the greedy rows once advantages are computed. Then the first row of a group is not greedy.
    settings = replace(settings, greedy_sibling=False)
    temperature, length = config.actor.temperature, config.actor.max_tokens

    def trainer(ranks: Ranks, with_reference: bool) -> Trainer:
        algorithm, learner = open_algorithm(config), config.learner
        policy = load_policy(config.model, temperature, ranks, length, seed=config.run.seed)
        reference = None
        if with_reference and algorithm.needs_reference:
            reference = reference_of(policy, config.model, temperature, ranks, length, learner.reference_on_host)
        trainable = Trainable(policy, learner.lr, learner, config.model.dtype)
        balance = Balance.from_config(config.algorithm, policy.model)
        return Trainer(ranks, algorithm, trainable, None, reference, threading.Event(), balance=balance)

    def reference(ranks: Ranks) -> Policy:
        return load_reference(config.model, temperature, ranks, length, config.learner.reference_on_host)

    async def player(stack: AsyncExitStack) -> tuple[Engine, EpisodeRunner]:
        engine = open_engine(config).engine
        stack.push_async_callback(engine.close)
        return engine, await open_runner(config, engine, stack)

    def rollout() -> Rollout:
        if config.engine.kind != "embedded":
            raise ConfigError(
                f"engine.kind={config.engine.kind}: workers generate with the embedded engine, set "
                "engine.kind=embedded; `asyncrl train` uses servers"
            )
        actor = config.actor
        at_once = actor.at_once(config.learner.batch_size)
        return Rollout(player, RolloutLimits(at_once, config.replay.max_attempts, actor.episode_timeout_s))

    def batches(ranks: Ranks, model: PackedModel, flops: ForwardFlops) -> Batches:
        def fetcher(source: BatchSource) -> BatchFetcher:
            return BatchFetcher(lambda _: settings, config.learner.total_steps, ranks, model, flops, source)

        return Batches(fetcher, needs, ranks)

    join = partial(joined_workers, learner=config.learner, threads=config.cluster.learner_threads)
    sampling = PromptSampling(temperature, config.algorithm.greedy_sibling)
    return PolicyParts(join, trainer, reference, batches, rollout, sampling)
