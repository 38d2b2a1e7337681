"""What the policy reads of the result of an MCP tool."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def result_text(result: CallToolResult) -> tuple[str, int]:
    """The result's texts and its structured content, and how many of its parts are not shown, which are named in the
    text: images, sounds and binary resources."""
    blocks = [_block(each) for each in result.content]
    texts = [text for text, is_shown in blocks if is_shown]
    shown = [text for text, _ in blocks]
    structured = result.structured_content
    if structured is not None and not _says(texts, structured):
        shown.append(json.dumps(structured, ensure_ascii=False))
    return "\n".join(shown), len(blocks) - len(texts)


def _block(block: ContentBlock) -> tuple[str, bool]:
    """The text of a block, and whether it is all that the block has."""
    match block:
        case TextContent():
            return block.text, True
        case ResourceLink():
            return f"{block.name}: {block.uri}", True
        case EmbeddedResource(resource=BlobResourceContents() as resource):
            return f"[{resource.uri} ({resource.mime_type or 'binary'}) is not shown]", False
        case EmbeddedResource(resource=TextResourceContents() as resource):
            return resource.text, True
        case ImageContent():
            return f"[an image ({block.mime_type}) is not shown]", False
        case AudioContent():
            return f"[a sound ({block.mime_type}) is not shown]", False
    return f"[{block.type} is not shown]", False


def _says(texts: Sequence[str], structured: Any) -> bool:
    """Whether the texts say the same already. Servers repeat it as JSON; those of the package `mcp` wrap a plain result
    as {"result": ...}, and give a list as one text for each element."""
    values = [structured]
    if isinstance(structured, dict) and structured.keys() == {"result"}:
        values.append(structured["result"])
    read = [_read(text) for text in texts]
    return any(
        value in read or (isinstance(value, str) and value in texts) or (isinstance(value, list) and read == value)
        for value in values
    ) or (values[-1] == list(texts))


def _read(text: str) -> Any:
    """The value of a JSON text, or else the text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
