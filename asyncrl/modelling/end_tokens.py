"""Finds the tokens that end a turn in addition to the chat template's end token. This file does not import torch.

Several models (Qwen3, Gemma 3, Phi) list such tokens in `generation_config.json`, and every server ends a turn at them.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from asyncrl.config.schema import ModelConfig
from asyncrl.errors import ConfigError
from asyncrl.modelling.source import source_of

logger = logging.getLogger(__name__)

FILE = "generation_config.json"


def end_tokens(model: ModelConfig, named: Sequence[str], tokenizer: Any) -> tuple[int, ...]:
    """The ids of end tokens: those that the files of `model` list, and those of the texts `named` in actor.end_tokens.

    Raises ConfigError: a text is not an added token of the tokenizer, or the file of the model cannot be read.
    """
    added: dict[str, int] = tokenizer.get_added_vocab()
    if unknown := [text for text in named if text not in added]:
        raise ConfigError(
            f"actor.end_tokens: {', '.join(map(repr, unknown))}: the tokenizer has no such special token; it has "
            f"{', '.join(map(repr, sorted(added)))}"
        )
    listed = _listed(model)
    # A file that was not made for this tokenizer may list a default id, such as 2, which is an ordinary word of this
    # tokenizer.
    if words := sorted(set(listed) - set(added.values())):
        logger.warning(
            "%s of model.path=%s lists the end tokens %s. They are ordinary words of the "
            "tokenizer, so they do not end turns",
            FILE,
            model.path,
            words,
        )
    return tuple(dict.fromkeys([*(each for each in listed if each not in words), *(added[text] for text in named)]))


def _listed(model: ModelConfig) -> list[int]:
    """The ids in the file's `eos_token_id`. The list is empty if the model has no such file."""
    from transformers.utils.hub import cached_file

    source = source_of(model)
    try:
        found = cached_file(source.path, FILE, revision=source.revision, _raise_exceptions_for_missing_entries=False)
        values = {} if found is None else json.loads(Path(found).read_text())
        ends = values.get("eos_token_id")
    # A failing hub or a malformed file may raise any error.
    except Exception as error:
        raise ConfigError(f"model.path={model.path}: its {FILE} cannot be read: {error}") from error
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(type(each) is int for each in ids):
        raise ConfigError(
            f"model.path={model.path}: {FILE} has eos_token_id={ends!r:.100}; it must be an id, or a list of ids"
        )
    return ids
