"""Makes the text of an episode for people, with a few words for each image instead of its placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.types import Trajectory

NAME_CHARS = 8


def image_mark(name: bytes, tokens: int) -> str:
    """The words for an image: the first digits of its digest, which tell images apart, and its number of tokens."""
    return f"[image {name.hex()[:NAME_CHARS]}, {tokens} tokens]"


def shown_text(trajectory: Trajectory, start: int, end: int, decode: Callable[[list[int]], str]) -> str:
    """The text of the tokens [start, end). An image that begins among them is shown by its mark; an image that began
    before is left out."""
    texts, position = [], start
    for (begin, stop), name in zip(trajectory.image_spans.tolist(), trajectory.image_names, strict=True):
        if stop <= position or begin >= end:
            continue
        if begin >= start:
            texts += [decode(trajectory.tokens[position:begin].tolist()), image_mark(name, stop - begin)]
        position = stop
    if position < end or not texts:
        texts.append(decode(trajectory.tokens[position : max(position, end)].tolist()))
    return "".join(texts)
