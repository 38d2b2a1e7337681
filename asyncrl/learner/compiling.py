"""Compiling the layers before the first batch is there (model.compile)."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from asyncrl.learner.packing import PackedSequences
from asyncrl.learner.prefixes import EVERY
from asyncrl.learner.trainer import Trainer
from asyncrl.machine.long_work import unmeasured_work

logger = logging.getLogger(__name__)

PREFIX, ENDS = 64, (5, 11, 19)
"""Tokens that sequences have in common which are only computed so that layers are compiled, and of the rest of each. A
compiler may take sizes that are equal here for sizes that are always equal, so no two are."""


def compile_passes(trainer: Trainer, share_prefixes: bool) -> None:
    """Compile the policy's layers for training, while actors still sample the first batch. Passes that share prefixes
    have graphs of their own: compiled when the first of them came, they held up some later step for seconds.

    All ranks call this. Gradients are dropped.
    """
    policy = trainer.policy.module
    device = next(policy.parameters()).device
    if trainer.ranks.rank == 0:
        logger.info("the first passes compile the layers, which takes up to some minutes (model.compile)")
    sequences = [torch.cat([torch.arange(PREFIX), torch.full((end,), end)]) % policy.vocabulary for end in ENDS]
    with unmeasured_work("compiling the layers", trainer.ranks.activity):
        for sharing in (None, EVERY) if share_prefixes and policy.shares_prefixes else (None,):
            packed = PackedSequences.of(sequences, sharing)
            if policy.replays is not None:
                packed = replace(packed, routing=torch.from_numpy(policy.replays.missing(len(packed.ids))))
            packed = (packed.padded() if policy.pads_passes else packed).divided(trainer.ranks.context).to(device)
            logprobs, entropy = policy(packed, trainer.algorithm.needs_entropy)
            (logprobs.sum() if entropy is None else (logprobs + entropy).sum()).backward()
    policy.zero_grad()
