"""A tool written for verl that writes down in a file when its episodes begin, and when they end."""

from pathlib import Path
from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

SCHEMA = {
    "type": "function",
    "function": {
        "name": "note",
        "description": "Notes a text.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
    },
}


class NotingTool(BaseTool):
    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    def _note(self, what: str) -> None:
        with Path(self.config["file"]).open("a") as file:
            file.write(f"{what}\n")

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        made = await super().create(instance_id)
        self._note(f"begins {made[0]}")
        return made

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self._note(f"ends {instance_id}")
