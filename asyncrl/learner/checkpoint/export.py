"""Exports the trained policy, with adapters merged into its weights, and its tokenizer as a Hugging Face folder. It can
also export the adapters alone, as a peft folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.dynamic_module_utils import custom_object_save

from asyncrl.config.locations import CARD_FILES
from asyncrl.config.schema import ModelConfig
from asyncrl.learner.checkpoint.checkpoint import read_policy
from asyncrl.learner.checkpoint.gathering import gather_all
from asyncrl.learner.model.loading import StoredModel, read_model
from asyncrl.learner.model.lora import add_adapters, gather_adapters, save_adapters, with_adapters
from asyncrl.learner.model.policy import Policy
from asyncrl.learner.model.sharding import convert
from asyncrl.learner.ranks.ranks import Ranks
from asyncrl.machine.files import as_os_errors, share, sync, when_there_is_room
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.source import source_of
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.modelling.vision import processor_files, sees_images
from asyncrl.modelling.weight_format import WeightFormat
from asyncrl.weights.manifest import DTYPES


def export(policy: Policy, config: ModelConfig, folder: Path, ranks: Ranks, stop: threading.Event) -> None:
    """Write the policy into a new `folder`, with parameters in the compute dtype, as soon as the disk has room. The
    folder appears whole, or not at all. Raises StoppedError on every rank: `stop` was set while rank 0 waited for
    room."""
    tensors = gather_all(policy.model, policy.weight_format, DTYPES[config.dtype], ranks)

    def write() -> None:
        if ranks.rank == 0:
            when_there_is_room(
                lambda: write_model(policy.model, tensors, folder_writer(config), folder), stop, str(folder)
            )

    ranks.together(write)


def export_checkpoint(config: ModelConfig, checkpoint: Path, folder: Path) -> None:
    """Write the policy of a checkpoint into `folder`, as `export` does, in this process on the CPU.

    Raises ConfigError: model.path cannot be loaded; CheckpointError: the checkpoint cannot be read; OSError: `folder`
    cannot be written.
    """
    policy = _policy_of(config, checkpoint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = gather_all(policy.model, policy.weight_format, DTYPES[config.dtype], Ranks.alone())
    write_model(policy.model, tensors, folder_writer(config), folder)


def export_adapter(policy: Policy, config: ModelConfig, folder: Path, ranks: Ranks, stop: threading.Event) -> None:
    """Write the adapters of `policy` into a new `folder`, as `export` does. The result is a peft folder with the
    tokenizer."""
    tensors = gather_adapters(policy.model)

    def write() -> None:
        if ranks.rank == 0:
            when_there_is_room(lambda: _write_adapter(policy.model, tensors, config, folder), stop, str(folder))

    ranks.together(write)


def export_checkpoint_adapter(config: ModelConfig, checkpoint: Path, folder: Path) -> None:
    """Write the adapters of a checkpoint's policy into `folder`, as `export_adapter` does. Raises the errors of
    `export_checkpoint`."""
    policy = _policy_of(config, checkpoint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _write_adapter(policy.model, gather_adapters(policy.model), config, folder)


def _policy_of(config: ModelConfig, checkpoint: Path) -> Policy:
    model = read_model(config)
    if config.lora.is_used:
        add_adapters(model, config.lora, "model.lora")
        # The run merged its adapters into weights of this dtype.
        convert(model, DTYPES[config.dtype])
    policy = Policy(model, temperature=1.0)
    read_policy(checkpoint, policy)
    return policy


def merge_adapter(config: ModelConfig, folder: Path) -> None:
    """Merge the adapters of `config.lora.path` into the model of `config`, and write the result into `folder`, as
    `export` does, in this process on the CPU. Raises ConfigError: the model or the adapters cannot be loaded; OSError:
    `folder` cannot be written."""
    stored = with_adapters(StoredModel(read_model(config)), config.lora, "model.lora", seed=0)
    with torch.no_grad():
        stored.start()
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = gather_all(stored.model, WeightFormat(stored.model), DTYPES[config.dtype], Ranks.alone())
    write_model(stored.model, tensors, folder_writer(config), folder)


def _write_adapter(model: Any, tensors: Mapping[str, Tensor], config: ModelConfig, folder: Path) -> None:
    tokenizer = open_tokenizer(config)

    def write(partial: Path) -> None:
        save_adapters(model, tensors, config, partial)
        tokenizer.save_pretrained(partial)

    write_anew(folder, write)


def write_model(model: Any, tensors: Mapping[str, Tensor], write_beside: Callable[[Path], None], folder: Path) -> None:
    """Replace `folder` by the folder of a Hugging Face `model`. The new folder appears whole or not at all.

    `tensors` are its weights in the format of files. `write_beside` writes the configuration and the tokenizer. A model
    card in the folder stays. Raises OSError.
    """

    def write(partial: Path) -> None:
        # The tensors have the format of files already. Passes a copy of the dict, since transformers empties the dict
        # that it gets, and a retry needs the tensors again.
        model.save_pretrained(partial, state_dict=dict(tensors), save_original_format=False)
        # Replaces the saved configuration, which names the dtype in which the learner keeps its weights.
        write_beside(partial)

    write_anew(folder, write)


def write_anew(folder: Path, write: Callable[[Path], None]) -> None:
    """Replace `folder` by a folder that `write` fills, but keep the model card of the old one. If `folder` is a link,
    replace its target."""
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _alone_beside(folder):
        _write_anew(folder, write)


@contextmanager
def _alone_beside(folder: Path) -> Iterator[None]:
    """Lock the parent of `folder` during the block, so that two processes never write the same folder at once."""
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        # Some network file systems cannot lock folders.
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _write_anew(folder: Path, write: Callable[[Path], None]) -> None:
    partial = folder.with_name(f".tmp-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    with as_os_errors(partial):
        write(partial)
    # Copies the model card into the new folder, since somebody may have written it by hand.
    for card in filter(Path.exists, (folder / name for name in CARD_FILES)):
        shutil.copy2(card, partial)
    for each in filter(Path.is_file, partial.iterdir()):
        share(each)
    for each in (*partial.iterdir(), partial):
        sync(each)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    sync(folder.parent)


def save_code(model: Any, folder: Path) -> None:
    """Write the custom code of a Hugging Face `model`, and the configuration that names it, into `folder`, replacing
    files there. Writes nothing for a model without custom code. Raises OSError.
    """
    if type(model)._auto_class is None:
        return

    def write(partial: Path) -> None:
        partial.mkdir(parents=True)
        model.config.save_pretrained(partial)
        custom_object_save(model, partial, config=model.config)

    write_anew(folder, write)


def folder_writer(config: ModelConfig, change: Callable[[Any], None] = lambda _: None) -> Callable[[Path], None]:
    """Return a function that writes all files but the weights into a Hugging Face folder. The written configuration
    names the compute dtype. Before it is written, `change` may edit it."""
    model = open_config(config)
    model.dtype = config.dtype
    change(model)
    tokenizer = open_tokenizer(config)
    source = source_of(config)
    beside = [] if not sees_images(model) else processor_files(source)

    def write(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in beside:
            shutil.copyfile(file, folder / file.name)

    return write
