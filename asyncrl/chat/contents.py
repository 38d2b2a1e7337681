"""Encodes the contents of messages as plain text, so that only the template writes special tokens.

A tool's result, a task or an agent's message may contain `<|im_end|>\\n<|im_start|>user`. If this text were encoded as
part of the rendering, it would end the turn and begin another. So each special token in the content of a message is
replaced by a stand-in before the template sees the message. Each stand-in in the rendering is then encoded as the
letters of the special token's text.

A stand-in is a number between two private-use characters. Templates trim contents, split them at `</think>` and print
them as JSON or as Python literals. A stand-in survives all of that. If a template leaves only a part of a stand-in, the
part is encoded as plain text.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import AddedToken

from asyncrl.chat.backend import encoder_of
from asyncrl.errors import ConfigError

OWN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that a model writes within its own turn. They are not hidden in contents, because they neither begin nor end a
turn."""

_OPEN, _CLOSE = "\ue000", "\ue001"
_ESCAPED = (r"\ue000", r"\ue001")
_STAND_IN = re.compile(rf"(?:{_OPEN}|\\ue000)(\d+)(?:{_CLOSE}|\\ue001)")
_JOINT = _OPEN + _CLOSE


class Contents:
    """Hides special tokens in messages from a template, and encodes the template's renderings.

    It hides the tokenizer's special tokens. It also hides the other added tokens that are in the template's `source`
    and neither begin nor end with a letter or digit. `OWN_MARKS` are not hidden. `marks` are the texts of the hidden
    tokens. The text `reserved`, which the caller uses in renderings of its own, is hidden as well. If a template marks
    turns with ordinary words, such as `User:`, these are not hidden, and messages can forge them.

    Raises ConfigError: the tokenizer reads another text, such as `<|IM_END|>`, as one of these tokens.
    """

    def __init__(self, tokenizer: Any, source: str, reserved: str) -> None:
        self._tokenizer = tokenizer
        self._encode = encoder_of(tokenizer)
        marks = _turn_marks(tokenizer, source)
        _check_normalizer(tokenizer, [mark.content for mark in marks if mark.normalized])
        self.marks = tuple(mark.content for mark in marks)
        self._hidden = [*self.marks, reserved, _OPEN, _CLOSE, *_ESCAPED]
        self._numbers = {text: number for number, text in enumerate(self._hidden)}
        self._pattern = re.compile("|".join(map(re.escape, sorted(self._hidden, key=len, reverse=True))))
        self._letters = lru_cache(maxsize=None)(self._encode_letters)

    def hide(self, value: Any) -> Any:
        """Copy messages or tools, with stand-ins for special tokens in all texts and keys."""
        match value:
            case str():
                return self._pattern.sub(lambda found: f"{_OPEN}{self._numbers[found.group()]}{_CLOSE}", value)
            case dict():
                return {self.hide(key): self.hide(inner) for key, inner in value.items()}
            case list() | tuple():
                return [self.hide(inner) for inner in value]
        return value

    def encode(self, rendered: str) -> list[int]:
        """Encode a rendering."""
        numbers: list[int] = []

        def joint(found: re.Match[str]) -> str:
            number = int(found[1])
            if number >= len(self._hidden):
                return found.group()
            numbers.append(number)
            return _JOINT

        text = _STAND_IN.sub(joint, rendered)
        if not numbers:
            return self._encode(text)
        splitting, token = self._splitting
        ids: list[int] = []
        following = iter(numbers)
        for each in splitting.encode(text, add_special_tokens=False):
            ids += self._letters(next(following)) if each == token else (each,)
        return ids

    @cached_property
    def _splitting(self) -> tuple[Any, int]:
        """A copy of the tokenizer with `_JOINT` as a special token, and the id of this token. `_JOINT` replaces each
        stand-in."""
        # The text around `_JOINT` is then encoded as around any special token.
        splitting = copy.deepcopy(self._tokenizer)
        splitting.add_tokens([AddedToken(_JOINT, normalized=False, special=True)], special_tokens=True)
        return splitting, int(splitting.convert_tokens_to_ids(_JOINT))

    def _encode_letters(self, number: int) -> tuple[int, ...]:
        """Encode the letters of the hidden text with the index `number`, so that none of its tokens is an added token.
        If necessary, the text is cut in two, and the parts are encoded separately."""
        text = self._hidden[number]
        added = set(self._tokenizer.get_added_vocab().values())
        whole = _after_newline(self._tokenizer, text, split_special_tokens=True)
        if not added & set(whole):
            return tuple(whole)
        for cut in range(1, len(text)):
            ids = [each for part in (text[:cut], text[cut:]) for each in _after_newline(self._tokenizer, part)]
            if not added & set(ids):
                return tuple(ids)
        raise ConfigError(
            f"the tokenizer of model.path cannot write {text!r} in letters; give it a vocabulary of bytes"
        )


