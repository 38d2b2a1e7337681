"""The trained policy as a Hugging Face folder, with its tokenizer."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor
from transformers import AutoConfig, AutoTokenizer

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import StoppedError
from asyncrl.learner.backbone import DTYPES, full_tensors
from asyncrl.learner.policy import Policy
from asyncrl.learner.ranks import Ranks
from asyncrl.machine.disk import as_os_errors, when_there_is_room
from asyncrl.machine.files import sync


def export(policy: Policy, config: ModelConfig, folder: Path, ranks: Ranks, stop: threading.Event) -> None:
    """Write `folder` anew, parameters in the compute dtype, as soon as the disk has room; it appears whole, under its
    name, or not at all. Raises StoppedError on every rank: `stop` was set while it waited."""
    tensors = full_tensors(policy.model, policy.weight_format, DTYPES[config.dtype], ranks)
    stopped = False
    if ranks.rank == 0:
        try:
            when_there_is_room(lambda: _write(policy, tensors, config, folder), stop, str(folder))
        except StoppedError:
            stopped = True
    ranks.leave_if(stopped)


def _write(policy: Policy, tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    aside = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(aside, ignore_errors=True)
    with as_os_errors():
        # They are as files have them already. Transformers empties the dict, and this may be tried again.
        policy.model.save_pretrained(aside, state_dict=dict(tensors), save_original_format=False)
        # Its config would say the dtype in which the learner keeps its weights.
        described(config)(aside)
    for each in (*aside.iterdir(), aside):
        sync(each)
    shutil.rmtree(folder, ignore_errors=True)
    aside.rename(folder)
    sync(folder.parent)


def described(config: ModelConfig) -> Callable[[Path], None]:
    """What writes the files of a Hugging Face folder other than its weights, which are in the compute dtype."""
    model = AutoConfig.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)
    model.dtype = config.dtype
    tokenizer = AutoTokenizer.from_pretrained(config.path, trust_remote_code=config.trust_remote_code)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return write
