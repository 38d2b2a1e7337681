"""Fits models into the memory of a GPU.

With model.activations=null, layers keep as many activations as fit into free memory. As many weights and gradients as
fit into the rest of the memory stay unsharded, so that ranks exchange them less often (learner.exchange=auto,
learner.reshard=null).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.model.optimizer import Exchange, Trainable
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.ranks.ranks import Ranks, local_size
from asyncrl.learner.trainer import Trainer

logger = logging.getLogger(__name__)

USABLE = 0.92
"""The share of free memory that is used. Memory is fragmented, so not all of it can be used."""
FEW_TOKENS = 64


def usable_bytes(device: torch.device, share: float | None = None) -> float:
    """Return the bytes that this process may allocate on a GPU in total: most of the memory that other processes leave
    free, but at most a `share` of the GPU's memory."""
    free, total = torch.cuda.mem_get_info(device)
    usable = USABLE * (free + torch.cuda.memory_reserved(device))
    return usable if share is None else min(usable, share * total)


def fit_memory(trainer: Trainer, lengths: Sequence[int], usable: float, activations: float | None = None) -> float:
    """Set the share of activations that all models of `trainer` keep: `activations` if it is given, else the largest
    share that fits into `usable` bytes of a GPU. Then choose how rarely ranks exchange weights and gradients, by the
    memory that is left.

    All ranks call this before the first step. `lengths` has the lengths of the sequences of the largest
    pass. Returns the share that is kept, the same on all ranks.
    """
    # First measures passes in which the policy keeps no activations: their peak of memory, and the bytes of activations
    # that each token would have.
    policy, ranks = trainer.policy.module, trainer.ranks
    models = list(trainer.models.values())
    if activations is not None and not any(each.fits_exchange or each.fits_reshard for each in models):
        return activations
    for each in models:
        each.module.activations.keep(0.0)
    with_entropy = trainer.algorithm.needs_entropy
    # Runs a small pass first, which compiles the layers and measures their activations.
    for tried in ([FEW_TOKENS], lengths):
        peak = _peak(policy, tried, with_entropy, ranks)
    others = peak + _not_allocated_yet(trainer)
    # All ranks must make the same choice, so they use the same numbers.
    room = -ranks.largest(others - usable)
    whole = ranks.largest(policy.activations.nbytes * sum(lengths) / ranks.context_size)
    share = min(1.0, max(0.0, room / whole)) if activations is None else activations
    for each in models:
        each.module.activations.keep(share)
    logger.info(
        "layers keep %.0f%% of their activations: in the largest pass, of %d tokens, all activations would take %.1f "
        "GB; everything else takes %.1f GB, and %.1f GB can be used",
        *(100 * share, sum(lengths), whole / 1e9, others / 1e9, usable / 1e9),
    )
    if others > usable:
        logger.warning("a pass of %d tokens might not fit into memory: lower learner.micro_tokens", sum(lengths))
    fit_exchange(models, room - share * whole)
    return share


def fit_exchange(models: Sequence[Trainable[Any]], room: float) -> None:
    """Choose how rarely ranks exchange the weights and gradients of `models`, if the configuration leaves that open.
    They exchange once an update if that fits into `room` bytes. If it does not fit, they exchange in every pass, and as
    many layers as fit gather their weights only once a pass."""

    def needed(exchange: Exchange) -> int:
        return sum(model.exchange_bytes(exchange) for model in models)

    once, gathered = needed(Exchange(once=True)), needed(Exchange(reshard=0.0))
    shares = (percent / 100 for percent in range(101))
    reshard = next((share for share in shares if needed(Exchange(reshard=share)) <= room), 1.0)
    for model in models:
        model.fitted = Exchange(once <= room, reshard)
    policy = models[0]
    if policy.fits_exchange or (policy.fits_reshard and not policy.exchange.once):
        logger.info(
            "ranks exchange weights and gradients %s: activations leave %.1f GB; to exchange once an update takes "
            "%.1f GB, to gather weights once a pass %.1f GB",
            policy.exchange.described(),
            *(max(0.0, room) / 1e9, once / 1e9, gathered / 1e9),
        )


def tell_exchange(trainer: Trainer) -> None:
    """Log how often the ranks exchange weights and gradients, for a run on the CPU. Memory is not measured there."""
    if trainer.ranks.size > 1 and trainer.ranks.rank == 0:
        logger.info(
            "ranks exchange weights and gradients %s: on the CPU only learner.exchange and learner.reshard change that",
            trainer.policy.exchange.described(),
        )


def _peak(policy: Policy, lengths: Sequence[int], with_entropy: bool, ranks: Ranks) -> int:
    """Measure the peak of allocated bytes in the second of two forward and backward passes. Drops their gradients."""
    device = ranks.device
    ids = torch.arange(sum(lengths)) % policy.vocabulary
    packed = PackedSequences.of(ids.split(list(lengths)))
    packed = (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(device)
    # Measures the second pass: like most passes of an update, it begins with the gradients of earlier passes in memory.
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        logprobs, entropy = policy(packed, with_entropy)
        (logprobs.sum() if entropy is None else (logprobs + entropy).sum()).backward()
    policy.zero_grad()
    return torch.cuda.max_memory_allocated(device)


def _not_allocated_yet(trainer: Trainer) -> int:
    """Return the bytes that training will add: optimizer moments, float32 gradients of all models but the policy, and
    weights and gradients that the configuration leaves unsharded."""
    missing = 0
    for model in trainer.models.values():
        missing += model.moment_bytes() + model.exchange_bytes(model.exchange)
        if model is not trainer.policy:
            missing += sum(4 * local_size(each) for each in model.module.parameters() if each.requires_grad)
    return missing
