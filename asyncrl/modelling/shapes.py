"""Reads the shapes of a model's tensors without reading its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import get_safetensors_metadata, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, NotASafetensorsRepoError
from safetensors import SafetensorError, safe_open

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.opening import open_config
from asyncrl.modelling.source import local_source, source_of
from asyncrl.modelling.vision import auto_class
from asyncrl.modelling.weight_format import WeightFormat

FILES = ("model.safetensors", "pytorch_model.bin")
"""The names of weight files, in the order in which transformers looks for them. A large model has several files and an
index of them instead."""


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """The shapes of the published `tensors` (see weight_format.py), and the number of token ids."""

    tensors: Mapping[str, tuple[int, ...]]
    vocabulary: int


def model_shapes(model: ModelConfig) -> ModelShapes:
    """Read the shapes of `model` on which learner and engines must agree. No weights are read.

    Raises ConfigError: `model` is not a causal language model of transformers, or a tensor that would be pushed is not
    in its weight files. Servers load the files, so they would not know such a tensor.
    """
    empty = empty_model(model)
    source = source_of(model)
    stored = stored_shapes(source.path, source.revision)
    pushed = WeightFormat(empty, stored).shapes
    if wrong := [name for name, shape in pushed.items() if stored.get(name) != shape]:
        first = wrong[0]
        raise ConfigError(
            f"model.path={model.path}: {len(wrong)} tensors would be pushed that its weight files do not have, and a "
            f"server would ignore them; the first is {first} {pushed[first]}, the files have "
            f"{stored.get(first, 'none of that name')}. Load the model with transformers, save it with "
            "save_pretrained, and set model.path to the new folder"
        )
    return ModelShapes(pushed, int(empty.config.get_text_config().vocab_size))


def empty_model(model: ModelConfig) -> Any:
    """The causal language model that `model` names, without weights. Raises ConfigError: transformers cannot make
    it."""
    try:
        config = open_config(model)
        with torch.device("meta"):
            return auto_class(config).from_config(config, trust_remote_code=model.trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise ConfigError(f"model.path={model.path}: transformers cannot read its configuration: {error}") from error


def stored_shapes(path: str, revision: str | None = None) -> dict[str, tuple[int, ...]]:
    """Read names and shapes from the headers of the weight files of the folder or hub model `path`.

    A hub model is read at `revision`. Raises ConfigError: the model has no weight files, or they cannot be read.
    """
    try:
        found = _in_folder(Path(path) if Path(path).is_dir() else _cached(path, revision))
        if not found and not Path(path).is_dir():
            files = get_safetensors_metadata(path, revision=revision).files_metadata.values()
            found = {name: tuple(info.shape) for file in files for name, info in file.tensors.items()}
    except (OSError, ValueError, KeyError, SafetensorError, HfHubHTTPError, NotASafetensorsRepoError) as error:
        raise ConfigError(f"the weight files of model.path={path} cannot be read: {error}") from error
    if not found:
        raise ConfigError(f"model.path={path} has no weight files: neither {' nor '.join(FILES)}")
    return found


def weight_files(model: ModelConfig) -> list[Path]:
    """The safetensors files of `model` on this host; [] if it has none. Nothing is downloaded."""
    try:
        source = local_source(model)
        folder = Path(source.path) if Path(source.path).is_dir() else _cached(source.path, source.revision)
    except (OSError, HfHubHTTPError):
        return []
    return [] if folder is None else sorted(folder.glob("*.safetensors"))


def _cached(path: str, revision: str | None) -> Path | None:
    try:
        return Path(snapshot_download(path, revision=revision, local_files_only=True))
    except LocalEntryNotFoundError:
        return None


def _in_folder(folder: Path | None) -> dict[str, tuple[int, ...]]:
    for name in FILES if folder is not None else ():
        assert folder is not None
        index, files = folder / f"{name}.index.json", [name]
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if all((folder / each).exists() for each in files):
            return {key: shape for each in files for key, shape in _in_file(folder / each).items()}
    return {}


def _in_file(file: Path) -> dict[str, tuple[int, ...]]:
    if file.suffix == ".safetensors":
        with safe_open(file, "pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    stored = torch.load(file, map_location="meta", weights_only=True, mmap=True)
    return {name: tuple(tensor.shape) for name, tensor in stored.items()}
