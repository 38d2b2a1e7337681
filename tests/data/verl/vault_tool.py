"""A tool written for verl: a vault that opens with the right code. It notes how its methods are called."""

import logging
import os
from typing import Any
from uuid import uuid4

from PIL import Image
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))

SCHEMA = {
    "type": "function",
    "function": {
        "name": "vault",
        "description": "Tries a code.",
        "parameters": {
            "type": "object",
            "properties": {"text": {"type": "string", "description": "the code"}},
            "required": ["text"],
        },
    },
}


class VaultTool(BaseTool):
    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self._instance_dict = {}
        self.noted = []

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def create(self, instance_id: str | None = None, **kwargs) -> tuple[str, ToolResponse]:
        if instance_id is None:
            instance_id = str(uuid4())
        self.noted.append(("create", instance_id, kwargs))
        self._instance_dict[instance_id] = {"code": kwargs["create_kwargs"].get("code"), "opened": False}
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs) -> tuple[ToolResponse, float, dict]:
        self.noted.append(("execute", instance_id, {name: kwargs[name] for name in kwargs if name != "agent_data"}))
        extra = kwargs["agent_data"].extra_fields
        extra["tries"] = extra.get("tries", 0) + 1
        code = parameters["text"]
        if code == "broken":
            raise OSError("the vault is broken")
        if code == "photo":
            photo = Image.new("RGB", (16, 16))
            return ToolResponse(text="a photo", image=[photo]), None, None
        if code == "film":
            return ToolResponse(video=[b"film"]), 0.0, {}
        if code == self._instance_dict[instance_id]["code"]:
            self._instance_dict[instance_id]["opened"] = True
            return ToolResponse(text=f"open after {extra['tries']}"), self.config["points"], {"opened": 1}
        return ToolResponse(text="shut"), -0.25, {"opened": 0}

    async def calc_reward(self, instance_id: str, bonus: float = 0.0, **kwargs) -> float:
        return float(self._instance_dict[instance_id]["opened"]) + bonus

    async def release(self, instance_id: str, **kwargs) -> None:
        self.noted.append(("release", instance_id, kwargs))
        del self._instance_dict[instance_id]
