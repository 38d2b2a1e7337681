"""Translates the files of verl's tools: `tool_config_path`, `function_tool_path`, and the list of MCP servers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.compat.rows import Setting
from asyncrl.compat.verl.configuration.named_files import missing_file, wrong_class
from asyncrl.compat.verl.configuration.references import has_reference
from asyncrl.compat.yaml_files import read_yaml
from asyncrl.config.group_files import FAILURES

COUNTERPARTS = {"SandboxFusionTool": "python", "CustomSandboxFusionTool": "python", "SearchTool": "search"}
"""verl's own tool classes that a tool of asyncrl replaces."""
PROVIDED = {"verl.tools.gsm8k_tool.Gsm8kTool": "asyncrl.compat.verl.tools.gsm8k.Gsm8kTool"}
"""Maps tool classes of verl's early releases to asyncrl's own versions of them."""
_NO_VARIABLE = re.compile(r"\W+")


def tool_settings(key: str, config_path: str | None, function_path: str | None) -> Iterator[Setting | str]:
    """The settings for the tools in both files, and lines for the report. `key` is the section that has the keys
    `tool_config_path` and `function_tool_path`."""
    made = _Tools(f"{key}.tool_config_path")
    if config_path and (line := missing_file(f"{key}.tool_config_path", config_path)):
        made.lines.append(line)
    elif config_path:
        try:
            for entry in read_yaml(Path(config_path).expanduser())["tools"]:
                made.add(entry)
        except (*FAILURES, KeyError, TypeError, AttributeError) as error:
            made = _Tools(key)
            made.lines.append(
                f"{key}.tool_config_path={config_path}: it cannot be read ({type(error).__name__}); name tools in "
                "actor.tools or actor.verl_tools (docs/tools.md)"
            )
    if function_path:
        made.written_for_verl.append({"function_tool_path": function_path})
        made.lines += filter(None, [missing_file(f"{key}.function_tool_path", function_path)])
    yield "actor.tools", made.names
    if made.written_for_verl:
        yield "actor.verl_tools", made.written_for_verl
    yield from made.settings.items()
    yield from made.lines
    if (config_path or function_path) and not (made.names or made.written_for_verl or made.servers):
        yield "actor.tools is empty: until you add tools to it, every call of a tool fails"


class _Tools:
    """Turns the entries of a file into settings, and into lines for the report.

    `add` raises one of FAILURES, KeyError, TypeError or AttributeError: the entry cannot be read.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self.names: list[str] = []
        self.written_for_verl: list[dict[str, Any]] = []
        self.servers: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.lines: list[str] = []

    def add(self, entry: Mapping[str, Any]) -> None:
        path, config = str(entry["class_name"]), dict(entry.get("config") or {})
        if has_reference(entry):
            raise ValueError("an entry has a reference")
        last = path.rpartition(".")[2]
        if config.get("type") == "mcp":
            self._add_servers(path, config, dict(entry["mcp"]))
        elif (ours := COUNTERPARTS.get(last)) and (path.startswith("verl.") or ours == "python"):
            self._add_counterpart(path, ours, config)
        else:
            kept = {name: entry[name] for name in ("class_name", "config", "tool_schema") if entry.get(name)}
            self.written_for_verl.append({**kept, "class_name": PROVIDED.get(path, path)})
            self.lines += wrong_class(f"{self._key}: class_name", path)
            if path.startswith("verl.") and path not in PROVIDED:
                self.lines.append(
                    f"{self._key}: {path} is used unchanged, but asyncrl does not provide it: install a release of "
                    "verl that has it, or copy its file into a package of yours and name the class there"
                )

    def _add_counterpart(self, path: str, ours: str, config: Mapping[str, Any]) -> None:
        if ours not in self.names:
            self.names.append(ours)
        self.lines.append(f"{self._key}: {path} becomes {ours}")
        if ours == "search":
            found = {"actor.search.url": config.get("retrieval_service_url"), "actor.search.topk": config.get("topk")}
            self.settings |= {key: value for key, value in found.items() if value is not None}
            self.lines.append(
                f"{self._key}: the policy calls search with one `query`; a task whose column `tools` has verl's schema "
                "keeps `query_list`"
            )

    def _add_servers(self, path: str, config: Mapping[str, Any], mcp: Mapping[str, Any]) -> None:
        listed = read_yaml(Path(str(mcp["mcp_servers_config_path"])).expanduser())["mcpServers"]
        for name, given in listed.items():
            server = {key: given[key] for key in ("command", "args", "env", "url") if given.get(key)}
            if given.get("auth_token"):
                variable = f"{_NO_VARIABLE.sub('_', str(name)).upper()}_TOKEN"
                server["headers"] = {"Authorization": f"Bearer ${variable}"}
                self.lines.append(f"{self._key}: set the environment variable {variable} to the auth_token of {name}")
            if config.get("timeout"):
                server["timeout_s"] = config["timeout"]
            if chosen := mcp.get("tool_selected_list"):
                server["tools"] = list(chosen)
            self.servers[str(name)] = server
        if mcp.get("tool_selected_list") and len(listed) > 1:
            self.lines.append(f"{self._key}: keep in each actor.mcp_servers.NAME.tools only tools of that server")
        self.settings["actor.mcp_servers"] = self.servers
        self.lines.append(f"{self._key}: {path} becomes actor.mcp_servers; the policy reads the servers' own results")
