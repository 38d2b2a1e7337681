"""The worker with the policy and its reference: it generates, computes log-probs, trains and saves the policy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.modes import Dispatch, register
from asyncrl.compat.verl.controller.operators.advantage import STATE
from asyncrl.compat.verl.controller.operators.generation import (
    DROPPED,
    GeneratedPart,
    PromptSampling,
    generated,
    generating,
)
from asyncrl.compat.verl.controller.operators.parts import in_order, the_first, whole
from asyncrl.compat.verl.controller.operators.plans import Batches, rows_with
from asyncrl.compat.verl.controller.operators.rollout import Rollout
from asyncrl.compat.verl.controller.operators.saving import restored, save
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError, EngineError
from asyncrl.learner.batch.fetching import FetchedBatch, PackedModel
from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.checkpoint.export import export
from asyncrl.learner.checkpoint.gathering import gather_all, plan_gather
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.trainer import Trainer
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.types import NO_VERSION
from asyncrl.weights.manifest import DTYPES

ACTOR, ROLLOUT, REF = "actor", "rollout", "ref"
ROLES = ("actor", "rollout", "ref", "actor_rollout", "actor_rollout_ref")
"""verl's roles of a worker. A role has the names of the worker's parts, joined by `_`."""


@dataclass(frozen=True)
class PolicyParts:
    """Functions that open the parts of a PolicyWorker in the worker's process."""

    join: Callable[[Worker], AbstractContextManager[Ranks]]
    trainer: Callable[[Ranks, bool], Trainer]
    """The trainer also has the reference policy if the second argument is true and the algorithm needs one."""
    reference: Callable[[Ranks], Policy]
    batches: Callable[[Ranks, PackedModel, ForwardFlops], Batches]
    rollout: Callable[[], Rollout]
    sampling: PromptSampling


