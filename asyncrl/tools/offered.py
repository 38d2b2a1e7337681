"""Finds the tools on offer: the function schemas that an actor's configuration offers for a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from asyncrl.config.schema import ActorConfig
from asyncrl.errors import ConfigError
from asyncrl.tools.environments.classes import class_of, environment_classes
from asyncrl.tools.mcp.tools import mcp_functions
from asyncrl.tools.registry import tool_classes
from asyncrl.tools.toolbox import selected
from asyncrl.types import Task

Functions = Mapping[str, Mapping[str, Any]]


class Offer:
    """The tools of `actor.tools` and `actor.mcp_servers`, or of the environments.

    Raises ConfigError: a tool or an environment cannot be used.
    """

    def __init__(self, actor: ActorConfig) -> None:
        self.environments = environment_classes(actor)
        self._tools: dict[str, Mapping[str, Any]] = {}
        if not actor.has_environments:
            self._tools = {name: tool.schema for name, tool in tool_classes(actor).items()}
            for name, function in mcp_functions(actor).items():
                if name in self._tools:
                    raise ConfigError(
                        f"actor.mcp_servers: a server and actor.tools both offer {name}; set the server's prefix, or "
                        "leave the tool out of actor.tools"
                    )
                self._tools[name] = function

    def functions(self, task: Task) -> Functions:
        """The function objects, by name, that the policy may call if the task has no schemas of its own.

        Raises ToolError: the task names an environment or selects a tool that is not on offer.
        """
        return class_of(self.environments, task).functions if self.environments else selected(self._tools, task)

    @property
    def always(self) -> Functions:
        """The function objects that all tasks share. Tasks that choose among several environments share none."""
        only = self.environments.get("")
        return only.functions if only else self._tools

    @property
    def every(self) -> list[Functions]:
        """The function objects by name: one mapping for each environment, or one for all tools."""
        return [each.functions for each in self.environments.values()] or [self._tools]
