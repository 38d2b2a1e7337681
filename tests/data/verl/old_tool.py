"""A tool written for verl 0.5: its arguments come one by one, it answers with texts, and its reward is a list."""

from typing import Any

from verl.tools.base_tool import BaseTool


class OldTool(BaseTool):
    async def create(self, instance_id: str | None = None, word: str | None = None) -> str:
        self.words = {**getattr(self, "words", {}), instance_id: word}
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], times: int = 1) -> tuple[str, None, None]:
        return self.words[instance_id] * times, None, None

    async def calc_reward(self, instance_id: str, **kwargs) -> list:
        return ["no number"]
