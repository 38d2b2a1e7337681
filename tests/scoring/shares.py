"""A reward manager and a function of scores. Nothing else is here, since each process of a manager loads this file."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def length(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return len(solution_str) - 1.0


class Shares:
    """Each right answer gets an equal share of 1. An answer may say what goes wrong with the call or the row."""

    def __init__(self, tokenizer: Any, num_examine: int, top: float = 1.0) -> None:
        self.tokenizer, self.top = tokenizer, top
        self.calls = 0

    def __call__(self, data: Any, return_dict: bool = False) -> Any:
        self.calls += 1
        texts = [self.tokenizer.decode(each[each > 0], skip_special_tokens=True) for each in data.batch["responses"]]
        if any("raise" in text for text in texts):
            raise LookupError("no such thing")
        if any("exit" in text for text in texts):
            raise SystemExit(3)
        while any("hang" in text for text in texts):
            pass
        right = np.array(
            [
                item.non_tensor_batch["reward_model"]["ground_truth"] in text
                for item, text in zip(data, texts, strict=True)
            ]
        )
        rewards = torch.zeros(data.batch["responses"].shape)
        for uid in dict.fromkeys(data.non_tensor_batch["uid"]):
            rows = np.flatnonzero((data.non_tensor_batch["uid"] == uid) & right)
            rewards[rows, 0] = self.top / max(1, len(rows))
        for row, text in enumerate(texts):
            if "nan" in text:
                rewards[row, 0] = float("nan")
        extra = {"right": right.tolist(), "rows": [len(data)] * len(data), "call": [self.calls] * len(data)}
        return {
            "reward_tensor": rewards,
            "reward_extra_info": {**extra, "validate": [data.meta_info["validate"]] * len(data)},
        }


def digits(data_source: str, solution_str: str, ground_truth: str, extra_info: Any, worth: float = 1.0) -> float:
    if solution_str == "fail":
        raise LookupError("no such digits")
    return worth * (solution_str == ground_truth)
