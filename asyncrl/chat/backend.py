"""Encodes and decodes texts as transformers does, in less processor time. An actor does both in every turn.

Where transformers' own methods would only call the tokenizer's Rust backend, this file calls the backend directly. For
short texts the methods take several times as long as the backend.

Most tokenizers are byte-level: a token is a sequence of bytes. Their tokens are decoded here, since joining bytes takes
a tenth of the backend's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tokenizers import decoders, pre_tokenizers


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function that decodes tokens to text with special tokens, and without a clean-up of blanks."""
    if _keeps(tokenizer, "decode", "_decode"):
        backend = tokenizer.backend_tokenizer
        if isinstance(backend.decoder, decoders.ByteLevel):
            return ByteLevelDecoder(backend.id_to_token)
        return partial(backend.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


class ByteLevelDecoder:
    """Decodes the tokens of a byte-level tokenizer. `token_of` gives the tokenizer's name of a token, None if there is
    no such token.

    In a name, each byte is a character of `ByteLevel.alphabet`. If a name has another character, the name itself is the
    token's text.
    """

    def __init__(self, token_of: Callable[[int], str | None]) -> None:
        self._token_of = token_of
        self._bytes: dict[int, bytes] = {}
        # The alphabet has the printable characters of Latin-1 for their own bytes, and characters from U+0100 on for
        # all other bytes, in order.
        alphabet = set(pre_tokenizers.ByteLevel.alphabet())
        own = [byte for byte in range(256) if chr(byte) in alphabet]
        others = [byte for byte in range(256) if chr(byte) not in alphabet]
        self._byte_of = {chr(byte): byte for byte in own} | {chr(256 + at): byte for at, byte in enumerate(others)}

    def __call__(self, tokens: Sequence[int]) -> str:
        """Decode tokens. Bytes that are not UTF-8 become U+FFFD."""
        known = self._bytes
        try:
            found = [known[token] for token in tokens]
        except KeyError:
            known.update((token, self._read(token)) for token in tokens)
            found = [known[token] for token in tokens]
        return b"".join(found).decode("utf-8", "replace")

    def _read(self, token: int) -> bytes:
        name = self._token_of(token) or ""
        try:
            return bytes(self._byte_of[character] for character in name)
        except KeyError:
            return name.encode()


def encoder_of(tokenizer: Any) -> Callable[[str], list[int]]:
    """A function that encodes a text without adding special tokens. Special tokens in the text are encoded as such."""
    if not _keeps(tokenizer, "encode", "_encode_plus"):
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    backend = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        splits = backend.encode_special_tokens != tokenizer.split_special_tokens
        if splits or backend.truncation is not None or backend.padding is not None:
            # An earlier call had other options. This method sets them back.
            return list(tokenizer.encode(text, add_special_tokens=False))
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode


def _keeps(tokenizer: Any, *methods: str) -> bool:
    """True if the tokenizer's class inherits these methods unchanged from transformers' class of fast tokenizers."""
    # Imported here, since transformers takes seconds to load. If the tokenizer is of this class, transformers is
    # already loaded.
    from transformers import PreTrainedTokenizerFast

    fast, kind = PreTrainedTokenizerFast, type(tokenizer)
    return issubclass(kind, fast) and all(getattr(kind, name) is getattr(fast, name) for name in methods)
