"""Token ids of a run to text, with its own tokenizer. Nothing is downloaded."""

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
    """The ids themselves, where there is no tokenizer."""
    return "".join(f"{each} " for each in ids)


def decoder(run: Run, path: str | None = None) -> Decode:
    """Choose the tokenizer in `path`, or else the run's own: that of its trained policy, or of `model.path`. Where it
    has none, the result shows ids, and the log says why.

    Raises ConfigError: `path` has no tokenizer, or the run's configuration cannot be read.
    """
    if path is not None:
        return tokenizer_decode(ModelConfig(path))
    settings = run.settings()
    if settings is None:
        log.warning("token ids instead of text: there is no configuration of the run; name a tokenizer by --tokenizer")
        return ids_as_text
    exported, model = run.folder / "model", settings.model
    try:
        own = ModelConfig(str(exported), trust_remote_code=model.trust_remote_code) if exported.is_dir() else model
        return tokenizer_decode(own)
    except ConfigError as error:
        log.warning("token ids instead of text: %s", error)
        return ids_as_text


def tokenizer_decode(model: ModelConfig) -> Decode:
    """The decoding of a model's tokenizer. Raises ConfigError: it is not on this machine."""
    try:
        tokenizer = open_tokenizer(model, local_only=True)
    except ConfigError as error:
        raise ConfigError(f"this machine has no tokenizer {model.path}; name another folder by --tokenizer") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
