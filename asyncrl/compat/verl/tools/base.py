"""verl's base class of tools."""

from __future__ import annotations

import logging
from typing import Any
from uuid import uuid4

from asyncrl.compat.verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

log = logging.getLogger(__name__)


class BaseTool:
    """A tool. One object serves all episodes, and an `instance_id` identifies an episode."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema | None) -> None:
        self.config = config
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise AssertionError(f"{type(self).__name__} has no schema: give tool_schema")
        self.name: str = self.tool_schema.function.name
        log.debug("tool %s: %s", self.name, self.tool_schema)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema | None:
        """The schema that the policy sees. A class that is made without `tool_schema` overrides this method."""
        found: OpenAIFunctionToolSchema | None = vars(self).get("tool_schema")
        return found

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Begin an episode, and return its id."""
        return str(uuid4()) if instance_id is None else instance_id, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Answer a call. Return the answer, the score of the call, and numbers about it."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the episode."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """End an episode."""
