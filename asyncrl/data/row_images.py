"""Puts the images of a row into its messages, as verl does: each `<image>` in a text is the next image of the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from asyncrl.data.columns import fields, is_list, is_text

IMAGES = "images"
"""The column with a row's images: a list of paths, URLs, or structs with `bytes` or `path`."""
MARK = "<image>"


def with_images(messages: Sequence[Mapping[str, Any]], images: Any) -> Sequence[Mapping[str, Any]]:
    """The messages with a block for each image. Without images the texts stay as they are.

    Raises ValueError: `images` is not a list, or the texts have another number of marks.
    """
    if images is None or (isinstance(images, Sequence) and not images):
        return messages
    if not isinstance(images, Sequence) or isinstance(images, (str, bytes)):
        raise ValueError(f"the images must be a list, not {images!r:.50}")
    texts = [message["content"] for message in messages if isinstance(message.get("content"), str)]
    if (marks := sum(text.count(MARK) for text in texts)) != len(images):
        raise ValueError(_miscounted(len(images), marks))
    rest = iter(images)
    return [
        {**message, "content": list(_blocks(message["content"], rest))}
        if isinstance(message.get("content"), str)
        else message
        for message in messages
    ]


def _blocks(text: str, images: Iterator[Any]) -> Iterator[Mapping[str, Any]]:
    for number, part in enumerate(text.split(MARK)):
        if number:
            image = next(images)
            yield {"type": "image", "image": image.get("image") or image if isinstance(image, Mapping) else image}
        if part:
            yield {"type": "text", "text": part}


def wrong_images(prompts: pa.Array, images: pa.Array) -> tuple[int, str] | None:
    """The first row whose numbers of marks and images differ, and a text that tells what is wrong. None: there is no
    such row.

    `prompts` are lists of messages. Raises ValueError: `images` does not hold lists.
    """
    if pa.types.is_null(images.type):
        return None
    if not is_list(images.type):
        raise ValueError(f"must be a list of images in each row, not {images.type}; rename a column of another kind")
    given = _lengths(images)
    content = pc.struct_field(pc.list_flatten(prompts), "content")
    marks = np.zeros(len(prompts), np.int64)
    if "content" in fields(prompts.type.value_type) and is_text(content.type):
        found = pc.fill_null(pc.count_substring(content, MARK), 0).to_numpy(zero_copy_only=False)
        np.add.at(marks, np.repeat(np.arange(len(prompts)), _lengths(prompts)), found)
    (wrong,) = np.nonzero((given > 0) & (given != marks))
    return (int(wrong[0]), _miscounted(given[wrong[0]], marks[wrong[0]])) if len(wrong) else None


def _lengths(lists: pa.Array) -> NDArray[np.int64]:
    return np.asarray(pc.fill_null(pc.list_value_length(lists), 0), np.int64)


def _miscounted(images: int, marks: int) -> str:
    return f"{images} images, but {marks} times {MARK} in the texts of the prompt"
