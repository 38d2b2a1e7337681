"""What a model thinks is not its answer: the answer is what follows its last closed thought.

Thoughts are known by the tags that the families of models write; some of these are special tokens. Where the chat
template itself opens the thought, in the generation prompt, only the closing tag is the model's.
"""

from __future__ import annotations

import re

TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""How a thought begins and how it ends. The last pair is gpt-oss's, whose thoughts and answer are channels."""

_OPENING = re.compile("|".join(re.escape(opening) for opening, _ in TAGS), re.IGNORECASE)
_CLOSING = re.compile("|".join(re.escape(closing) for _, closing in TAGS), re.IGNORECASE)
_TAG = re.compile(f"({_OPENING.pattern}|{_CLOSING.pattern})", re.IGNORECASE)


def has_tags(text: str) -> bool:
    """Whether a thought begins or ends anywhere in the text."""
    return _TAG.search(text) is not None


def ends_open(prompt: str) -> bool:
    """Whether the last that the text says is that a thought begins."""
    tags = list(_OPENING.finditer(prompt))
    return bool(tags) and not prompt[tags[-1].end() :].strip()


def after_thoughts(text: str, begins_open: bool = False) -> str:
    """What follows the last closed thought; empty where one is open. `begins_open` says that the text begins within
    one."""
    closed = list(_CLOSING.finditer(text))
    if not closed:
        return "" if begins_open or _OPENING.search(text) else text
    rest = text[closed[-1].end() :]
    return "" if _OPENING.search(rest) else rest.lstrip()


def without_special(text: str, special: set[str]) -> str:
    """The text without the special tokens that are named, except where they are thought tags."""
    if not special:
        return text
    unwanted = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))))
    return "".join(piece if index % 2 else unwanted.sub("", piece) for index, piece in enumerate(_TAG.split(text)))
