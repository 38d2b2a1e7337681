"""Turns the gradients of a model into updates, with the learning rate of a schedule.

An update depends only on the gradient, the optimizer's moments, the configuration and the learner step. So a resumed
run needs no state of the schedule.
"""

from __future__ import annotations

import logging
import math
import re
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from asyncrl.config.schema import LearnerConfig
from asyncrl.errors import ConfigError
from asyncrl.learner.model.loss_scale import LossScale
from asyncrl.learner.model.muon import ShardedMuon
from asyncrl.learner.model.states_on_host import step_with_states_on_host
from asyncrl.learner.model.tensor_slices import Slices
from asyncrl.learner.ranks.ranks import local_size
from asyncrl.weights.manifest import DTYPES

logger = logging.getLogger(__name__)

M = TypeVar("M", bound=nn.Module)

NORMS = 64
"""A gradient is too large if its norm exceeds learner.skip_grad_norm_factor times the median of the latest norms. This
is the maximum number of norms in the median."""
FEWEST_NORMS = 8


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """The result of an update. `norm` is the norm of the gradient before clipping. No weight changes if the gradient
    was `too_large`, or `overflowed` in float16. An overflow also lowers the loss scale.
    """

    norm: float
    too_large: bool = False
    overflowed: bool = False

    @property
    def is_applied(self) -> bool:
        """True if the gradient moved the weights."""
        return 0 < self.norm < math.inf and not self.too_large


@dataclass(frozen=True, slots=True)
class Exchange:
    """The rule by which ranks exchange the weights and gradients of a model: `once` in an update, or in each pass. In a
    pass, a share `reshard` of the layers gathers its weights twice, for the forward and for the backward pass. The
    other layers gather their weights once."""

    once: bool = False
    reshard: float = 1.0

    def described(self) -> str:
        """Return a text for people that completes "ranks exchange weights and gradients"."""
        if self.once:
            return "once an update"
        return f"in each pass, and gather the weights of {self.reshard:.0%} of the layers twice"


