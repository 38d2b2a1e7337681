"""The text of an episode for people: an image is a few words there, and not a placeholder for each of its features."""

from __future__ import annotations

from collections.abc import Callable

from asyncrl.types import Trajectory

NAME_CHARS = 8


def image_mark(name: bytes, tokens: int) -> str:
    """An image in a text: the first digits of its digest, by which two images are told apart, and its tokens."""
    return f"[image {name.hex()[:NAME_CHARS]}, {tokens} tokens]"


def shown_text(trajectory: Trajectory, start: int, end: int, decode: Callable[[list[int]], str]) -> str:
    """The text of the tokens [start, end). An image that begins there is its mark; an image that began before is left
    out."""
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
