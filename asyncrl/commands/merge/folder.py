"""Writes merged tensors as a Hugging Face folder, after a check against the model that the configuration describes.

The tensors may have the names of the model in memory, or the names in Hugging Face files (modelling/weight_format.py).
The names in memory depend on the version of transformers that wrote the checkpoint: older versions have one tensor per
expert in memory, as in the files. The folder gets the names in files.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
)

from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.learner.checkpoint.export import write_model
from asyncrl.modelling.weight_format import WeightFormat, model_tensors

_VALUE_HEADS = ("score.weight", "classifier.weight")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_NOT_BESIDE = (".safetensors", ".bin", ".pt", ".index.json")


@dataclass(frozen=True, slots=True)
class OutputSettings:
    """Settings of the result.

    - `folder`: the folder from which the configuration and the tokenizer come
    - `tied`: true if the output layer is the embedding, even if the configuration does not say so
    - `dtype`: the dtype of the parameters; None keeps the checkpoint's dtype
    """

    folder: Path
    tied: bool = False
    dtype: torch.dtype | None = None

    def config(self) -> Any:
        """The configuration. Raises ConfigError: it is missing, or transformers cannot read it."""
        if not (self.folder / "config.json").is_file():
            raise ConfigError(f"{self.folder} has no config.json: name a folder with a config.json by --config")
        try:
            # Without trust_remote_code=False, transformers asks at the terminal whether to run the folder's code.
            config = AutoConfig.from_pretrained(self.folder, trust_remote_code=False)
        # The checks of a configuration class may raise any error.
        except Exception as error:
            raise ConfigError(f"the configuration in {self.folder} cannot be read: {error}") from error
        if getattr(config, "quantization_config", None):
            raise ConfigError(
                f"the configuration in {self.folder} is for quantised weights, but the result is not quantised: remove "
                "quantization_config from its config.json"
            )
        if self.tied:
            config.tie_word_embeddings = True
        return config


@torch.no_grad()
def empty_model(config: Any, value_head: bool) -> Any:
    """The model that a configuration describes, on the device meta. With `value_head` it has one value per token
    instead of logits.

    Raises ConfigError: transformers cannot make the model.
    """
    named = config.architectures
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if value_head or architecture.endswith("ForTokenClassification"):
        config.num_labels = 1 if value_head else config.num_labels
        kind: Any = AutoModelForTokenClassification
    elif architecture.endswith("ForConditionalGeneration"):
        kind = AutoModelForImageTextToText
    else:
        kind = AutoModelForCausalLM
    try:
        with torch.device("meta"):
            return kind.from_config(config, dtype=torch.float32)
    # The modules of a model may raise any error.
    except Exception as error:
        raise ConfigError(f"transformers cannot make a model from this configuration: {error!r}") from error


def has_value_head(names: set[str]) -> bool:
    """True if these are the names of a critic's tensors."""
    return "lm_head.weight" not in names and any(head in names for head in _VALUE_HEADS)


def expected_shapes(model: Any, stored: set[str]) -> dict[str, tuple[int, ...]]:
    """The shapes of a model's tensors, by their names in memory and in files. `stored` has the names in the
    checkpoint."""
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters(remove_duplicate=False)}
    for part in _format(model, stored).parts:
        shapes |= {**part.published, **part.model}
    return shapes