class Trainable(Generic[M]):
    """A `module`, sharded or not, with its optimizers. `lr` is the learning rate that the schedule scales, and `dtype`
    the type in which the module computes.

    Raises ConfigError: the optimizer's package is not installed.
    """

    def __init__(self, module: M, lr: float, config: LearnerConfig, dtype: str = "float32") -> None:
        self.module = module
        self.loss_scale = LossScale() if dtype == "float16" else None
        """The scale of the losses before the backward pass. None: the gradients need no scale."""
        self._ranks = _ranks_of(module)
        self._itemsize = DTYPES[dtype].itemsize
        self.fitted = Exchange()
        """The rule of exchange that fits into memory, for learner.exchange=auto and learner.reshard=null."""
        self.norms: deque[float] = deque(maxlen=NORMS)
        """The latest gradient norms. They include the norms of gradients that were too large, so that the limit adapts
        if gradients stay larger."""
        self.copied: torch.cuda.Event | None = None
        """The GPU event at the end of a checkpoint's copy of weights and moments. An update waits for this event before
        it changes weights or moments."""
        self._optimizers = list(_optimizers(module, config.optimizer))
        self._states_on_host = config.optimizer_on_host
        self.configure(lr, config)

    def configure(self, lr: float, config: LearnerConfig) -> None:
        """Use these values from the next update on. The moments, their device and the kind of optimizer do not
        change."""
        self._lr = lr
        self._config = config
        for group in self._groups():
            values = {"betas": tuple(config.betas), "momentum": config.momentum}
            group.update({key: value for key, value in values.items() if key in group})
            group["weight_decay"] = config.weight_decay if group["decays"] else 0.0

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def moments(self) -> dict[str, dict[str, Tensor]]:
        """Return the optimizer's state of each parameter that was updated, by the name of the parameter."""
        states = {each: state for optimizer in self._optimizers for each, state in optimizer.state.items()}
        return {name: states[each] for name, each in self.module.named_parameters() if each in states}

    def moment_bytes(self) -> int:
        """Return the bytes of device memory that this rank's moments will take in addition to those that exist, once
        all parameters have moments."""
        if self._states_on_host:
            return 0
        sizes = {"AdamW": 8, "ShardedMuon": 4, "AdamW8bit": 2}
        return sum(
            sizes[type(optimizer).__name__] * local_size(parameter)
            for optimizer in self._optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter not in optimizer.state
        )

    def begin_moments(self, names: Collection[str]) -> None:
        """Make moments for the parameters `names`, into which stored moments can be loaded, and drop all others. No
        weight changes."""
        for optimizer in self._optimizers:
            optimizer.state.clear()
        for name, parameter in self.module.named_parameters():
            parameter.grad = torch.zeros_like(parameter) if name in names else None
        self._step(0.0)

    def _step(self, lr: float) -> None:
        if self.copied is not None:
            torch.cuda.current_stream().wait_event(self.copied)
            self.copied = None
        for group in self._groups():
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
        for optimizer in self._optimizers:
            if self._states_on_host:
                step_with_states_on_host(optimizer)
            else:
                optimizer.step()
        self.module.zero_grad()

    @property
    def exchange(self) -> Exchange:
        """The rule by which ranks exchange weights and gradients."""
        config, fitted = self._config, self.fitted
        once = fitted.once if config.exchange == "auto" else config.exchange == "update"
        return Exchange(once, fitted.reshard if config.reshard is None else config.reshard)

    @property
    def fits_exchange(self) -> bool:
        """True if `fitted` decides whether ranks exchange once per update."""
        return self._config.exchange == "auto"

    @property
    def fits_reshard(self) -> bool:
        """True if `fitted` decides how many layers drop their gathered weights."""
        return self._config.reshard is None

    def exchange_bytes(self, exchange: Exchange) -> int:
        """Return the maximum number of bytes of device memory that unsharded weights and gradients take. Layers that
        are gathered only while they run are not counted."""
        apart = {each for module in self.module.modules() for each in _gathered_by_itself(module)}
        parameters = [each for each in self.module.parameters() if each not in apart]
        if exchange.once:
            return sum((self._itemsize + (4 if each.requires_grad else 0)) * each.numel() for each in parameters)
        units = self._units()
        kept = self._gathered(units, exchange)
        dropped = {each for unit in units if unit not in kept for layer in unit for each in layer.parameters()}
        gathered = [each for each in parameters if kept and each not in dropped]
        return self._itemsize * sum(each.numel() for each in gathered)

    def _units(self) -> list[list[Any]]:
        """Return the sharded layers. Layers that are gathered together form one list."""
        units: dict[int, list[Any]] = {}
        for each in self.module.modules():
            if isinstance(each, FSDPModule) and each is not self.module:
                units.setdefault(id(each._get_fsdp_state()), []).append(each)
        return list(units.values())

    def _gathered(self, units: list[list[Any]], exchange: Exchange) -> list[list[Any]]:
        """Return the units that keep their gathered weights from a forward to its backward pass."""
        return units[math.ceil(exchange.reshard * len(units)) :]

    def begin_pass(self, is_last: bool) -> None:
        """Prepare a forward and backward pass of an update. After the last pass this rank has its shard of the
        gradients, summed over all passes and ranks."""
        if isinstance(self.module, FSDPModule):
            exchange = self.exchange
            exchanges = is_last or not exchange.once
            self.module.set_requires_gradient_sync(exchanges)
            self.module.set_reshard_after_forward(not exchange.once)
            # If any layer keeps its weights, so does the root, whose backward pass comes first.
            if kept := self._gathered(self._units(), exchange):
                for each in (self.module, *(unit[0] for unit in kept)):
                    each.set_reshard_after_forward(False, recurse=False)
            self.module.set_reshard_after_backward(exchanges)

    def _end_passes(self) -> None:
        """Let passes without gradients drop their gathered weights from now on, since no backward pass follows them."""
        if isinstance(self.module, FSDPModule):
            self.module.set_reshard_after_forward(True)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a learner step."""
        return self._lr * lr_scale(self._config, step)

    def update(self, step: int, scale: float = 1.0) -> UpdateResult:
        """Clip and apply the gradient, and clear it. `scale` multiplies the learning rate.

        A gradient that is too large, exactly 0, or not finite is skipped. Even with a gradient of 0, the optimizer
        would move the weights by its momentum. The loss scale adapts to the gradient.
        """
        parameters = [each for each in self.module.parameters() if each.grad is not None]
        self._unscale(parameters)
        total = get_total_norm([each.grad for each in parameters if each.grad is not None])
        total = total.full_tensor() if isinstance(total, DTensor) else total
        norm, (largest, key) = total.item(), self._largest_norm()
        overflowed = self.loss_scale is not None and self.loss_scale.follow(math.isfinite(norm))
        update = UpdateResult(norm, largest < norm < math.inf, overflowed)
        if 0 < norm < math.inf:
            self.norms.append(norm)
        if self.loss_scale is not None and overflowed:
            logger.info("a gradient overflowed float16: no update, the loss scale is now %g", self.loss_scale.scale)
        elif not math.isfinite(norm) or update.too_large:
            why = f"above {largest:.4g} ({key})" if update.too_large else "not finite"
            model = type(self.module).__name__.removeprefix("FSDP").lower()
            logger.warning("the gradient norm %.4g is %s: no update of the %s", norm, why, model)
        elif norm > 0:
            clip_grads_with_norm_(parameters, self._config.max_grad_norm, total)
            self._step(scale * self.learning_rate(step))
        self.module.zero_grad()
        self._end_passes()
        return update

    @property
    def loss_factor(self) -> float:
        """The factor of a rank's loss before the backward pass. It turns FSDP's mean over the ranks into a sum."""
        # In float16, `update` multiplies the gradients by the number of ranks instead: a loss times this number would
        # make the gradients overflow sooner.
        return float(self._ranks) if self.loss_scale is None else self.loss_scale.scale

    def _unscale(self, parameters: Collection[nn.Parameter]) -> None:
        if self.loss_scale is not None and parameters:
            gradients = [each.grad for each in parameters if each.grad is not None]
            torch._foreach_mul_(gradients, self._ranks / self.loss_scale.scale)

    def _largest_norm(self) -> tuple[float, str]:
        """Return the largest norm with which a gradient is still applied, and the option that sets this limit."""
        absolute, factor = self._config.skip_grad_norm, self._config.skip_grad_norm_factor
        limits = [(math.inf if absolute is None else absolute, "learner.skip_grad_norm")]
        if factor is not None and len(self.norms) >= FEWEST_NORMS:
            limits.append((factor * median(self.norms), "learner.skip_grad_norm_factor"))
        return min(limits)


def _gathered_by_itself(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters of spread experts and divided matrices, whose modules gather them in each pass."""
    if hasattr(module, "spread") or isinstance(getattr(module, "slices", None), Slices):
        yield from module.parameters(recurse=False)


