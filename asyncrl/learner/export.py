"""The trained policy as a Hugging Face folder, with its tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from asyncrl.config.schema import ModelConfig
from asyncrl.learner.backbone import DTYPES, full_tensors
from asyncrl.learner.policy import Policy
from asyncrl.learner.ranks import Ranks


def export(policy: Policy, config: ModelConfig, folder: Path, ranks: Ranks) -> None:
    """Write `folder` anew, parameters in the compute dtype; it appears whole, under its name, or not at all."""
    tensors = full_tensors(policy.model, policy.published, DTYPES[config.dtype], ranks)
    if ranks.rank == 0:
        aside = folder.with_name(f".tmp-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        # They are as files have them already.
        policy.model.save_pretrained(aside, state_dict=tensors, save_original_format=False)
        tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
        tokenizer.save_pretrained(aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    ranks.barrier()


def described(config: ModelConfig) -> Callable[[Path], None]:
    """What writes the files of a Hugging Face folder other than its weights, which are in the compute dtype."""
    model = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    model.dtype = config.dtype
    tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return write
