"""Opens the tokenizer of the policy, from the model's files or `model.tokenizer`, with `model.chat_template`.

This file does not import torch, because processes that only judge text do not need it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.source import ModelSource, local_source, source_of

logger = logging.getLogger(__name__)


def open_tokenizer(model: ModelConfig, local_only: bool = False, warn: bool = False) -> Any:
    """Open the tokenizer of the policy. Raises ConfigError: it cannot be loaded.

    A tokenizer without a padding token pads with its end token; `warn` logs this. With `local_only` nothing is
    downloaded, and no remote store is used.
    """
    # Imported here, since transformers takes seconds to load.
    from transformers import AutoTokenizer

    key, path = _named(model)
    try:
        source = _source(model, local_only)
        tokenizer: Any = AutoTokenizer.from_pretrained(source.path, local_files_only=local_only, **source.options)
    except ConfigError:
        raise
    # transformers raises many kinds of errors for malformed files.
    except Exception as error:
        raise ConfigError(f"{key}={path}: its tokenizer cannot be loaded: {error}") from error
    if model.chat_template is not None:
        tokenizer.chat_template = written_template(model)
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        if warn:
            logger.warning("%s=%s has no padding token: it pads with its end token %s", key, path, tokenizer.eos_token)
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def tokenizer_source(model: ModelConfig) -> ModelSource:
    """The files of the policy's tokenizer. Raises ConfigError: see `source_of`."""
    return _source(model, local_only=False)


def check_vocabulary(model: ModelConfig, tokenizer: Any, rows: int) -> None:
    """Raises ConfigError: the tokenizer has ids beyond the model's embedding, which has `rows` rows."""
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    token, largest = max(vocabulary.items(), key=lambda each: each[1])
    if largest >= rows:
        key, path = _named(model)
        raise ConfigError(
            f"{key}={path}: its tokenizer gives {token!r} the id {largest}, but the embedding of "
            f"model.path={model.path} ends at {rows - 1}; name the tokenizer that the model was trained with"
        )


def _named(model: ModelConfig) -> tuple[str, str]:
    return ("model.path", model.path) if model.tokenizer is None else ("model.tokenizer", model.tokenizer)


def _source(model: ModelConfig, local_only: bool) -> ModelSource:
    if model.tokenizer is not None:
        model = replace(model, path=model.tokenizer, revision=None)
    return local_source(model) if local_only else source_of(model)


def template_name(model: ModelConfig) -> str:
    """A name of the policy's chat template for messages: the key and the file of `model.chat_template`, if it is
    set."""
    given = model.chat_template
    if given is None:
        return "the model's chat template"
    return "model.chat_template" if _is_text(given) else f"model.chat_template={given}"


def written_template(model: ModelConfig) -> str | None:
    """The text of `model.chat_template`; None if it is not set. Raises ConfigError: its file cannot be read."""
    return None if model.chat_template is None else _template(model.chat_template)


def _is_text(given: str) -> bool:
    """True if `model.chat_template` is a template, not the path of a file."""
    return "{" in given or "\n" in given


def _template(given: str) -> str:
    """The text of a chat template; `given` is the text or the path of a file."""
    if _is_text(given):
        return given
    try:
        return Path(given).read_text()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"model.chat_template={given}: this is neither a template, which has braces, nor a readable file: {error}"
        ) from error
