"""The worker with the critic: tells values, and is trained and saved."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from asyncrl.algorithms.batch import Tokens
from asyncrl.algorithms.metrics import return_sums
from asyncrl.algorithms.view import View
from asyncrl.compat.verl.controller.modes import Dispatch, register
from asyncrl.compat.verl.controller.operators.advantage import open_algorithm
from asyncrl.compat.verl.controller.operators.joining import joined_workers
from asyncrl.compat.verl.controller.operators.parts import in_order, the_first, whole
from asyncrl.compat.verl.controller.operators.plans import Batches, rows_with
from asyncrl.compat.verl.controller.operators.saving import restored, save
from asyncrl.compat.verl.controller.worker import Worker
from asyncrl.compat.verl.fields import require
from asyncrl.compat.verl.protocol import DataProto
from asyncrl.config.schema import TrainConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.batch.fetching import FetchedBatch
from asyncrl.learner.batch.minibatch import Minibatch
from asyncrl.learner.batch.packing import ForwardPass
from asyncrl.learner.model.critic import Critic, critic_summary, load_critic
from asyncrl.learner.model.optimizer import Trainable
from asyncrl.learner.step_result import add_gradient
from asyncrl.modelling.flops import ForwardFlops
from asyncrl.modelling.packed_attention import PACKED


@dataclass(frozen=True)
class _CriticModel:
    """What batches need to know of a critic."""

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


class CriticWorker(Worker):
    """The critic of `config`, which the workers of a group hold together. `init_model` comes first.

    Raises ConfigError: the algorithm needs no critic.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__()
        self._config = config
        self._algorithm = open_algorithm(config)
        if not self._algorithm.needs_critic:
            raise ConfigError(
                f"algorithm.advantage={config.algorithm.advantage.name} needs no critic: leave this worker out, or set "
                "algorithm.advantage=gae"
            )
        if config.critic.shared:
            raise ConfigError("critic.shared=true: this worker has a critic of its own; set it to false")
        self._stack = ExitStack()
        self._step = 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the critic. Raises ConfigError: it cannot be used."""
        config = self._config
        self._ranks = self._stack.enter_context(joined_workers(self, config))
        critic = load_critic(config.critic, config.model, self._ranks, config.actor.max_tokens, config.run.seed)
        self._critic = Trainable(critic, config.critic.lr, config.learner, config.model.dtype)
        flops = ForwardFlops.of(critic, critic.decoder.config)
        self._batches = Batches(config, self._ranks, _CriticModel(critic), flops)

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
        """As many updates on a batch with returns as `learner.minibatches` says."""
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
        """Write weights, optimiser state and progress into the folder, where those of earlier steps stay. Raises
        OSError."""
        save(local_path, self._ranks, {"critic": self._critic}, self._step, {})

    @register(dispatch_mode=whole(the_first))
    def load_checkpoint(self, local_path: str) -> int:
        """Go on from the newest checkpoint in the folder; returns how many steps it has, 0 where there is none. Raises
        CheckpointError: it is of another model, or all are damaged."""
        progress = restored(local_path, self._ranks, {"critic": self._critic})
        self._step = progress.step if progress is not None else 0
        return self._step

    def close(self) -> None:
        self._stack.close()

    def _passes(self, fetched: FetchedBatch, minibatch: Minibatch) -> list[ForwardPass]:
        return [fetched.batch.forward_pass(members).to(self._ranks.device) for members in minibatch.passes]

    def _add_gradients(self, fetched: FetchedBatch, minibatch: Minibatch) -> dict[str, Tensor]:
        """Add the gradients of a minibatch; the sums of its metrics."""
        sums: dict[str, Tensor] = {}
        passes = self._passes(fetched, minibatch)
        for number, this in enumerate(passes, 1):
            self._critic.begin_pass(is_last=number == len(passes))
            tokens = replace(fetched.batch.tokens.select(this.rows), view=this.view)
            values = self._critic.module(this.packed)

            def loss(values: Tensor = values, tokens: Tokens = tokens) -> tuple[Tensor, dict[str, Tensor]]:
                value, sums = self._algorithm.value_loss(values, tokens, minibatch.totals)
                return value, {**sums, **return_sums(View.of(tokens), tokens)}

            for name, value in add_gradient(self._critic, values, this.rows, loss).items():
                value = value.detach().double()
                sums[name] = sums[name] + value if name in sums else value
        return sums
