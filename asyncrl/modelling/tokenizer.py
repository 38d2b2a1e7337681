"""The tokenizer of the policy. Imports no torch: processes that judge text need none."""

from __future__ import annotations

from typing import Any

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.source import local_source, source_of


def open_tokenizer(model: ModelConfig, local_only: bool = False) -> Any:
    """The tokenizer of the policy. With `local_only` nothing is downloaded, and a remote store is not asked. Raises
    ConfigError: it cannot be loaded."""
    # Only where it is needed: transformers takes seconds to load.
    from transformers import AutoTokenizer

    try:
        source = local_source(model) if local_only else source_of(model)
        return AutoTokenizer.from_pretrained(source.path, local_files_only=local_only, **source.options)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path={model.path}: its tokenizer cannot be loaded: {error}") from error
