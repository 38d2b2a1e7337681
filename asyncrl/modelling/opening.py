"""Opens the Hugging Face configuration of the model that the section `model` names. Every role uses these functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from transformers import AutoConfig

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.overrides import engine_overrides, override
from asyncrl.modelling.source import source_of
from asyncrl.modelling.vision import sees_images


def open_config(model: ModelConfig) -> Any:
    """The Hugging Face configuration of `model`, with `model.override_config`.

    Raises ConfigError: the configuration cannot be read; and see `override`.
    """
    config = stored_config(model)
    if not model.override_config:
        return config
    return override(config, model.override_config, model.trust_remote_code)


def stored_config(model: ModelConfig) -> Any:
    """The Hugging Face configuration in the model's files. Raises ConfigError: it cannot be read."""
    source = source_of(model)
    try:
        return AutoConfig.from_pretrained(source.path, **source.options)
    # transformers' checks of configurations raise many kinds of errors.
    except Exception as error:
        raise ConfigError(f"model.path={model.path}: transformers cannot read its configuration: {error}") from error


def reads_images(engine: str, model: ModelConfig) -> bool:
    """True if `model` reads images and engines of the kind `engine` take them. Raises ConfigError: see
    `open_config`."""
    return engine == "sglang" and sees_images(open_config(model))


def server_overrides(model: ModelConfig) -> dict[str, Any]:
    """The changes that inference servers must make to the Hugging Face configuration of `model`. Raises ConfigError:
    see `override`."""
    return engine_overrides(stored_config(model), model.override_config) if model.override_config else {}


def beside(model: ModelConfig, path: str | None, freeze: list[str] | None = None) -> ModelConfig:
    """The settings of a model that is trained together with the policy. It starts from the files at `path` (None: from
    the policy's files). If `path` names other files, the policy's overrides and revision do not apply.
    """
    freeze = [] if freeze is None else freeze
    if path is None:
        return replace(model, freeze=freeze)
    return replace(model, path=path, freeze=freeze, override_config={}, revision=None)
