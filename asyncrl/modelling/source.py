"""Finds the files of the model that the configuration's section `model` names. This file does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from asyncrl.config.schema import ModelConfig
from asyncrl.machine.remote_folder import is_url, known_copy, local_copy


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model's files: `path` is a folder of this host, or a name on the hub with its `revision`."""

    path: str
    revision: str | None
    trust_remote_code: bool

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of every `from_pretrained` after the path."""
        return {"revision": self.revision or "main", "trust_remote_code": self.trust_remote_code}


def source_of(model: ModelConfig) -> ModelSource:
    """The source of the files of `model`. A URL is copied to this host once. Raises ConfigError: see `local_copy`."""
    path = str(local_copy(model.path, model.copies)) if is_url(model.path) else model.path
    return ModelSource(path, model.revision, model.trust_remote_code)


def local_source(model: ModelConfig) -> ModelSource:
    """Like `source_of`, but if the model is at a URL, nothing is copied. Raises FileNotFoundError: this host has no
    copy."""
    if not is_url(model.path):
        return source_of(model)
    if (copy := known_copy(model.path, model.copies)) is None:
        raise FileNotFoundError("this machine has no copy of the model")
    return ModelSource(str(copy), None, model.trust_remote_code)
