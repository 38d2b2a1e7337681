"""Converts the result of an MCP tool to the content that the policy reads."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Any, NamedTuple

from mcp_types import (
    AudioContent,
    BlobResourceContents,
    CallToolResult,
    ContentBlock,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
)

from asyncrl.tools.results import Content


def result_content(result: CallToolResult, shows_images: bool) -> tuple[Content, int]:
    """Convert a result. Returns the content, and the number of parts that the content only names.

    The content has the result's texts and structured content, and with `shows_images` also the result's images.
    """
    parts = [_part(block, shows_images) for block in result.content]
    texts = [part.text for part in parts if part.is_text]
    structured = result.structured_content
    if structured is not None and not _repeat(texts, structured):
        parts.append(_Part(json.dumps(structured, ensure_ascii=False)))
    content: list[Mapping[str, Any]] = []
    for is_image, group in groupby(parts, lambda part: part.image is not None):
        if is_image:
            content += ({"type": "image", "image": part.image} for part in group)
        else:
            content.append({"type": "text", "text": "\n".join(part.text for part in group)})
    unshown = sum(part.is_named for part in parts)
    if any(block["type"] == "image" for block in content):
        return content, unshown
    return (content[0]["text"] if content else ""), unshown


def text_of(content: Content) -> str:
    """The texts of `content`, without its images."""
    return content if isinstance(content, str) else "\n".join(block["text"] for block in content if "text" in block)


class _Part(NamedTuple):
    """A text, the file of an image, or, with `is_named`, the name of a part that is not shown."""

    text: str = ""
    image: bytes | None = None
    is_named: bool = False

    @property
    def is_text(self) -> bool:
        return self.image is None and not self.is_named


def _part(block: ContentBlock, shows_images: bool) -> _Part:
    match block:
        case TextContent():
            return _Part(block.text)
        case ResourceLink():
            return _Part(f"{block.name}: {block.uri}")
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return _Part(f"[{resource.uri} ({resource.mime_type or 'binary'}) is not shown]", is_named=True)
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return _Part(resource.text)
        case ImageContent():
            with suppress(ValueError):
                if shows_images:
                    return _Part(image=base64.b64decode(block.data, validate=True))
            return _Part(f"[an image ({block.mime_type}) is not shown]", is_named=True)
        case AudioContent():
            return _Part(f"[a sound ({block.mime_type}) is not shown]", is_named=True)
    return _Part(f"[{block.type} is not shown]", is_named=True)


def _repeat(texts: Sequence[str], structured: Any) -> bool:
    """True if the texts repeat the structured content."""
    # Many servers repeat the structured content as JSON. Servers of the package `mcp` wrap a plain result as
    # {"result": ...}, and write a list as one text for each element.
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values.append(structured["result"])
    read = [_read(text) for text in texts]
    return any(
        value in read or (isinstance(value, str) and value in texts) or (isinstance(value, list) and read == value)
        for value in values
    ) or (values[-1] == list(texts))


def _read(text: str) -> Any:
    """Read the value of a JSON text, or else return the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
