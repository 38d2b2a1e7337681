"""verl's interface to parsers of tool calls, over asyncrl's formats of calls."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from asyncrl.chat.formats.registry import FORMATS
from asyncrl.chat.parsing import parse_turn
from asyncrl.types import ToolCall

NAMES: Mapping[str, str] = {
    "hermes": "hermes",
    "gpt-oss": "harmony",
    "qwen3_coder": "qwen3_coder",
    "glm": "glm",
    "kimi": "kimi",
}
"""verl's names of formats, each with asyncrl's name."""


@dataclass
class FunctionCall:
    """A call that the policy wrote. `arguments` is a JSON text."""

    arguments: str
    name: str
    tool_call_id: str | None = None


class ToolParser(ABC):
    """Finds the calls in the policy's tokens. `register` adds a parser of your own."""

    _registry: ClassVar[dict[str, type[ToolParser]]] = {}

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @property
    def stop_token_ids(self) -> list[int]:
        """Further tokens that end a turn: none."""
        return []

    @abstractmethod
    async def extract_tool_calls(
        self, responses_ids: list[int], tools: Sequence[Any] | None = None
    ) -> tuple[str, list[FunctionCall]]:
        """The text of a turn without its calls, and the calls."""

    @classmethod
    def get_tool_parser(cls, name: str, tokenizer: Any) -> ToolParser:
        """The parser of a format. Raises ValueError: there is none of this name."""
        if name not in cls._registry:
            raise ValueError(f"there is no tool parser {name!r}; there are: {', '.join(cls._registry)}")
        return cls._registry[name](tokenizer)

    @classmethod
    def register(cls, name: str) -> Callable[[type[ToolParser]], type[ToolParser]]:
        def add(parser: type[ToolParser]) -> type[ToolParser]:
            cls._registry[name] = parser
            return parser

        return add


_UNREAD = "unknown"
"""The name that a malformed call gets if its own name could not be read."""


class _AnyFunctions(Mapping[str, Mapping[str, Any]]):
    """Functions of every name, with any arguments: a loop checks the calls itself."""

    def __getitem__(self, name: str) -> Mapping[str, Any]:
        return {"name": name, "parameters": {"type": "object", "properties": {}, "additionalProperties": True}}

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name != _UNREAD


def _parser_of(format: str) -> type[ToolParser]:
    class FormatParser(ToolParser):
        async def extract_tool_calls(
            self, responses_ids: list[int], tools: Sequence[Any] | None = None
        ) -> tuple[str, list[FunctionCall]]:
            return read_calls(self.tokenizer.decode(responses_ids), format)

    return FormatParser


def read_calls(text: str, format: str) -> tuple[str, list[FunctionCall]]:
    """The text of a turn without its calls, and the calls whose name can be read. As in verl, other calls are left out,
    and arguments may be another JSON value than an object."""
    turn = parse_turn(text, _AnyFunctions(), FORMATS[format])
    calls = [
        FunctionCall(json.dumps(call.arguments, ensure_ascii=False), call.name, id or None)
        for call, id in zip(turn.calls, turn.ids, strict=True)
        if isinstance(call, ToolCall) or call.name != _UNREAD
    ]
    return turn.content, calls


for _name, _format in NAMES.items():
    ToolParser.register(_name)(_parser_of(_format))
