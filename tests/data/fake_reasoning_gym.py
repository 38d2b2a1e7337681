"""The published interface of reasoning-gym, as far as it is used, with one small data set."""

from __future__ import annotations

import random
from collections.abc import Mapping
from types import ModuleType
from typing import Any


class Sums:
    """Sums whose entries have tuples and keys that are numbers."""

    def __init__(self, size: int = 500, seed: int | None = None, most: int = 9) -> None:
        if size < 1:
            raise AssertionError("size must be positive")
        self.size, self.seed, self.most = size, seed, most

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        chance = random.Random(f"{self.seed}-{index}")
        terms = (chance.randint(1, self.most), chance.randint(1, self.most))
        metadata = {"source_dataset": "sums", "terms": terms, "places": {0: terms[0], 1: terms[1]}}
        return {"question": f"{terms[0]} + {terms[1]} =", "answer": str(sum(terms)), "metadata": metadata}

    def score_answer(self, answer: str | None, entry: Mapping[str, Any]) -> float:
        metadata = entry["metadata"]
        assert isinstance(metadata["terms"], tuple)
        assert metadata["places"][1] == metadata["terms"][1]
        given = int(answer or "")
        return 1.0 if given == sum(metadata["terms"]) else 0.5 if abs(given) <= self.most else 0.0


def fake_modules() -> dict[str, ModuleType]:
    """The modules by name, for sys.modules."""
    gym, factory = ModuleType("reasoning_gym"), ModuleType("reasoning_gym.factory")

    def create_dataset(name: str, **options: Any) -> Sums:
        assert name == "sums"
        return Sums(**options)

    gym.create_dataset = create_dataset  # type: ignore[attr-defined]
    factory.DATASETS = {"sums": (Sums, object), "composite": (object, object)}  # type: ignore[attr-defined]
    return {"reasoning_gym": gym, "reasoning_gym.factory": factory}
