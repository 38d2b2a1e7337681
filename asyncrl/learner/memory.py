"""How much of the activations fits into the memory of a GPU (model.activations=null)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.policy import Policy
from asyncrl.learner.ranks import Ranks, local_size
from asyncrl.learner.trainer import Trainer

logger = logging.getLogger(__name__)

USABLE = 0.92
"""The share of free memory that is used: its pieces do not always fit."""
FEW_TOKENS = 64


def usable_bytes(device: torch.device, share: float | None = None) -> float:
    """How much memory of a GPU this process may allocate in total: of what is free, and at most a `share` of all."""
    free, total = torch.cuda.mem_get_info(device)
    usable = USABLE * (free + torch.cuda.memory_reserved(device))
    return usable if share is None else min(usable, share * total)


def fit_activations(trainer: Trainer, lengths: Sequence[int], usable: float) -> float:
    """Have all models of `trainer` keep as much of their activations as fits into `usable` bytes of a GPU.

    All ranks call this while no optimizer has moments yet. Passes of the policy over sequences of these `lengths`, the
    largest that there will be, are tried with nothing kept. Their peak and the size of the activations, which grows
    with the tokens, say what fits. Returns the share that is kept, the same on all ranks.
    """
    policy, ranks = trainer.policy.module, trainer.ranks
    for each in trainer.models.values():
        each.module.activations.keep(0.0)
    with_entropy = trainer.algorithm.needs_entropy
    # A small pass first: it compiles the layers, and measures their activations.
    for tried in ([FEW_TOKENS], lengths):
        peak = _peak(policy, tried, with_entropy, ranks)
    others = peak + _not_allocated_yet(trainer)
    whole = policy.activations.nbytes * sum(lengths) / ranks.context_size
    fitting = min(1.0, max(0.0, (usable - others) / whole))
    share = float(ranks.sum(torch.eye(ranks.size, dtype=torch.float64)[ranks.rank] * fitting).min())
    for each in trainer.models.values():
        each.module.activations.keep(share)
    logger.info(
        "layers keep %.0f%% of their activations: for the largest pass, of %d tokens, they take %.1f GB, all else %.1f "
        "GB, and %.1f GB can be used",
        *(100 * share, sum(lengths), whole / 1e9, others / 1e9, usable / 1e9),
    )
    if others > usable:
        logger.warning("a pass of %d tokens may not fit: lower learner.micro_tokens", sum(lengths))
    return share


def _peak(policy: Policy, lengths: Sequence[int], with_entropy: bool, ranks: Ranks) -> int:
    """The most bytes that are allocated during the second of two passes with gradients, which are dropped."""
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
    """Bytes of moments, and of float32 gradients of the other models, that training will add. With
    learner.exchange=update it adds all gradients, and all weights in at most four bytes; with learner.reshard below 1
    some of the weights."""
    missing = 0
    for model in trainer.models.values():
        parameters = list(model.module.parameters())
        missing += model.moment_bytes()
        if model is not trainer.policy:
            missing += sum(4 * local_size(parameter) for parameter in parameters if parameter.requires_grad)
        if model.exchanges_once:
            missing += sum((8 if each.requires_grad else 4) * each.numel() for each in parameters)
        else:
            missing += model.gathered_bytes()
    return missing
