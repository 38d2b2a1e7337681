"""The lines of a program, of which a bounded part is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mcp_types import JSONRPCError

from asyncrl.tools.mcp.stdio import BoundedLines, Line, _message

LIMIT = 4000


@pytest.mark.slow
@given(st.lists(st.integers(0, 6000), min_size=1, max_size=6), st.integers(1, 3000))
def test_lines_are_the_same_however_they_arrive(lengths: list[int], size: int):
    texts = [bytes([97 + index]) * length for index, length in enumerate(lengths)]
    data = b"".join(text + b"\n" for text in texts)
    lines = BoundedLines(LIMIT)
    found = [line for start in range(0, len(data), size) for line in lines.feed(data[start : start + size])]
    assert [line.whole for line in found] == [length <= LIMIT for length in lengths]
    for line, text in zip(found, texts, strict=True):
        assert line.text == text if line.whole else len(line.text) <= 2048 and set(line.text) <= set(text)


@pytest.mark.parametrize(
    ("line", "id"),
    [
        (b'{"jsonrpc":"2.0","id":5,"result":{"content":[{"text":"xx', 5),
        (b'{"jsonrpc": "2.0", "id": 7, "result": {', 7),
        (b'{"id":6,"jsonrpc":"2.0","result":{', 6),
        (b'{"jsonrpc":"2.0","result":{"text":"xx"},"id":8}', 8),
        (b'{"result":{"text":"xx"},"id":9,"jsonrpc":"2.0"}', 9),
        (b'{"jsonrpc":"2.0","result":{"text":"xx","id":8}}', None),
        (b'{"jsonrpc":"2.0","method":"notifications/message","params":{"text":"xx', None),
    ],
)
def test_a_line_that_is_too_long_answers_its_call_with_an_error(line: bytes, id: int | None):
    message = _message(Line(line, whole=False))
    if id is None:
        assert message is None
    else:
        assert message is not None
        assert isinstance(message.message, JSONRPCError)
        assert message.message.id == id
