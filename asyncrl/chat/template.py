"""Renders messages as text with a tokenizer's chat template.

Templates accept different messages:

- Some require the arguments of a call as JSON text.
- Some show only one call per turn, or require an id of nine letters with each call.
- Some refuse null as the content of a turn with calls.

Messages from data, demonstrations and agents come in all these forms. `Template` adapts messages if it can; otherwise
it raises RefusedError with the template's reason.
"""

from __future__ import annotations

import json
import re
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from asyncrl.errors import ConfigError, RefusedError

Messages = Sequence[Mapping[str, Any]]

MARK = "asyncrlmark"
"""A word that is put in place of the policy's text, so that the text's position in a rendering can be found."""

QUESTION = {"role": "user", "content": "question"}
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks a word up.",
        "parameters": {"type": "object", "properties": {"mark": {"type": "string"}}, "required": ["mark"]},
    },
}
"""The tool in the conversations with which templates are tested."""


def answer(text: str) -> dict[str, Any]:
    """An assistant turn that calls no tool."""
    return {"role": "assistant", "content": text}


def calling(
    arguments: Sequence[Mapping[str, Any]], names: Sequence[str] = (), content: str = "", ids: Sequence[str] = ()
) -> dict[str, Any]:
    """An assistant turn with one call for each of `arguments`. The calls go to the tools `names`. Without `names`, they
    go to `TOOL`.

    `ids` are the ids that the policy gave the calls; an empty text if it gave none.
    """
    names = names or [TOOL["function"]["name"]] * len(arguments)  # type: ignore[index]
    calls = [
        {"type": "function", "function": {"name": name, "arguments": dict(each)}, **({"id": id} if id else {})}
        for name, each, id in zip(names, arguments, ids or [""] * len(arguments), strict=True)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(content: Any, name: str = "lookup", id: str = "") -> dict[str, Any]:
    """A tool's result, a text or blocks. `id` is the call's id, if the policy gave it one."""
    return {"role": "tool", "name": name, "content": content, **({"tool_call_id": id} if id else {})}


def with_reasoning(turn: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """An assistant turn with the reasoning in its own field."""
    return {**turn, "reasoning_content": reasoning} if reasoning else turn


OF_MODEL = "the model's chat template"
"""The name of a template in error messages, unless the configuration gives another template."""

POLICY_ID = re.compile(r"functions\.[^\s:<>]+:\d+|[A-Za-z0-9]{9}")
"""The ids of calls that policies write. Kimi's ids name the tool, and Mistral's ids have nine letters or digits."""


def call_id(number: int) -> str:
    """The id of call number `number` of a turn. It has nine characters, as the strictest templates require."""
    return f"call{number:05d}"


def _with_ids(message: Mapping[str, Any], prepared: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = zip(message["tool_calls"], prepared["tool_calls"], strict=True)
    return [{**call, "id": shown["id"]} for call, shown in calls]


def _refusal(error: Exception) -> str:
    """The reason why a template did not render a conversation, with the line of the template if it is known."""
    from jinja2 import TemplateSyntaxError

    reason = f"{error}" or type(error).__name__
    if isinstance(error, TemplateSyntaxError):
        return f"is not a valid template: line {error.lineno}: {reason}"
    # In a traceback, the frames of a template have the line numbers of the template, and this file name.
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "<template>"]
    return f"refuses the conversation: {reason}{f' (line {lines[-1]} of the template)' if lines else ''}"


class Template:
    """The chat template of a Hugging Face tokenizer. A tokenizer may also have two templates, one of them for
    conversations with tools.

    `source` is the text of the one template or of both. `one_call` is true if the template shows only one call per
    turn. Calls and results keep the ids that the policy gave them, and a call without an id gets one. If the template
    shows a call's tool only by the call's id, as Kimi's does, the id is `functions.NAME:NUMBER`, where the number
    counts the calls of the conversation.

    Error messages call the template `name`. Raises ConfigError: the tokenizer has no template.
    """

    def __init__(self, tokenizer: Any, template_kwargs: Mapping[str, Any], name: str = OF_MODEL) -> None:
        written = tokenizer.chat_template
        if not written:
            raise ConfigError("the tokenizer of model.path has no chat template; set model.chat_template")
        self.source = "\n".join(written.values()) if isinstance(written, dict) else str(written)
        self._name = name
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs)
        self.one_call = False
        self._ids_name_tools = False
        self._arguments_as_text = False
        self._no_content: str | None = ""
        if not self._shows(MARK):
            self._arguments_as_text = True
            self._arguments_as_text = self._shows(MARK)
        self._no_content = self._content_of_calls()
        self.one_call = self._shows(MARK) and not self._shows(MARK, MARK + "2")
        self._ids_name_tools = self._shows(MARK) and not self._shows(MARK, name=MARK + "name")
        self.shows_reasoning = self._shows_reasoning()

    def render(self, messages: Messages, tools: Messages, generation_prompt: bool = True) -> str:
        """Render messages as text. Raises RefusedError: the template does not take the messages or the tools."""
        prepared = self._prepared(messages)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    prepared,
                    tools=list(tools) or None,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **self._template_kwargs,
                )
            )
        except Exception as error:  # expressions of a template may raise anything
            raise RefusedError(f"{self._name} {_refusal(error)}") from error

    def identified(self, messages: Messages) -> list[dict[str, Any]]:
        """Give calls and results the ids that the template shows, as if the policy had written them.

        Raises RefusedError: a message has several calls, and the template shows only one per turn.
        """
        return [
            {
                **message,
                **({"tool_call_id": prepared["tool_call_id"]} if "tool_call_id" in prepared else {}),
                **({"tool_calls": _with_ids(message, prepared)} if message.get("tool_calls") else {}),
            }
            for message, prepared in zip(messages, self._prepared(messages), strict=True)
        ]

    def _prepared(self, messages: Messages) -> list[dict[str, Any]]:
        """Prepare messages for the template: ids, names at results, and the form of contents, arguments and reasoning.

        Nulls and empty lists of calls are dropped.
        """
        prepared = []
        # Maps ids to the calls that results may answer. A call has two ids: its own in `messages`, and the `call_id` of
        # its number.
        known: dict[str, Mapping[str, Any]] = {}
        made = results = 0
        for message in messages:
            changed = {name: value for name, value in message.items() if value is not None}
            if reasoning := changed.get("reasoning_content"):
                changed["thinking"] = reasoning
            calls = changed.pop("tool_calls", ())
            if not changed.get("content"):
                changed["content"] = self._no_content if calls else ""
            if calls:
                if self.one_call and len(calls) > 1:
                    raise RefusedError(f"one tool call at a time: {self._name} shows only one in each turn")
                first = made if self._ids_name_tools else 0
                shown = [self._call(call, number) for number, call in enumerate(calls, first)]
                known |= {call_id(number): each for number, each in enumerate(shown)}
                known |= {call["id"]: each for call, each in zip(calls, shown, strict=True) if call.get("id")}
                changed["tool_calls"] = shown
                made += len(calls)
            if message["role"] == "tool":
                id = changed.get("tool_call_id") or call_id(results)
                call = known.get(id, {"id": id})
                changed["tool_call_id"] = call["id"]
                if not changed.get("name") and "function" in call:
                    changed["name"] = call["function"]["name"]
            results = results + 1 if message["role"] == "tool" else 0
            prepared.append(changed)
        return prepared

    def _call(self, call: Mapping[str, Any], number: int) -> dict[str, Any]:
        function = dict(call.get("function", call))
        id = str(call.get("id") or "")
        if not POLICY_ID.fullmatch(id):
            # Ids from agents are replaced, because some templates refuse their form.
            id = f"functions.{function['name']}:{number}" if self._ids_name_tools else call_id(number)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str) and not self._arguments_as_text:
            with suppress(ValueError):
                arguments = json.loads(arguments)
        elif self._arguments_as_text and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function["arguments"] = arguments
        return {"id": id, "type": "function", "function": function}

    def _content_of_calls(self) -> str | None:
        """The content of a turn that has only calls: null, or an empty text if the template refuses null."""

        def rendered(content: str | None, tools: Messages) -> str:
            self._no_content = content
            with suppress(RefusedError):
                return self.render([QUESTION, calling([{"mark": MARK}]), result("15")], tools)
            return ""

        def takes_null(tools: Messages) -> bool:
            of_empty, of_null = rendered("", tools), rendered(None, tools)
            return bool(of_empty) <= bool(of_null) and of_null.count("None") <= of_empty.count("None")

        # Without tools, the tokenizer may use its other template.
        takes = MARK in rendered(None, [TOOL]) and takes_null([TOOL]) and takes_null([])
        return None if takes else ""

    def _shows_reasoning(self) -> bool:
        try:
            return MARK in self.render([QUESTION, with_reasoning(answer("15"), MARK)], (), generation_prompt=False)
        except RefusedError:
            return False

    def _shows(self, *arguments: str, name: str = "") -> bool:
        """True if the template shows calls with these arguments in one turn, and shows the arguments as JSON, not as a
        Python dict.

        With `name` it must also show the tool's name in such a call.
        """
        turn = calling([{"mark": text} for text in arguments], [name] * len(arguments) if name else ())
        try:
            text = self.render([QUESTION, turn, *(result("15") for _ in arguments)], [TOOL])
        except RefusedError:
            return False
        return all(mark in text for mark in (*arguments, name)) and "{'mark'" not in text
