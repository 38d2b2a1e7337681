"""Finds the images in messages, and refuses blocks that templates must not get.

An image block is `{"type": "image", "image": SOURCE}`, or the `{"type": "image_url", "image_url": {"url": SOURCE}}` of
the chat-completions API; `image_sources` reads the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl.errors import RefusedError

Messages = Sequence[Mapping[str, Any]]
IMAGE_TYPES = ("image", "image_url")
UNREAD = frozenset({*IMAGE_TYPES, "input_image", "video", "video_url", "audio", "audio_url", "input_audio"})
"""Types and names of fields. Templates show a block with such a type or field as special tokens."""


def is_image(block: Any) -> bool:
    """True if a block of a message's content shows an image."""
    return isinstance(block, Mapping) and block.get("type") in IMAGE_TYPES


def image_blocks(messages: Messages) -> list[Mapping[str, Any]]:
    """The image blocks of messages, in their order."""
    contents = (message.get("content") for message in messages)
    return [block for content in contents if isinstance(content, (list, tuple)) for block in content if is_image(block)]


def only_text(block: Any) -> Any:
    """Prepare for templates a block that is not an image.

    Raises RefusedError: the block is one that templates show as special tokens, for instance a video.
    """
    if not isinstance(block, Mapping):
        return block
    # In Parquet, each block has the fields of all blocks. A field that the block itself lacks is null.
    found = {name: value for name, value in block.items() if value is not None}
    if str(found.get("type", "text")) in UNREAD or not UNREAD.isdisjoint(found):
        raise RefusedError(
            f"a message has a block of the type {found.get('type')!r:.40} with the fields {sorted(found)}: only text, "
            "and images of the type image or image_url, can be shown"
        )
    return found


def without_images(messages: Messages) -> Messages:
    """Replace each image by `{"type": "image"}`, so that a template can be applied before any image is read.

    Raises RefusedError: a template would show another block, for instance a video, as special tokens.
    """
    return [{**each, "content": _bare(each["content"])} if "content" in each else each for each in messages]


def _bare(content: Any) -> Any:
    if not isinstance(content, (list, tuple)):
        return content
    return [{"type": "image"} if is_image(block) else only_text(block) for block in content]
