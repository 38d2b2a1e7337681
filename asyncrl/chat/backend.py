"""Encodes and decodes with the Rust backend of a tokenizer, where transformers' own methods would only call it.

For short texts these methods take several times as long as the backend. An actor calls them in every turn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any


def decoder_of(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """A function that decodes tokens to text with special tokens, and without a clean-up of blanks."""
    if _keeps(tokenizer, "decode", "_decode"):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=False)
    return partial(tokenizer.decode, skip_special_tokens=False, clean_up_tokenization_spaces=False)


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
    """True if the class of the tokenizer has these methods from transformers' class of fast tokenizers."""
    # Imported here, since transformers takes seconds to load. A tokenizer of this class has loaded it.
    from transformers import PreTrainedTokenizerFast

    fast, kind = PreTrainedTokenizerFast, type(tokenizer)
    return issubclass(kind, fast) and all(getattr(kind, name) is getattr(fast, name) for name in methods)
