"""The example in docs/tools.md, run as written."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from asyncrl.chat.chat import Chat
from asyncrl.config.schema import ActorConfig
from asyncrl.tools.registry import BUILT_IN, tool_classes
from tests.episode.fakes import ScriptedEngine, make_ticket, make_tokenizer, play_with_tools

PAGE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text()


def guess(number: object) -> str:
    return f'<tool_call>\n{{"name": "guess", "arguments": {{"number": {number}}}}}\n</tool_call>'


def test_the_example_on_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    code, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "my_tools.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tokenizer = make_tokenizer()
    chat = Chat(tokenizer)
    engine = ScriptedEngine(tokenizer, [guess(50), guess(200) + guess('"x"'), guess(42), "It is 42."])
    ticket = make_ticket(tools_kwargs={"guess": {"secret": 42}})
    classes = tool_classes(ActorConfig(tools=["my_tools.GuessNumber"]))
    trajectory = asyncio.run(play_with_tools(engine, chat, classes, ticket))
    assert trajectory.rewards == {"guess": 1.0}
    results = re.findall(r"<tool_response>\n(.*?)\n</tool_response>", chat.text(trajectory.tokens), re.DOTALL)
    assert results == [
        "lower",
        "Error: the number lies between 1 and 100.",
        "Error: argument 'number' must be of type integer.",
        "found",
    ]


def test_the_page_names_every_built_in_tool():
    assert all(f"| `{name}` |" in PAGE for name in BUILT_IN)
