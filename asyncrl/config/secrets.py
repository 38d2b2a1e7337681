"""What a configuration may hold that others must not read: keys of services, tokens and passwords.

The file in the run's folder keeps them, since roles read it. What leaves the folder, such as a report or the
configuration at a service, has them masked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "(hidden)"

_SECRET = r"(?:api_?key|secret|passw(?:or)?d|passphrase|credentials?|authorization|bearer)"
# Numbers are never masked, so that `max_tokens` needs no exception. A file of keys is no secret.
_NAME = re.compile(rf"{_SECRET}(?!\w*_(?:file|path))|(?:^|_)(?:key|token|auth|pat|pwd|dsn|cookie)$", re.I)
_OF_THE_VOCABULARY = re.compile(r"(?:^|_)(?:pad|eos|bos|unk|sep|cls|stop|mask|image|start|end)_token$", re.I)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")

_IN_TEXT = (
    # The user and the password in an address.
    (re.compile(r"(\b[a-z][a-z0-9+.-]*://)[^\s/?#]+@", re.I), rf"\1{MASK}@"),
    # A parameter of an address, an argument of a command, or a variable that it sets.
    (
        re.compile(rf"([\w-]*(?:{_SECRET}|api-key|[_-]key|[_-]?token|[?&]key|[?&]sig|signature)=)[^\s&#\"']+", re.I),
        rf"\1{MASK}",
    ),
    (re.compile(rf"(--[\w-]*(?:{_SECRET}|api-key|token|auth)\s+)(?!-)\S+", re.I), rf"\1{MASK}"),
    (re.compile(r"(\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.I), rf"\1{MASK}"),
    # Tokens that show by themselves what they are: of the Hugging Face hub, of OpenAI and Anthropic, of GitHub and AWS.
    (re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16})"), MASK),
)
_FLAG = re.compile(rf"--[\w-]*(?:{_SECRET}|api-key|token|auth)", re.I)


def masked(value: Any) -> Any:
    """A copy of a configuration, or of one value, without secrets: texts under names that tell of one, passwords in
    addresses, and tokens that look like those of known services."""
    match value:
        case Mapping():
            return {name: _under(str(name), each) for name, each in value.items()}
        case list() | tuple():
            before = ["", *value]
            return [
                MASK if _is_argument(flag, each) else masked(each) for flag, each in zip(before, value, strict=False)
            ]
        case str():
            return _masked_text(value)
    return value


def _under(name: str, value: Any) -> Any:
    last = _CAMEL.sub("_", name.rpartition(".")[2]).replace("-", "_")
    return _hidden(value) if _NAME.search(last) and not _OF_THE_VOCABULARY.search(last) else masked(value)


def _hidden(value: Any) -> Any:
    """A value of which each text is a secret."""
    match value:
        case Mapping():
            return {name: _hidden(each) for name, each in value.items()}
        case list() | tuple():
            return [_hidden(each) for each in value]
    return MASK if isinstance(value, str) and value else value


def _is_argument(flag: Any, value: Any) -> bool:
    return (
        isinstance(flag, str) and isinstance(value, str) and bool(_FLAG.fullmatch(flag)) and not value.startswith("-")
    )


def _masked_text(text: str) -> str:
    for pattern, replacement in _IN_TEXT:
        text = pattern.sub(replacement, text)
    return text
