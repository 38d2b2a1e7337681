"""The worker with the critic: it computes values, trains the critic and saves it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.algorithm import Algorithm
from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.metrics import return_sums
from asyncrl.algorithms.policy_tokens import PolicyTokens
from asyncrl.compat.verl.batches.fields import require
from asyncrl.compat.verl.batches.protocol import DataProto
from asyncrl.compat.verl.controller.modes import Dispatch, register
from asyncrl.compat.verl.controller.operators.parts import in_order, the_first, whole
from asyncrl.compat.verl.controller.operators.plans import Batches, rows_with
from asyncrl.compat.verl.controller.operators.saving import restored, save
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.learner.batch.fetching import FetchedBatch, PackedModel
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.packing import ForwardPass
from asyncrl.learner.model.critic import Critic, critic_summary
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.learner.step_result import add_gradient
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.modelling.packed_attention import PACKED


@dataclass(frozen=True)
class _CriticModel:
    """The properties of a critic that the learner's batch code reads."""

    critic: Critic

    @property
    def vocabulary(self) -> int:
        return int(self.critic.decoder.config.get_text_config().vocab_size)

    @property
    def shares_prefixes(self) -> bool:
        return bool(self.critic.decoder.config._attn_implementation == PACKED)

    @property
    def replays(self) -> None:
        return None

    @property
    def vision(self) -> None:
        return None


@dataclass(frozen=True)
class CriticParts:
    """Functions that open the parts of a ValueWorker in the worker's process."""

    join: Callable[[Worker], AbstractContextManager[Ranks]]
    critic: Callable[[Ranks], Trainable[Critic]]
    batches: Callable[[Ranks, PackedModel, ForwardFlops], Batches]


class ValueWorker(Worker):
    """A critic, which is sharded over the workers of a group. Call `init_model` before other methods."""

    def __init__(self, parts: CriticParts, algorithm: Algorithm) -> None:
        super().__init__()
        self._parts = parts
        self._algorithm = algorithm
        self._stack = ExitStack()
        self._step = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the critic. Raises ConfigError: it cannot be loaded."""
        self._ranks = self._stack.enter_context(self._parts.join(self))
        self._critic = self._parts.critic(self._ranks)
        critic = self._critic.module
        flops = ForwardFlops.of(critic, critic.decoder.config)
        self._batches = self._parts.batches(self._ranks, _CriticModel(critic), flops)

    @register(dispatch_mode=whole(in_order))
    def compute_values(self, data: DataProto) -> DataProto:
        """The `values` of a batch's tokens."""
        fetched = self._batches.of(data, self._step, trained=False)
        found = torch.zeros_like(fetched.batch.tokens.behaviour)
        with torch.no_grad():
            for minibatch in fetched.minibatches:
                for this in self._passes(fetched, minibatch):
                    values = self._critic.module(this.packed)
                    if len(this.rows):
                        found[this.rows] = values
        return rows_with(data, fetched, values=found)

    @register(dispatch_mode=whole(the_first))
    def update_critic(self, data: DataProto) -> DataProto:
        """Train on a batch with `returns`, in `learner.minibatches` updates."""
        for name in ("values", "returns"):
            require(name in data.batch, f"the batch has no {name}: call compute_values, then compute_advantage")
        fetched = self._batches.of(data, self._step, trained=True)
        sums: dict[str, Tensor] = {}
        norms = []
        for minibatch in fetched.minibatches:
            for name, value in self._add_gradients(fetched, minibatch).items():
                sums[name] = sums[name] + value if name in sums else value
            norms.append(self._critic.update(self._step).norm)
        self._step += 1
        metrics = {"critic/grad_norm": norms[-1], **critic_summary(self._ranks.merge(sums))}
        return DataProto(meta_info={"metrics": metrics})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(self, local_path: str) -> None:
        """Write weights, optimiser state and progress into the folder, and keep earlier checkpoints. Raises OSError."""
        save(local_path, self._ranks, {"critic": self._critic}, self._step, {})

    @register(dispatch_mode=whole(the_first))
    def load_checkpoint(self, local_path: str) -> int:
        """Load the newest checkpoint in the folder, and return its number of steps; 0 if there is no checkpoint.

        Raises CheckpointError: the checkpoint is of another model, or all checkpoints are damaged.
        """
        progress = restored(local_path, self._ranks, {"critic": self._critic})
        self._step = progress.step if progress is not None else 0
        return self._step

    def close(self) -> None:
        self._stack.close()

    def _passes(self, fetched: FetchedBatch, minibatch: Minibatch) -> list[ForwardPass]:
        return [fetched.batch.forward_pass(members).to(self._ranks.device) for members in minibatch.passes]

    def _add_gradients(self, fetched: FetchedBatch, minibatch: Minibatch) -> dict[str, Tensor]:
        """Add the gradients of a minibatch, and return the sums of its metrics."""
        sums: dict[str, Tensor] = {}
        passes = self._passes(fetched, minibatch)
        for number, this in enumerate(passes, 1):
            self._critic.begin_pass(is_last=number == len(passes))
            tokens = replace(fetched.batch.tokens.select(this.rows), view=this.view)
            values = self._critic.module(this.packed)

            def loss(values: Tensor = values, tokens: Tokens = tokens) -> tuple[Tensor, dict[str, Tensor]]:
                value, sums = self._algorithm.value_loss(values, tokens, minibatch.totals)
                return value, {**sums, **return_sums(PolicyTokens.of(tokens), tokens)}

            for name, value in add_gradient(self._critic, values, this.rows, loss).items():
                value = value.detach().double()
                sums[name] = sums[name] + value if name in sums else value
        return sums
