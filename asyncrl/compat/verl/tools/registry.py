"""Makes tools as verl does, from the files that `tool_config_path` and `function_tool_path` name.

The functions work with asyncrl's classes, and with verl's own where verl is installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from importlib import import_module
from typing import Any

from omegaconf import OmegaConf


class ToolType(Enum):
    """The kinds of tools in a file. verl itself has given up the kind `mcp`."""

    NATIVE = "native"


def get_tool_class(cls_name: str) -> Any:
    """The class with the dotted path `cls_name`. Raises ImportError or AttributeError: it does not exist."""
    module, _, name = cls_name.rpartition(".")
    return getattr(import_module(module), name)


def made_tool(cls: Any, entry: Mapping[str, Any]) -> Any:
    """Make the tool of an entry `{class_name, config, tool_schema}`, whose class is `cls`.

    Raises ValueError: the entry's kind is none of ToolType, or its schema is not valid. Raises what the class raises.
    """
    schemas = import_module("verl.tools.schemas")
    config, schema = dict(entry.get("config") or {}), entry.get("tool_schema")
    ToolType(config.get("type", ToolType.NATIVE.value))
    given = None if schema is None else schemas.OpenAIFunctionToolSchema.model_validate(schema)
    return cls(config=config, tool_schema=given)


def initialize_tools_from_config(tools_config_file: str) -> list[Any]:
    """The tools of a YAML file. Raises ValueError: an entry has an unknown kind or no valid schema."""
    entries: Any = OmegaConf.to_container(OmegaConf.load(tools_config_file), resolve=True)
    return [made_tool(get_tool_class(entry["class_name"]), entry) for entry in entries["tools"]]


def load_all_tools(tool_config_path: str | None, function_tool_path: str | None) -> list[Any]:
    """The tools of both files. Raises ValueError: two tools have the same name."""
    native = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    load = import_module("verl.tools.function_tool").load_function_tools_from_path
    functions = load(function_tool_path) if function_tool_path else []
    if both := sorted({tool.name for tool in native} & {tool.name for tool in functions}):
        raise ValueError(f"{', '.join(both)}: tools of tool_config_path and function_tool_path need different names")
    return [*native, *functions]
