"""Decodes token ids of a run with its own tokenizer, without downloads."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.tokenizer import open_tokenizer
from asyncrl.runs.run import Run

log = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]


def ids_as_text(ids: list[int]) -> str:
    """The ids themselves, for a run without a tokenizer."""
    return "".join(f"{each} " for each in ids)


def decoder(run: Run, path: str | None = None) -> Decode:
    """Open the tokenizer in `path`. By default it is that of the run's exported model, else that of `model.path`. If
    there is none, the result shows ids, and a warning gives the reason.

    Raises ConfigError: `path` has no tokenizer, or the run's configuration cannot be read.
    """
    if path is not None:
        return tokenizer_decode(ModelConfig(path))
    settings = run.settings()
    if settings is None:
        log.warning("token ids instead of text: the run has no configuration; name a tokenizer with --tokenizer")
        return ids_as_text
    exported, model = run.folder / "model", settings.model
    try:
        own = ModelConfig(str(exported), trust_remote_code=model.trust_remote_code) if exported.is_dir() else model
        return tokenizer_decode(own)
    except ConfigError as error:
        log.warning("token ids instead of text: %s", error)
        return ids_as_text


def tokenizer_decode(model: ModelConfig) -> Decode:
    """The decoder of a model's tokenizer. Raises ConfigError: the tokenizer is not on this machine."""
    try:
        tokenizer = open_tokenizer(model, local_only=True)
    except ConfigError as error:
        raise ConfigError(
            f"this machine has no tokenizer {model.path}; name another folder with --tokenizer"
        ) from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
