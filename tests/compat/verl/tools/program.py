"""A program over verl's modules of tools, which prints what each step gives as JSON. With the argument `ours` it runs
on asyncrl's classes under verl's names, else on verl itself."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

if sys.argv[1:2] == ["ours"]:
    from asyncrl.compat.verl import provide_verl

    assert provide_verl()

DATA = Path(__file__).parents[3] / "data/verl"
sys.path.insert(0, str(DATA))
Step = tuple[str, Callable[[], Any]]

PARAMETERS = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "description": "one", "minLength": 2},
        "b": {"type": ["integer", "number"], "enum": [1, 2.5]},
        "c": {"type": "array", "items": {"type": "string"}},
    },
    "required": ["a"],
    "additionalProperties": False,
}
SCHEMA = {"type": "function", "function": {"name": "f", "description": "does", "parameters": PARAMETERS}}
CONFIG = """
points: 0.5
tools:
  - class_name: vault_tool.VaultTool
    config: {type: native, points: "${points}"}
  - class_name: vault_tool.VaultTool
    config: {type: native}
    tool_schema: {type: function, function: {name: other, description: tries}}
"""


def plain(value: Any) -> Any:
    """The value as JSON can hold it, with the names of its classes."""
    if hasattr(value, "model_dump"):
        shown = [value.model_dump(exclude_unset=True, exclude_none=True), value.model_dump()]
        return [type(value).__name__, *map(plain, shown)]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(plain, value)]
    if isinstance(value, dict):
        return {str(name): plain(each) for name, each in value.items()}
    return value if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__


def schemas() -> Iterator[Step]:
    from verl.tools import schemas

    tool = schemas.OpenAIFunctionToolSchema
    calls = schemas.OpenAIFunctionCallSchema.from_openai_function_parsed_schema
    for change in (
        {},
        {"type": 3},
        {"function": {"name": "g", "description": "d"}},
        {"function": {"name": "g", "description": "d", "strict": True}},
        {"function": {"name": "g"}},
        {"function": {"name": "g", "description": "d", "parameters": {"type": "object"}}},
        {"function": {"name": "g", "description": "d", "parameters": {"type": "object", "properties": {}}}},
        {"function": {"name": "g", "description": "d", "parameters": {**PARAMETERS, "properties": {"a": {}}}}},
    ):
        yield f"schema {change}", lambda change=change: tool.model_validate({**SCHEMA, **change})
    for text in ('{"a": 1}', "[1]", "{", "3", "null"):
        parsed = schemas.OpenAIFunctionParsedSchema(name="f", arguments=text)
        yield f"arguments {text}", lambda parsed=parsed: calls(parsed)
    call = schemas.OpenAIFunctionToolCall
    yield "a call", lambda: call(id="1", function={"name": "f", "arguments": {"a": [1]}})
    yield "a call of another type", lambda: call(id="1", type="tool", function={"name": "f", "arguments": {}})
    for given in (
        {},
        {"text": "a"},
        {"text": ""},
        {"text": 3},
        {"text": "a", "image": ["x"]},
        {"image": [], "video": []},
        {"image": "x"},
        {"image": ("x",)},
        {"video": "x"},
    ):

        def respond(given: dict[str, Any] = given) -> Any:
            made = schemas.ToolResponse(**given)
            return made, made.is_empty(), bool(made.is_text_only())

        yield f"response {given}", respond


def functions() -> Iterator[Step]:
    from verl.tools import function_tool as module
    from verl.tools.schemas import ToolResponse

    for value in (
        *("text", {"a": "ä"}, 3, None, [1], True),
        *(("a",), ("a", 1), ("a", None, None), ({"b": 1}, 0.5, {"n": 1}), (3, True), (ToolResponse(text="x"), 0)),
        *((), ("a", 1, {}, 2), ("a", "b")),
        ToolResponse(image=["x"]),
    ):
        yield f"return {value!r}", lambda value=value: module.normalize_function_tool_return(value)

    def variadic(*texts: str) -> str:
        """Joins.

        Args:
            texts: Parts.
        """
        return "".join(texts)

    def undocumented(text: str) -> str:
        return text

    def renamed(text: str, other: int | None = None) -> str:
        """Says a text.

        Args:
            text: What to say.
            other: A number.
        """
        return f"{text}{other}"

    for function in (variadic, undocumented, renamed):
        yield f"{function.__name__}", lambda function=function: module.function_tool(function)
    yield "another name", lambda: module.function_tool("said")(renamed) is renamed
    yield "its own schema", lambda: module.function_tool("own", schema=SCHEMA)(undocumented) is undocumented
    yield "twice", lambda: module.function_tool("said")(renamed) is renamed
    yield "two of one name", lambda: module.function_tool("said")(undocumented)
    load = module.load_function_tools_from_path
    yield "a file", lambda: [tool.name for tool in load(str(DATA / "function_tools.py"))]
    yield "again", lambda: [tool.name for tool in load(str(DATA / "function_tools.py"))]
    yield "no file", lambda: load(str(DATA / "nowhere.py"))
    for name in ("said", "own", "shout", "judge", "renamed"):

        def described(name: str = name) -> Any:
            tool = module.get_function_tool(name)
            return tool.name, tool.tool_schema, tool.is_async

        yield f"tool {name}", described
        yield f"call {name}", lambda name=name: asyncio.run(module.get_function_tool(name).call({"text": "a"}))
    yield "no tool", lambda: module.get_function_tool("nothing")
    yield "registry", lambda: sorted(module.FUNCTION_TOOL_REGISTRY)


def classes() -> Iterator[Step]:
    from verl.tools import tool_registry
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema

    tool = BaseTool({"a": 1}, OpenAIFunctionToolSchema.model_validate(SCHEMA))
    yield "a tool", lambda: (tool.name, tool.config, tool.tool_schema, tool.get_openai_tool_schema())
    yield "create", lambda: asyncio.run(tool.create("id", create_kwargs={}))
    yield (
        "create without an id",
        lambda: [len(each) if isinstance(each, str) else each for each in asyncio.run(tool.create())],
    )
    yield "execute", lambda: asyncio.run(tool.execute("id", {}, agent_data=None))
    yield "calc_reward", lambda: asyncio.run(tool.calc_reward("id"))
    yield "release", lambda: asyncio.run(tool.release("id"))

    def listed(text: str, functions: str | None = None) -> Any:
        path = Path(sys.argv[2]) / "tools.yaml"
        path.write_text(text)
        found = tool_registry.load_all_tools(str(path), functions)
        return [(each.name, each.tool_schema, getattr(each, "config", None)) for each in found]

    yield "a file of tools", lambda: listed(CONFIG)
    yield "both files", lambda: listed(CONFIG, str(DATA / "function_tools.py"))
    yield "one name twice", lambda: listed(CONFIG.replace("other", "shout"), str(DATA / "function_tools.py"))
    yield "an unknown kind", lambda: listed(CONFIG.replace("native", "mcp"))
    yield "an unknown class", lambda: listed(CONFIG.replace("VaultTool", "Nothing"))
    yield "no files", lambda: tool_registry.load_all_tools(None, None)


def outcome(step: Callable[[], Any]) -> Any:
    try:
        return plain(step())
    except Exception as error:  # noqa: BLE001 - the class of the error is what is compared
        return {"raises": type(error).__name__}


if __name__ == "__main__":
    found = {name: outcome(step) for part in (schemas, functions, classes) for name, step in part()}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
