"""A model that is trained: its gradients become updates, with the learning rate of a schedule.

What an update does depends on the gradient, the optimizer's moments, the configuration and the learner step alone, so a
resumed run needs no state of the schedule.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config.schema import LearnerConfig

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """What became of a gradient: its norm before clipping, and whether learner.skip_grad_norm left the update out."""

    norm: float
    too_large: bool = False


class Trainable(Generic[M]):
    """`module`, sharded or not, with an optimizer. `lr` is the learning rate that the schedule scales."""

    def __init__(self, module: M, lr: float, config: LearnerConfig) -> None:
        self.module = module
        self.optimizer = torch.optim.AdamW(_groups(module), fused=True)
        self.configure(lr, config)

    def configure(self, lr: float, config: LearnerConfig) -> None:
        """Use these values from the next update on. The optimizer's moments stay."""
        self._lr = lr
        self._config = config
        for group in self.optimizer.param_groups:
            group["betas"] = (config.betas[0], config.betas[1])
            group["weight_decay"] = config.weight_decay if group["decays"] else 0.0

    def learning_rate(self, step: int) -> float:
        """The learning rate of a learner step."""
        return self._lr * lr_scale(self._config, step)

    def update(self, step: int) -> UpdateResult:
        """Clip and apply the gradient, and clear it.

        A gradient that is not finite, too large, or exactly 0, changes nothing: the optimizer would still move the
        weights by its momentum.
        """
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        total = get_total_norm([each.grad for each in parameters if each.grad is not None])
        total = total.full_tensor() if isinstance(total, DTensor) else total
        norm, largest = total.item(), self._config.skip_grad_norm
        update = UpdateResult(norm, largest is not None and largest < norm < math.inf)
        if not math.isfinite(norm) or update.too_large:
            logger.warning("the gradient norm is %s: no update of %s", norm, type(self.module).__name__)
        elif norm > 0:
            clip_grads_with_norm_(parameters, self._config.max_grad_norm, total)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return update


def lr_scale(config: LearnerConfig, step: int) -> float:
    """The share of the full learning rate at a learner step: a linear warm-up, then what `config.schedule` says."""
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    done = min(1.0, (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps))
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    return config.lr_floor + (1 - config.lr_floor) * falling


def _groups(module: nn.Module) -> Iterator[dict[str, Any]]:
    """The parameters with weight decay, and those without."""
    named = list(module.named_parameters())
    for decays in (True, False):
        parameters = [each for name, each in named if has_weight_decay(name, each) is decays]
        if parameters:
            yield {"params": parameters, "decays": decays}


def has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """Whether weight decay holds for a parameter: for matrices, embeddings and stacked experts among them, and neither
    for norms nor for biases, which mixtures of experts stack as matrices."""
    return parameter.dim() > 1 and "bias" not in name
