"""Reads the results of tools, environments and simulated users: a text, or a list of texts and images.

The items of a list are texts, Pillow images, and blocks `{"type": "text", "text": ...}` or `{"type": "image", "image":
SOURCE}`. A source is as in messages of tasks (`image_sources`), or a picture in memory: a Pillow image, or an array
uint8[height, width, 3]. A list that has only text blocks is read as one text. Every other list needs at least one
image.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from asyncrl.chat.image_blocks import IMAGE_TYPES
from asyncrl.plain import copied
from asyncrl.text import cut

if TYPE_CHECKING:
    from PIL.Image import Image

Content = str | list[Mapping[str, Any]]
"""The content of a message: a text, or blocks of which at least one is an image."""


def read_content(value: Any) -> Content | None:
    """Read a result, and encode its pictures in memory as PNG files.

    Returns None if the value is neither a text nor a list of texts and images. Raises ValueError, TypeError, OSError: a
    picture cannot be encoded.
    """
    if isinstance(value, str):
        return str(value)
    items = [value] if _is_picture(value) else value
    if not isinstance(items, (list, tuple)) or not items or not all(map(_is_item, items)):
        return None
    blocks = [_block(item) for item in items]
    if all(isinstance(item, Mapping) and item["type"] == "text" for item in items):
        return "".join(block["text"] for block in blocks)
    return blocks if any(block["type"] != "text" for block in blocks) else None


def cut_content(content: Content, max_chars: int) -> Content:
    """Cut the content to at most `max_chars` characters of text. If it has several texts, the first ones are kept."""
    if isinstance(content, str):
        return cut(content, max_chars)
    found: list[Mapping[str, Any]] = []
    for block in content:
        if block["type"] == "text":
            text = block["text"]
            block = {**block, "text": cut(text, max_chars)}
            max_chars = max(0, max_chars - len(text))
        found.append(block)
    return found


def joined(before: Any, content: Content) -> Any:
    """The content `before` of a message, followed by `content`."""
    before = "" if before is None else before
    if isinstance(before, str) and isinstance(content, str):
        return f"{before}{content}"
    return [*_as_blocks(before), *_as_blocks(content)]


def _as_blocks(content: Any) -> Sequence[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _is_item(value: Any) -> bool:
    if isinstance(value, Mapping):
        kind = value.get("type")
        return isinstance(value.get("text"), str) if kind == "text" else kind in IMAGE_TYPES and kind in value
    return isinstance(value, str) or _is_picture(value)


def _block(item: Any) -> Mapping[str, Any]:
    match item:
        case str():
            return {"type": "text", "text": str(item)}
        case Mapping():
            source: Any = item.get("image")
            in_memory = _is_picture(source) or isinstance(source, np.ndarray)
            # The block is copied, because its owner may change it later.
            return copied({**item, "image": _file(source)} if in_memory else dict(item))
    return {"type": "image", "image": _file(item)}


def _is_picture(value: Any) -> bool:
    """True if this is a Pillow image."""
    # Pillow is not imported here: an image of it can exist only if it was imported already.
    module = sys.modules.get("PIL.Image")
    return module is not None and isinstance(value, module.Image)


def _file(picture: Image | np.ndarray[Any, Any]) -> bytes:
    """Encode a picture as a PNG file. Raises ValueError, TypeError, OSError: it cannot be encoded."""
    from PIL import Image

    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "PNG")
    return buffer.getvalue()
