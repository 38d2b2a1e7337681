"""Compiles the layers before the first batch arrives (model.compile)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from asyncrl.learner.batch.packing import PackedSequences
from asyncrl.learner.batch.prefixes import EVERY
from asyncrl.learner.trainer import Trainer
from asyncrl.machine.long_work import unmeasured_work

logger = logging.getLogger(__name__)

FEWEST, MOST = 64, 8192
"""Layers are compiled for passes of `FEWEST` to `MOST` tokens. If several ranks divide the tokens of a pass, `MOST` is
the limit of each rank's part. Longer passes run the kernels for `MOST` tokens."""


def compile_passes(
    trainer: Trainer, share_prefixes: bool, longest: int, largest: int, has_scores: bool = False
) -> None:
    """Compile the layers of the policy and of the reference for training, before the first weights are published.

    Sequences have up to `longest` tokens, and passes up to `largest`. `has_scores` says that the policy makes passes
    without gradients even if the algorithm needs no such passes. All ranks call this. It drops the gradients that it
    computes. Raises StoppedError on all ranks: the trainer's `stop` was set.
    """
    # Makes a pass of every kind here. Each kind needs its own kernels, and compiling kernels in a step would hold up
    # that step for seconds. Passes differ in kind if only one has shared prefixes or gradients, or if one has far more
    # tokens.
    policy, algorithm, ranks = trainer.policy.module, trainer.algorithm, trainer.ranks
    if ranks.rank == 0:
        logger.info("compiling the layers before the first batch, which takes up to some minutes (model.compile)")
    needs_scores = algorithm.needs_proximal or algorithm.needs_collisions or has_scores
    kept = policy.activations.share
    # The largest pass might not fit if its activations are kept. A layer that keeps no activations runs the same
    # kernels as a layer that keeps all. It only runs them once more in the backward pass.
    policy.activations.keep(0.0)
    with unmeasured_work("compiling the layers", ranks.activity):
        for tokens in _sizes(min(largest, MOST * ranks.context_size)):
            for sharing in (None, EVERY) if share_prefixes and policy.shares_prefixes else (None,):
                ranks.stop_if(trainer.stop.is_set())
                packed = _placed(trainer, PackedSequences.of(_sequences(tokens, longest, policy.vocabulary), sharing))
                logprobs, entropy = policy(packed, algorithm.needs_entropy)
                (logprobs.sum() if entropy is None else (logprobs + entropy).sum()).backward()
                with torch.no_grad():
                    if needs_scores:
                        policy(packed, with_collisions=algorithm.needs_collisions)
                    if trainer.reference is not None:
                        trainer.reference(packed.unrouted())
    policy.activations.keep(kept)
    policy.zero_grad()


def _sizes(largest: int) -> Iterator[int]:
    """Yield numbers of tokens up to `largest`, two for each doubling. Every range of numbers that share a kernel is
    wide enough to contain one of the yielded numbers."""
    size = FEWEST
    while size < largest:
        yield size
        if size * 3 // 2 < largest:
            yield size * 3 // 2
        size *= 2
    yield largest


def _sequences(tokens: int, longest: int, vocabulary: int) -> list[Tensor]:
    """Make at least two sequences of `tokens` tokens in total, which share their first token."""
    count = max(2, -(-tokens // longest))
    lengths = [max(1, tokens // count + (index < tokens % count)) for index in range(count)]
    return [
        torch.cat([torch.zeros(1), torch.arange(length - 1) + index + 1]).long() % vocabulary
        for index, length in enumerate(lengths)
    ]


def _placed(trainer: Trainer, packed: PackedSequences) -> PackedSequences:
    """Return this rank's part of the sequences, in the same form as in a pass that trains."""
    policy, ranks = trainer.policy.module, trainer.ranks
    if policy.replays is not None:
        packed = replace(packed, routing=torch.from_numpy(policy.replays.missing(len(packed.ids))))
    return (packed.padded() if policy.pads_passes else packed).divided(ranks.context).to(ranks.device)
