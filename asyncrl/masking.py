"""Masks secrets, which are recognised by the name of a value or by the form of a text.

`config/secrets.py` adds the secret options of the configuration's schema. Everything that asyncrl prints, logs, sends
or exports passes through one of these two files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "(hidden)"

_WORDS = r"(?:api_?key|secret|passw(?:or)?d|passphrase|credentials?|authorization|bearer)"
# The path of a file with keys is not a secret.
_NAME = re.compile(
    rf"{_WORDS}(?!\w*_(?:file|path))|(?:^|_)(?:key|token|auth|pat|pwd|pass|dsn|cookie|sig|signature|jwt)$", re.I
)
# Values with these names are not secrets: tokens of a vocabulary, numbers per token, and keys that name a column or a
# field.
_PLAIN = re.compile(
    r"(?:^|_)(?:(?:pad|eos|bos|unk|sep|cls|stop|mask|image|start|end|per)_token"
    r"|(?:prompt|question|messages?|image|video|audio|text|input|output|response|answer|solution|truth|target|label"
    r"|reward|reward_fn|score|data|source|column|field|index|id|row|group|sort|primary)_key)$",
    re.I,
)
_OF_SECRETS = re.compile(r"(?:^|_)(?:env|env_vars|environ|environment|headers|cookies)$", re.I)
_CAMEL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_FLAG = re.compile(r"--?(?=[a-z])[\w-]+", re.I)
# A reference to an environment variable is not a secret.
_REFERENCE = re.compile(r"\$\{oc\.env:\w+\}")

# Each of these patterns can match only from the start of a name, so that the time is linear in the length of the text.
_ADDRESS = re.compile(r"((?<![a-z0-9+.-])[a-z][a-z0-9+.-]*+://)[^\s/?#@]*+(?:@[^\s/?#@]*+)*@", re.I)
_BEFORE_A_VALUE = re.compile(
    r"""(?<![\w.-])([\w.-]++)=  # in an address, a command line or the environment
    |(['"])([\w.-]++)\2\s*+:\s*+  # in JSON, and in a mapping as Python shows it
    |[{,]\s*+([\w-]++):\s++  # in YAML of one line""",
    re.X,
)
# A truncated text may lack the second quotation mark.
_QUOTED = r"""b?'(?:[^'\\]|\\.)*+'|b?"(?:[^"\\]|\\.)*+"|b?['"][^\n]*+"""
_VALUE = re.compile(rf"""{_QUOTED}|\[[^\[\]]*+\]|(?:(?:Bearer|Basic)\s++)?[^\s"',}}\]]*+""", re.S)
_SET_VALUE = re.compile(rf"""{_QUOTED}|(?:(?:Bearer|Basic)\s++)?[^\s"']*+""", re.S)
_VALUE_IN_ADDRESS = re.compile(r"""[^\s&"']*+""")
_MAPPING = re.compile(r"""\{(?:[^{}'"]|'[^'\n]*+'|"[^"\n]*+")*+\}|\{[^\n]*+""")
_HIDDEN_MAPPING = re.compile(r"\{(?:[^:{}\n]++: (?:\(hidden\))?+(?:, )?+)*+\}")
_ARGUMENT = re.compile(r"""((?<![\w-])(--?[a-z][\w-]*+)['"]?(?:\s++|,\s*+)['"]?)(?![-\s])[^\s,'"\]]++""", re.I)
_SENT = re.compile(r"(\b(?:Bearer|Basic)\s+)[\w.~+/=-]{8,}", re.I)
# The tokens of the Hugging Face hub, OpenAI, Anthropic, GitHub and AWS have a known form.
_KNOWN = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,}|gh[opsur]_\w{16,}|github_pat_\w{16,}|AKIA[0-9A-Z]{16})")


def is_secret_name(name: str) -> bool:
    """True if a value with this name is a secret. Examples are `api_key`, `--hf-token`, and `env.HOME`, since all
    values of `env` count as secrets."""
    *outer, last = name.split(".")
    plain = _CAMEL.sub("_", last.lstrip("-")).replace("-", "_")
    if any(map(holds_secrets, outer)):
        return True
    return _NAME.search(plain) is not None and _PLAIN.search(plain) is None


def holds_secrets(name: str) -> bool:
    """True if all values of a mapping or list with this name are secrets, such as `headers`."""
    return _OF_SECRETS.search(_CAMEL.sub("_", name).replace("-", "_")) is not None


def masked(value: Any, name: str = "") -> Any:
    """A copy of a plain value named `name`, with secrets masked.

    These are secrets:

    - values whose name is that of a secret, such as `api_key`
    - all values of environments and headers
    - passwords in addresses
    - access tokens in a form that a known service uses
    """
    if is_secret_name(name) or (holds_secrets(name) and isinstance(value, Mapping | list | tuple)):
        return hidden(value)
    match value:
        case Mapping():
            return {each: masked(inner, str(each)) for each, inner in value.items()}
        case list() | tuple():
            before = ["", *value]
            return [
                MASK if _is_argument(flag, each) else masked(each) for flag, each in zip(before, value, strict=False)
            ]
        case str():
            return masked_text(value)
    return value


def hidden(value: Any) -> Any:
    """A copy of a plain value with masked texts and numbers. Empty texts and references to environment variables
    stay."""
    match value:
        case Mapping():
            return {name: hidden(each) for name, each in value.items()}
        case list() | tuple():
            return [hidden(each) for each in value]
        case None | bool() | "":
            return value
    return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK


def masked_text(text: str) -> str:
    """A text with recognisable secrets masked."""
    text = _without_named_values(_ADDRESS.sub(rf"\1{MASK}@", text))
    text = _ARGUMENT.sub(_argument, text)
    text = _SENT.sub(rf"\1{MASK}", text)
    return _KNOWN.sub(MASK, text)


def _without_named_values(text: str) -> str:
    parts, done = list[str](), 0
    for found in _BEFORE_A_VALUE.finditer(text):
        if found.start() >= done and (value := _secret_value(text, found)):
            parts += [text[done : found.end()], MASK]
            done = value.end()
    return "".join(parts) + text[done:]


def _secret_value(text: str, found: re.Match[str]) -> re.Match[str] | None:
    """The value that follows a name; None if it is not a secret or is empty."""
    name, at = found[1] or found[3] or found[4], found.end()
    if text.startswith(MASK, at) or _HIDDEN_MAPPING.match(text, at):
        return None
    if text.startswith("{", at) and (is_secret_name(name) or holds_secrets(name.rpartition(".")[2])):
        return _MAPPING.match(text, at)
    if not is_secret_name(name) or _REFERENCE.match(text, at):
        return None
    in_address = found[1] and text[found.start() - 1 : found.start()] in ("?", "&")
    pattern = _VALUE_IN_ADDRESS if in_address else _SET_VALUE if found[1] else _VALUE
    value = pattern.match(text, at)
    return value if value and value[0] not in ("", "''", '""') else None


def _argument(found: re.Match[str]) -> str:
    return f"{found[1]}{MASK}" if is_secret_name(found[2]) else found[0]


def _is_argument(flag: Any, value: Any) -> bool:
    if not (isinstance(flag, str) and isinstance(value, str)) or value.startswith("-"):
        return False
    return _FLAG.fullmatch(flag) is not None and is_secret_name(flag)
