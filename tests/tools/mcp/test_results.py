"""Results of MCP tools become the content that the policy reads."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import CallToolResult

from asyncrl.tools.mcp.results import result_content, text_of


def text(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": each} for each in texts]


@pytest.mark.parametrize(
    ("content", "structured", "shown"),
    [
        (text("5"), None, "5"),
        (text("a", "b"), None, "a\nb"),
        ([], {"count": 5}, '{"count": 5}'),
        (text('{"count":  5}'), {"count": 5}, '{"count":  5}'),
        (text("5 found"), {"count": 5}, '5 found\n{"count": 5}'),
        (text("5"), {"result": 5}, "5"),
        (text("hello"), {"result": "hello"}, "hello"),
        (text("5"), {"result": "5"}, "5"),
        (text("a", "b"), {"result": ["a", "b"]}, "a\nb"),
        (text("1", "2"), {"result": [1, 2]}, "1\n2"),
        (text("1"), {"result": [1, 2]}, '1\n{"result": [1, 2]}'),
    ],
)
def test_structured_content_is_shown_once(content: list[Any], structured: Any, shown: str):
    result = CallToolResult.model_validate({"content": content, "structuredContent": structured})
    assert result_content(result, shows_images=False) == (shown, 0)


def test_what_is_no_text_is_named_and_counted():
    blob = {"uri": "file:///a.pdf", "mimeType": "application/pdf", "blob": "AAAA"}
    content = [
        {"type": "image", "data": "AAAA", "mimeType": "image/png"},
        {"type": "audio", "data": "AAAA", "mimeType": "audio/wav"},
        {"type": "resource", "resource": blob},
        {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}},
        {"type": "resource_link", "name": "readme", "uri": "file:///readme"},
    ]
    shown, unshown = result_content(CallToolResult.model_validate({"content": content}), shows_images=False)
    assert unshown == 3
    assert text_of(shown).splitlines() == [
        "[an image (image/png) is not shown]",
        "[a sound (audio/wav) is not shown]",
        "[file:///a.pdf (application/pdf) is not shown]",
        "inside",
        "readme: file:///readme",
    ]


def test_a_policy_that_reads_images_is_shown_them_in_their_places():
    image = {"type": "image", "data": "cGl4ZWxz", "mimeType": "image/png"}
    broken = {"type": "image", "data": "no base64!", "mimeType": "image/png"}
    result = CallToolResult.model_validate({"content": [*text("a", "b"), image, broken, *text("c")]})
    content, unshown = result_content(result, shows_images=True)
    assert content == [
        {"type": "text", "text": "a\nb"},
        {"type": "image", "image": b"pixels"},
        {"type": "text", "text": "[an image (image/png) is not shown]\nc"},
    ]
    assert (text_of(content), unshown) == ("a\nb\n[an image (image/png) is not shown]\nc", 1)
