"""Compiles the layers while the engines generate the first episodes (model.compile).

Torch compiles two graphs for each kind of layer: one for passes with gradients, and one for passes without gradients.
All layers of the kind use these two graphs. Torch keeps compiled graphs on disk, so a later learner with the same
layers reads them from there.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Iterator, MutableMapping
from dataclasses import replace
from pathlib import Path

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


CACHE_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
CACHE = "~/.cache/asyncrl/compiled"
"""The folder of compiled layers, unless `CACHE_VARIABLE` names another. Torch finds an entry by the version of torch,
the GPU, and the layer's code and shapes. An entry appears whole or not at all, so several learners may share the
folder."""


def keep_compiled(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let torch keep compiled layers in the folder `CACHE`. Torch's own choice is a folder for temporary files: another
    user can make this folder first, and a restart of the machine deletes it."""
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    # When its compiler is imported, torch sets the variable to its own choice. A child process inherits this value.
    chosen = default_cache_dir()
    if environment.get(CACHE_VARIABLE, chosen) != chosen:
        return
    try:
        folder = Path(CACHE).expanduser()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(folder)
    # `expanduser` raises RuntimeError if HOME is not set, and the system's list of users does not have this user.
    except (OSError, RuntimeError) as error:
        logger.warning(
            "compiled layers are kept in a folder for temporary files, since %s cannot be used: %s; %s names another",
            *(CACHE, error, CACHE_VARIABLE),
        )
    else:
        environment[CACHE_VARIABLE] = str(folder)


def _check_owner(folder: Path) -> None:
    """Raises PermissionError: this user may not write into the folder, or others may. Torch unpickles what it finds
    there."""
    status = folder.stat()
    if not os.access(folder, os.W_OK | os.X_OK):
        raise PermissionError(f"you may not write into {folder}")
    if status.st_uid != os.getuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may write into {folder}")


def compile_passes(
    trainer: Trainer, share_prefixes: bool, longest: int, largest: int, has_scores: bool = False
) -> None:
    """Compile the layers of the policy and of the reference for training, before the first step.

    Sequences have up to `longest` tokens, and passes up to `largest`. `has_scores` says that the policy makes passes
    without gradients even if the algorithm needs no such passes. All ranks call this. It drops the gradients that it
    computes. Raises StoppedError on all ranks: the trainer's `stop` was set.
    """
    # Makes a pass of every kind here. Each kind needs its own kernels, and compiling kernels in a step would hold up
    # that step for seconds. Passes differ in kind if only one has gradients, or if one has far more tokens. Shared
    # prefixes change only the operator of attention, so a single pass with shared prefixes is enough.
    policy, algorithm, ranks = trainer.policy.module, trainer.algorithm, trainer.ranks
    if ranks.rank == 0:
        logger.info(
            "compiling the layers, which takes up to two minutes, or seconds if an earlier start left them in %s "
            "(model.compile)",
            os.environ.get(CACHE_VARIABLE, "torch's cache"),
        )
    needs_scores = algorithm.needs_proximal or algorithm.needs_collisions or has_scores
    kept = policy.activations.share
    # The largest pass might not fit if its activations are kept. A layer that keeps no activations runs the same
    # kernels as a layer that keeps all. It only runs them once more in the backward pass.
    policy.activations.keep(0.0)
    with unmeasured_work("compiling the layers", ranks.activity):
        for tokens in _sizes(min(largest, MOST * ranks.context_size)):
            shares = tokens == min(FEWEST, largest) and share_prefixes and policy.shares_prefixes
            for sharing in (None, EVERY) if shares else (None,):
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
    """Yield numbers of tokens up to `largest`, two for each doubling. Every range of numbers for which torch uses the
    same kernels contains one of the yielded numbers."""
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
