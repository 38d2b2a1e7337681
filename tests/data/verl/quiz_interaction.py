"""An interaction written for verl: a quiz master, who gives a hint after each wrong answer."""

import logging
import os
from typing import Any
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.utils.reward_score import gsm8k

logger = logging.getLogger(__name__)
logger.setLevel(os.getenv("VERL_LOGGING_LEVEL", "WARN"))


class QuizInteraction(BaseInteraction):
    def __init__(self, config: dict):
        super().__init__(config)
        self.max_hints = config.get("max_hints", 1)
        self._instances = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, hints: tuple = (), **kwargs
    ) -> str:
        if instance_id is None:
            instance_id = str(uuid4())
        self._instances[instance_id] = {"answer": "", "ground_truth": ground_truth, "hints": list(hints)}
        return instance_id

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs
    ) -> tuple[bool, str, float, dict]:
        instance = self._instances[instance_id]
        for message in reversed(messages):
            if message.get("role") == "assistant":
                instance["answer"] = message.get("content")
                break
        score = await self.calculate_score(instance_id)
        if score == 1.0:
            return True, "You win!", score, {}
        if not instance["hints"]:
            return True, "You lose.", score, {}
        return False, f"Wrong. A hint: {instance['hints'].pop(0)}", score, {"hints_left": len(instance["hints"])}

    async def calculate_score(self, instance_id: str, **kwargs) -> float:
        instance = self._instances[instance_id]
        return gsm8k.compute_score(
            instance["answer"], instance["ground_truth"], method="strict", format_score=0.25, score=1.0
        )

    async def finalize_interaction(self, instance_id: str, **kwargs) -> None:
        del self._instances[instance_id]