def _ranks_of(module: nn.Module) -> int:
    """Return the number of ranks over which FSDP takes the mean of a module's gradients."""
    return max((each.device_mesh.size() for each in module.parameters() if isinstance(each, DTensor)), default=1)


def lr_scale(config: LearnerConfig, step: int) -> float:
    """Return the share of the full learning rate at a learner step: a linear warm-up, then `config.schedule`. A
    falling rate reaches `config.lr_floor` after the last step."""
    given = config.warmup_steps
    warmup = given if given >= 1 else round(given * config.total_steps)
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, config.total_steps - warmup))
    falling = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[config.schedule]
    return config.lr_floor + (1 - config.lr_floor) * falling


def check_optimizer(name: str) -> None:
    """Raises ConfigError: the optimizer's package is not installed."""
    if name == "adamw_8bit" and find_spec("torchao") is None:
        raise ConfigError("learner.optimizer=adamw_8bit needs the extra: pip install 'asyncrl[adamw-8bit]'")


def _optimizers(module: nn.Module, name: str) -> Iterator[torch.optim.Optimizer]:
    """Make the optimizer `name` for the matrices that it supports, and AdamW for all other parameters."""
    check_optimizer(name)
    rest = {name: each for name, each in module.named_parameters() if each.requires_grad}
    takes = {"adamw": lambda *_: False, "adamw_8bit": has_weight_decay, "muon": _is_inner_matrix}[name]
    if matrices := [rest.pop(each) for each in list(rest) if takes(each, rest[each])]:
        yield _matrix_optimizer(name, [{"params": matrices, "decays": True}])
    groups: list[dict[str, Any]] = [{"params": [], "decays": decays} for decays in (True, False)]
    for each, parameter in rest.items():
        groups[0 if has_weight_decay(each, parameter) else 1]["params"].append(parameter)
    yield torch.optim.AdamW(groups, fused=True)


def _matrix_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    if name == "muon":
        return ShardedMuon(groups)
    from torchao.optim import AdamW8bit

    optimizer: torch.optim.Optimizer = AdamW8bit(groups)
    return optimizer


def has_weight_decay(name: str, parameter: nn.Parameter) -> bool:
    """True if a parameter has weight decay: matrices, embeddings and stacked experts have it; norms and biases do
    not."""
    # Mixtures of experts stack biases as matrices.
    return parameter.dim() > 1 and "bias" not in name


def _is_inner_matrix(name: str, parameter: nn.Parameter) -> bool:
    """True if a parameter is a matrix within one of the layers, which a model keeps in a numbered list."""
    return parameter.dim() == 2 and has_weight_decay(name, parameter) and re.search(r"\.\d+\.", name) is not None