class PolicyWorker(Worker):
    """A worker with the parts that `role` names. `role` is one of ROLES.

    - actor: the policy, which is trained
    - rollout: an embedded engine on each worker
    - ref: the reference policy

    Policy and reference are sharded over the workers of a group. Call `init_model` before other methods. The engine of
    a worker that also has the actor gets the policy's weights every `publish_every` steps.

    Raises ConfigError: the role does not exist.
    """

    def __init__(self, parts: PolicyParts, model: ModelConfig, role: str, seed: int, publish_every: int) -> None:
        super().__init__()
        if role not in ROLES:
            raise ConfigError(f"role={role} does not exist; the roles are {', '.join(ROLES)}")
        self._parts = parts
        self._model = model
        self._role = role
        self._seed = seed
        self._publish_every = publish_every
        self._stack = ExitStack()
        self._step = 0
        self._served_step = -1
        self._own_trainer: Trainer | None = None
        self._own_rollout: Rollout | None = None
        self._lone_reference: Policy | None = None

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the models. Raises ConfigError: a model cannot be loaded."""
        parts = self._role.split("_")
        if parts != [ROLLOUT]:
            self._ranks = self._stack.enter_context(self._parts.join(self))
            if ACTOR in parts:
                self._own_trainer = self._parts.trainer(self._ranks, REF in parts)
                policy = self._policy
            else:
                policy = self._lone_reference = self._parts.reference(self._ranks)
            self._batches = self._parts.batches(self._ranks, policy, ForwardFlops.of(policy, policy.model.config))
        if ROLLOUT in parts:
            self._own_rollout = self._parts.rollout()
            if ACTOR in parts:
                self._publish(0)

    @register(dispatch_mode=generating())
    def generate_sequences(self, prompts: DataProto) -> GeneratedPart:
        """Run an episode for each prompt, with tools as in a run. The call returns a batch in verl's layout.

        `prompts` has a row for each member of a group; all members have the same `uid`.
        """
        if self._rollout.version == NO_VERSION:
            raise EngineError("the engine has no weights yet: call update_weights")
        return generated(prompts, self._parts.sampling, self._rollout)

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
        lone = self._lone_reference
        if lone is not None:
            fetched = self._batches.of(data, self._step, trained=False)
            return rows_with(data, fetched, reference=_logprobs(lone, fetched, self._ranks))
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
        trainer = self._trainer
        require("advantages" in data.batch, "the batch has no advantages: call compute_advantage")
        fetched = self._batches.of(data, self._step, trained=True)
        torch.manual_seed((self._seed << 32) + self._step)
        if STATE in data.meta_info:
            trainer.algorithm.restore(data.meta_info[STATE])
        result = trainer.learn(self._step, fetched.batch, fetched.episodes, fetched.minibatches)
        self._step += 1
        every = self._publish_every
        if self._own_rollout is not None and self._step % every == 0:
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

    @register(dispatch_mode=whole(the_first))
    def get_weights(self) -> dict[str, Tensor]:
        """The policy's weights in the published format, on the CPU, for `update_weights` of workers that only generate.

        The names are those of the model's Hugging Face folder.
        """
        policy = self._policy
        return gather_all(policy.model, policy.weight_format, DTYPES[self._model.dtype], self._ranks)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def update_weights(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Let the engine of every worker serve `weights`. None means the weights of the workers' own policy.

        Raises WeightsError: names or shapes differ from the model's. Raises ConfigError: the role has no engine, or
        `weights` is None and the role has no policy.
        """
        rollout = self._rollout
        if weights is not None:
            rollout.update(rollout.version + 1, dict(weights))
            self._served_step = -1
        elif self._served_step != self._step:
            self._publish(0)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write weights, optimiser state and progress into the folder, and keep earlier checkpoints. Raises OSError."""
        trainer = self._trainer
        save(local_path, self._ranks, trainer.models, self._step, trainer.algorithm.state())

    @register(dispatch_mode=whole(the_first))
    def load_checkpoint(self, local_path: str) -> int:
        """Load the newest checkpoint in the folder, and return its number of steps; 0 if there is no checkpoint.

        Raises CheckpointError: the checkpoint is of another model, or all checkpoints are damaged.
        """
        trainer = self._trainer
        progress = restored(local_path, self._ranks, trainer.models)
        if progress is None:
            return 0
        self._step = progress.step
        if progress.algorithm:
            trainer.algorithm.restore(progress.algorithm)
        if self._own_rollout is not None:
            # An engine refuses a version older than its own, so a new engine serves the checkpoint.
            self._own_rollout.close()
            self._own_rollout = self._parts.rollout()
            self._publish(self._step // self._publish_every)
        return self._step

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, local_path: str) -> None:
        """Write the policy as a Hugging Face folder. Raises OSError."""
        policy = self._policy
        export(policy, self._model, Path(local_path), self._ranks, threading.Event())

    def close(self) -> None:
        if self._own_rollout is not None:
            self._own_rollout.close()
        self._stack.close()

    @property
    def _trainer(self) -> Trainer:
        if self._own_trainer is None:
            raise ConfigError(f"role={self._role}: this worker has no policy to train; use a role with {ACTOR}")
        return self._own_trainer

    @property
    def _rollout(self) -> Rollout:
        if self._own_rollout is None:
            raise ConfigError(f"role={self._role}: this worker has no engine; use a role with {ROLLOUT}")
        return self._own_rollout

    @property
    def _policy(self) -> Policy:
        return self._trainer.policy.module

    def _publish(self, version: int) -> None:
        """Push the policy's weights to the engine of every worker. Their version is `version`, but at least one above
        the engine's version."""
        policy, dtype = self._policy, DTYPES[self._model.dtype]
        tensors = gather_all(policy.model, policy.weight_format, dtype, self._ranks)
        if self._ranks.size > 1:
            for step in plan_gather(policy.weight_format, dtype):
                for entry in step.bucket.entries:
                    tensor = tensors.setdefault(entry.name, torch.empty(entry.shape, dtype=DTYPES[entry.dtype]))
                    dist.broadcast(tensor, 0)
        self._rollout.update(max(version, self._rollout.version + 1), tensors)
        self._served_step = self._step


@torch.no_grad()
def _logprobs(policy: Policy, fetched: FetchedBatch, ranks: Ranks) -> Tensor:
    """The log-probs float32[N] of this rank's tokens."""
    behaviour = fetched.batch.tokens.behaviour
    found = torch.zeros_like(behaviour)
    for minibatch in fetched.minibatches:
        for members in minibatch.passes:
            this = fetched.batch.forward_pass(members)
            this = (this.padded() if policy.pads_passes else this).to(ranks.device)
            values, _ = policy(this.packed)
            if len(this.rows):
                found[this.rows] = values
    return found
