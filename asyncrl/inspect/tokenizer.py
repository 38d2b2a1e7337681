"""Token ids to text, by the run's own tokenizer where it is to be had."""

from __future__ import annotations

import logging
from collections.abc import Callable

from asyncrl.errors import ConfigError
from asyncrl.inspect.target import Target

log = logging.getLogger(__name__)

Decode = Callable[[list[int]], str]


def ids_as_text(ids: list[int]) -> str:
    """What is shown of tokens without a tokenizer."""
    return "".join(f"{each} " for each in ids)


def decoder(target: Target, path: str | None) -> Decode:
    """The tokenizer in `path`, else that of the run: with its trained policy, or where model.path was. Without any,
    ids are shown, and why is logged. Nothing is downloaded. Raises ConfigError: `path` is no tokenizer."""
    if path is not None:
        return _load(path, trust_remote_code=False)
    if target.config is None:
        log.warning("token ids are shown: the run's configuration is not there; name a tokenizer by --tokenizer")
        return ids_as_text
    exported = target.folder.parent / "model"
    model = target.config.model
    try:
        return _load(str(exported) if exported.is_dir() else model.path, model.trust_remote_code)
    except ConfigError as error:
        log.warning("token ids are shown: %s", error)
        return ids_as_text


def _load(path: str, trust_remote_code: bool) -> Decode:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"this machine has no tokenizer {path}; name another folder by --tokenizer") from error
    return lambda ids: str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
