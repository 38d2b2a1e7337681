"""A module with its AdamW: one careful update."""

from __future__ import annotations

import logging
from typing import Generic, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config.schema import LearnerConfig

logger = logging.getLogger(__name__)


M = TypeVar("M", bound=nn.Module)


class Optimised(Generic[M]):
    """`module`, sharded or not, and its optimiser with the learning rate `lr` after warm-up."""

    def __init__(self, module: M, lr: float, config: LearnerConfig) -> None:
        self.module = module
        betas = (config.betas[0], config.betas[1])
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=lr, betas=betas, weight_decay=config.weight_decay, fused=True
        )
        self._lr = lr
        self._config = config

    def learning_rate(self, step: int) -> float:
        """That of a learner step: linear warm-up, then constant."""
        warmup = self._config.warmup_steps
        return self._lr * min(1.0, (step + 1) / warmup if warmup else 1.0)

    def update(self, step: int) -> float:
        """Clip and apply the gradient, and forget it; its norm before clipping.

        One that is not finite, or exactly 0, changes nothing: AdamW would still move the weights by its momentum.
        """
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        total = get_total_norm([each.grad for each in parameters if each.grad is not None])
        norm = total.full_tensor() if isinstance(total, DTensor) else total
        if norm.isfinite() and norm > 0:
            clip_grads_with_norm_(parameters, self._config.max_grad_norm, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.learning_rate(step)
            self.optimizer.step()
        else:
            logger.warning("the gradient norm is %s: no update of %s", norm.item(), type(self.module).__name__)
        self.optimizer.zero_grad()
        return norm.item()
