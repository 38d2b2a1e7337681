"""The worker with the policy and its reference: it generates, computes log-probs, trains and saves the policy."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.compat.verl.controller.modes import Dispatch, register
from asyncrl.compat.verl.controller.operators.advantage import STATE
from asyncrl.compat.verl.controller.operators.generation import (
    DROPPED,
    GeneratedPart,
    PromptSampling,
    generating,
    tickets_of,
)
from asyncrl.compat.verl.controller.operators.parts import in_order, the_first, whole
from asyncrl.compat.verl.controller.operators.plans import Batches, rows_with
from asyncrl.compat.verl.controller.operators.rollout import Rollout
from asyncrl.compat.verl.controller.operators.saving import restored, save
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.compat.verl.fields import require
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.fetching import PackedModel
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.export import export
from asyncrl.learner.checkpoint.gathering import gather_all, plan_gather
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.weights.manifest import DTYPES


@dataclass(frozen=True)
class PolicyParts:
    """Functions that open the parts of a PolicyWorker in the worker's process."""

    join: Callable[[Worker], AbstractContextManager[Ranks]]
    trainer: Callable[[Ranks], Trainer]
    batches: Callable[[Ranks, PackedModel, ForwardFlops], Batches]
    rollout: Callable[[], Rollout]


class PolicyWorker(Worker):
    """A policy and its reference, which are sharded over the workers of a group, and an embedded engine on each worker.

    Call `init_model` before other methods. The engines get the policy's weights every `publish_every` steps.
    """

    def __init__(
        self, parts: PolicyParts, model: ModelConfig, sampling: PromptSampling, seed: int, publish_every: int
    ) -> None:
        super().__init__()
        self._parts = parts
        self._model = model
        self._sampling = sampling
        self._seed = seed
        self._publish_every = publish_every
        self._stack = ExitStack()
        self._step = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models. Raises ConfigError: a model cannot be loaded."""
        self._ranks = self._stack.enter_context(self._parts.join(self))
        self._trainer = self._parts.trainer(self._ranks)
        flops = ForwardFlops.of(self._policy, self._policy.model.config)
        self._batches = self._parts.batches(self._ranks, self._policy, flops)
        self._serve(0)

    @register(dispatch_mode=generating())
    def generate_sequences(self, prompts: DataProto) -> GeneratedPart:
        """Run an episode for each prompt, with tools as in a run. The call returns a batch in verl's layout.

        `prompts` has a row for each member of a group; all members have the same `uid`.
        """
        tickets = tickets_of(prompts, self._sampling, self._rollout.version)
        outcomes = self._rollout.run(tickets)
        tasks = [ticket.task for ticket in tickets]
        return GeneratedPart(outcomes, tasks, self._rollout.pad_token_id, prompts.meta_info)

    @register(dispatch_mode=whole(in_order))
    def compute_log_prob(self, data: DataProto) -> DataProto:
        """The `old_log_probs` of a batch under the current policy, and `collisions` if the algorithm needs them."""
        policy, needs_more = self._policy, self._trainer.algorithm.needs_collisions
        fetched = self._batches.of(data, self._step, trained=False)

        def statistics(packed: PackedSequences) -> Tensor:
            logprobs, more = policy(packed, with_collisions=needs_more)
            return torch.stack([logprobs, logprobs.new_zeros(len(logprobs)) if more is None else more], 1)

        found = self._trainer.forward(statistics, fetched.batch, fetched.minibatches, (2,))
        more = {"collisions": found[:, 1]} if needs_more else {}
        return rows_with(data, fetched, proximal=found[:, 0], **more)

    @register(dispatch_mode=whole(in_order))
    def compute_ref_log_prob(self, data: DataProto) -> DataProto:
        """The `ref_log_prob` of a batch under the reference policy. Raises ConfigError: there is no reference."""
        reference = self._trainer.reference
        if reference is None:
            raise ConfigError("there is no reference policy, since the algorithm needs none: set algorithm.kl")
        fetched = self._batches.of(data, self._step, trained=False)
        found = self._trainer.forward(lambda packed: reference(packed)[0], fetched.batch, fetched.minibatches)
        return rows_with(data, fetched, reference=found)

    @register(dispatch_mode=whole(the_first))
    def update_actor(self, data: DataProto) -> DataProto:
        """Train one learner step on a batch with `advantages`, in `learner.minibatches` updates.

        The result has the step's metrics as `meta_info["metrics"]`.
        """
        require("advantages" in data.batch, "the batch has no advantages: call compute_advantage")
        fetched = self._batches.of(data, self._step, trained=True)
        torch.manual_seed((self._seed << 32) + self._step)
        if STATE in data.meta_info:
            self._trainer.algorithm.restore(data.meta_info[STATE])
        result = self._trainer.learn(self._step, fetched.batch, fetched.episodes, fetched.minibatches)
        self._step += 1
        every = self._publish_every
        if self._step % every == 0:
            self._publish(self._step // every)
        rewards = fetched.episodes.reward
        metrics = {
            "actor/loss": result.loss,
            **dict(zip(["actor/grad_norm"], result.norms[-1:], strict=False)),
            "actor/updates_skipped": float(result.skipped),
            "reward/mean": float(rewards.mean()),
            "outcome/mean": float(fetched.episodes.outcome.mean()),
            "rollout/groups_dropped": float(data.meta_info.get(DROPPED, 0)),
            **result.summary,
        }
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write weights, optimiser state and progress into the folder, and keep earlier checkpoints. Raises OSError."""
        save(local_path, self._ranks, self._trainer.models, self._step, self._trainer.algorithm.state())

    @register(dispatch_mode=whole(the_first))
    def load_checkpoint(self, local_path: str) -> int:
        """Load the newest checkpoint in the folder, and return its number of steps; 0 if there is no checkpoint.

        Raises CheckpointError: the checkpoint is of another model, or all checkpoints are damaged.
        """
        progress = restored(local_path, self._ranks, self._trainer.models)
        if progress is None:
            return 0
        self._step = progress.step
        if progress.algorithm:
            self._trainer.algorithm.restore(progress.algorithm)
        # An engine refuses a version older than its own, so a new engine serves the checkpoint.
        self._rollout.close()
        self._serve(self._step // self._publish_every)
        return self._step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, local_path: str) -> None:
        """Write the policy as a Hugging Face folder. Raises OSError."""
        export(self._policy, self._model, Path(local_path), self._ranks, threading.Event())

    def close(self) -> None:
        if hasattr(self, "_rollout"):
            self._rollout.close()
        self._stack.close()

    @property
    def _policy(self) -> Policy:
        return self._trainer.policy.module

    def _serve(self, version: int) -> None:
        self._rollout = self._parts.rollout()
        self._publish(version)

    def _publish(self, version: int) -> None:
        """Push the policy's weights to the engine of every worker."""
        policy, dtype = self._policy, DTYPES[self._model.dtype]
        tensors = gather_all(policy.model, policy.weight_format, dtype, self._ranks)
        if self._ranks.size > 1:
            for step in plan_gather(policy.weight_format, dtype):
                for entry in step.bucket.entries:
                    tensor = tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype]))
                    dist.broadcast(tensor, 0)
        self._rollout.update(version, tensors)