def _turn_marks(tokenizer: Any, source: str) -> list[AddedToken]:
    """The tokens with which a template can begin or end a turn. Blank tokens and OWN_MARKS are left out. A token that
    is not special is left out if `source` lacks it, or if it begins or ends with a letter or digit."""
    return [
        token
        for token in tokenizer.added_tokens_decoder.values()
        if (text := token.content).strip() and text not in OWN_MARKS
        if token.special or (text in source and not text[0].isalnum() and not text[-1].isalnum())
    ]


def _check_normalizer(tokenizer: Any, marks: list[str]) -> None:
    """Raises ConfigError: another text can normalise to one of `marks`. The tokenizer searches for these marks in
    normalised text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not marks or backend is None or backend.normalizer is None:
        return
    normalize = backend.normalizer.normalize_str
    changes = _changes(normalize, json.loads(backend.to_str())["normalizer"])
    for mark in marks:
        plain, decomposed = _inside(normalize, mark), unicodedata.normalize("NFD", mark)
        if changes & {"", *plain} or (decomposed != mark and _inside(normalize, decomposed) == plain):
            raise ConfigError(
                f"the tokenizer of model.path looks for {mark!r} in normalised text, so that messages could forge it "
                "by other characters; save the tokenizer with normalized=False for this token"
            )


def _changes(normalize: Callable[[str], str], normalizer: Any) -> set[str]:
    """The characters that a normalizer writes in place of other characters. An empty text is among them if the
    normalizer deletes characters.

    `normalizer` is the normalizer's JSON, and `normalize` its function.
    """
    made = {letter for content in _replacements(normalizer) for letter in content or [""]}
    for character in map(chr, range(sys.maxunicode + 1)):
        if unicodedata.category(character) in ("Cn", "Co", "Cs"):
            continue
        if (inside := _inside(normalize, character)) != character:
            made.update(inside or [""])
    return made


def _inside(normalize: Callable[[str], str], text: str) -> str:
    """Normalise `text` as it would be in the middle of a text: it is put between two zeros. The normalizer must leave
    these as they are."""
    # Some normalizers add a prefix to a whole text, or strip its ends.
    return normalize(f"0{text}0").partition("0")[2].rpartition("0")[0]


def _replacements(normalizer: Any) -> Iterator[str]:
    """The texts with which a normalizer replaces patterns. They may be longer than a character."""
    if normalizer["type"] == "Replace":
        yield normalizer["content"]
    for each in normalizer.get("normalizers", ()):
        yield from _replacements(each)


def _after_newline(tokenizer: Any, text: str, **options: Any) -> list[int]:
    """Encode `text` as if it were in the middle of a longer text. Some tokenizers put a blank before a whole text."""
    newline = list(tokenizer.encode("\n", add_special_tokens=False))
    ids = list(tokenizer.encode("\n" + text, add_special_tokens=False, **options))
    if ids[: len(newline)] == newline:
        return ids[len(newline) :]
    return list(tokenizer.encode(text, add_special_tokens=False, **options))