def write_folder(model: Any, tensors: Mapping[str, Tensor], settings: OutputSettings, folder: Path) -> None:
    """Write `folder` atomically. `model` may be on the device meta.

    Raises CheckpointError: tensors are missing, misshapen or unknown, or tied tensors differ. Raises OSError.
    """
    adapters = sorted(name for name in tensors if "lora_" in name)
    if adapters:
        raise CheckpointError(f"the checkpoint has LoRA adapters, such as {adapters[0]}, which are not merged")
    _check_kinds(model, tensors)
    tensors = _without_tied(model, tensors, settings.tied)
    published = _published(model, tensors)
    floating = {name for name, each in model.named_parameters() if each.is_floating_point()}
    buffers = model_tensors(model).keys() - floating
    if settings.dtype is not None:
        published = {name: each if name in buffers else each.to(settings.dtype) for name, each in published.items()}
    dtypes = {each.dtype for name, each in published.items() if name not in buffers}
    write_beside = _files_beside(model.config, reduce(torch.promote_types, dtypes), settings.folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write_model(model, published, write_beside, folder)


def _check_kinds(model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError: a tensor is not dense, or on the device meta, or a parameter has an unsupported dtype."""
    floating = {name for name, each in model.named_parameters(remove_duplicate=False) if each.is_floating_point()}
    for name, each in tensors.items():
        if each.layout != torch.strided or each.is_meta:
            raise CheckpointError(f"{name} is a tensor of {each.layout} on {each.device}: only dense values are merged")
        if name in floating and each.dtype not in _FLOATS:
            kinds = ", ".join(str(kind).removeprefix("torch.") for kind in _FLOATS)
            raise CheckpointError(f"{name} has the dtype {each.dtype}, perhaps of quantised weights; use {kinds}")


def _without_tied(model: Any, tensors: Mapping[str, Tensor], drop: bool) -> dict[str, Tensor]:
    """The tensors, with tied tensors under their first name only. With `drop`, tied tensors may have different
    values."""
    every = dict(model.named_parameters(remove_duplicate=False))
    first = {id(each): name for name, each in model.named_parameters()}
    kept = dict(tensors)
    for name, parameter in every.items():
        main = first[id(parameter)]
        if name == main or name not in kept:
            continue
        if main in kept and not drop and not torch.equal(kept[name], kept[main]):
            raise CheckpointError(
                f"{name} and {main} have different values, although the configuration ties them: set "
                f"tie_word_embeddings to false in its config.json, or drop {name} by --tie-word-embedding"
            )
        kept.setdefault(main, kept[name])
        del kept[name]
    return kept


def _format(model: Any, stored: set[str]) -> WeightFormat:
    in_memory = model_tensors(model).keys() <= stored
    return WeightFormat(model) if in_memory else WeightFormat(model, stored)


def _published(model: Any, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    form = _format(model, set(tensors))
    published: dict[str, Tensor] = {}
    used: set[str] = set()
    for part in form.parts:
        in_memory = part.model.keys() <= tensors.keys()
        shapes = part.model if in_memory else part.published
        for name, shape in shapes.items():
            if name not in tensors:
                raise CheckpointError(f"the checkpoint lacks {name}, which its configuration requires")
            if tuple(tensors[name].shape) != shape:
                raise CheckpointError(f"{name} has the shape {list(tensors[name].shape)}; {list(shape)} is needed")
        given = {name: tensors[name] for name in shapes}
        published |= form.publish(part, given) if in_memory else given
        used |= given.keys()
    unknown = sorted(tensors.keys() - used)
    if unknown:
        raise CheckpointError(
            f"the checkpoint has {len(unknown)} tensors that its configuration does not have, such as {unknown[0]}"
        )
    return _apart({name: each.contiguous() for name, each in published.items()})


def _apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors, with a copy in place of each tensor that begins at the same memory address as an earlier one.

    If several tensors share memory, transformers writes only one of them, and expects that the model ties them.
    """
    taken: set[int] = set()
    apart: dict[str, Tensor] = {}
    for name, each in tensors.items():
        apart[name] = each.clone() if each.data_ptr() in taken else each
        taken.add(each.data_ptr())
    return apart


def _files_beside(config: Any, dtype: torch.dtype, source: Path) -> Callable[[Path], None]:
    """A function that writes the other files: the configuration, and copies of all files of `source` except weights."""

    def write(folder: Path) -> None:
        for path in source.iterdir():
            if path.is_file() and path.name != "config.json" and not path.name.endswith(_NOT_BESIDE):
                shutil.copyfile(path, folder / path.name)
        # Saving the model has put the dtype of its meta tensors into `config`.
        config.dtype = dtype
        config.save_pretrained(folder)

    return write
