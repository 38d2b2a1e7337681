"""Fits models into the memory of a GPU.

The first use of free memory is a share of the activations (model.activations=null). The second is weights and gradients
that are not sharded, so that ranks exchange them less often (learner.exchange=auto, learner.reshard=null).
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
"""The share of free memory that is used; not all of it can be, since memory is fragmented."""
FEW_TOKENS = 64


def usable_bytes(device: torch.device, share: float | None = None) -> float:
    """Return the bytes that this process may allocate on a GPU in total: of free memory, and at most a `share` of
    all."""
    free, total = torch.cuda.mem_get_info(device)
    usable = USABLE * (free + torch.cuda.memory_reserved(device))
    return usable if share is None else min(usable, share * total)


def fit_memory(trainer: Trainer, lengths: Sequence[int], usable: float, activations: float | None = None) -> float:
    """Have all models of `trainer` keep as much of their activations as fits into `usable` bytes of a GPU, unless the
    share of `activations` is given. With the rest of the memory have ranks exchange as rarely as fits, if the
    configuration leaves that open.

    All ranks call this while no optimizer has moments yet. `lengths` has the lengths of the sequences of the largest
    pass. Returns the share that is kept, the same on all ranks.
    """
    # Passes of the policy are tried with nothing kept. Their peak, and the size of the activations, which grows with
    # the tokens, show what fits.
    policy, ranks = trainer.policy.module, trainer.ranks
    models = list(trainer.models.values())
    if activations is not None and not any(each.fits_exchange or each.fits_reshard for each in models):
        return activations
    for each in models:
        each.module.activations.keep(0.0)
    with_entropy = trainer.algorithm.needs_entropy
    # A small pass first: it compiles the layers, and measures their activations.
    for tried in ([FEW_TOKENS], lengths):
        peak = _peak(policy, tried, with_entropy, ranks)
    others = peak + _not_allocated_yet(trainer)
    # All ranks must choose alike, so they use the same numbers.
    room = -ranks.largest(others - usable)
    whole = ranks.largest(policy.activations.nbytes * sum(lengths) / ranks.context_size)
    share = min(1.0, max(0.0, room / whole)) if activations is None else activations
    for each in models:
        each.module.activations.keep(share)
    logger.info(
        "layers keep %.0f%% of their activations: for the largest pass, of %d tokens, they take %.1f GB, all else %.1f "
        "GB, and %.1f GB can be used",
        *(100 * share, sum(lengths), whole / 1e9, others / 1e9, usable / 1e9),
    )
    if others > usable:
        logger.warning("a pass of %d tokens may not fit: lower learner.micro_tokens", sum(lengths))
    fit_exchange(models, room - share * whole)
    return share


def fit_exchange(models: Sequence[Trainable[Any]], room: float) -> None:
    """Have ranks exchange the weights and gradients of `models` as rarely as `room` bytes allow, where the
    configuration leaves that open: once an update, otherwise once a pass for as many layers as fit."""

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
            "ranks exchange weights and gradients %s: after all activations %.1f GB are left; once an update takes "
            "%.1f GB, to gather weights once a pass %.1f GB",
            policy.exchange.described(),
            *(max(0.0, room) / 1e9, once / 1e9, gathered / 1e9),
        )


def tell_exchange(trainer: Trainer) -> None:
    """Log when the ranks exchange weights and gradients on the CPU, where no memory is measured."""
    if trainer.ranks.size > 1 and trainer.ranks.rank == 0:
        logger.info(
            "ranks exchange weights and gradients %s: on the CPU only learner.exchange and learner.reshard change that",
            trainer.policy.exchange.described(),
        )


def _peak(policy: Policy, lengths: Sequence[int], with_entropy: bool, ranks: Ranks) -> int:
    """Measure the most bytes that are allocated during the second of two passes with gradients, which are dropped."""
    device = ranks.device
    ids = torch.arange(sum(lengths)) % policy.vocabulary
    packed = PackedSequences.of(ids.split(list(lengths)))
    packed = (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(device)
    # All passes of an update but the first begin with the gradients of those before.
    for _ in range(2):
        torch.cuda.reset_peak_memory_stats(device)
        logprobs, entropy = policy(packed, with_entropy)
        (logprobs.sum() if entropy is None else (logprobs + entropy).sum()).backward()
    policy.zero_grad()
    return torch.cuda.max_memory_allocated(device)


def _not_allocated_yet(trainer: Trainer) -> int:
    """Return the bytes that training will add: moments, float32 gradients of the other models, and weights and
    gradients that the configuration leaves unsharded."""
    missing = 0
    for model in trainer.models.values():
        missing += model.moment_bytes() + model.exchange_bytes(model.exchange)
        if model is not trainer.policy:
            missing += sum(4 * local_size(each) for each in model.module.parameters() if each.requires_grad)
    return missing
