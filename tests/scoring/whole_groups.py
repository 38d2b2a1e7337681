"""Groups of answers that a reward manager judges, with a tokenizer of their own, and the managers that judge them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from asyncrl.types import Lease, Role, Task, Turn
from tests.episode.fakes import ids, make_tokenizer
from tests.helpers import make_trajectory

TOKENIZER = make_tokenizer()
_NUMBERS = count()


def saved_tokenizer(folder: Path) -> str:
    """The folder, as a model's path."""
    TOKENIZER.save_pretrained(folder)
    return str(folder)


def group(name: str, answers: Sequence[str], truth: str = "72", source: str = "mine", version: int = 0) -> list[Lease]:
    """The leases of a group whose members answer so."""
    task = Task(f"task-of-{name}", [{"role": "user", "content": "?"}], truth, source, extra_info={"split": "train"})
    return [_lease(task, name, member, answer, version) for member, answer in enumerate(answers)]


def _lease(task: Task, name: str, member: int, answer: str, version: int) -> Lease:
    prompt, sampled = ids(TOKENIZER, "the question?"), ids(TOKENIZER, answer)
    tokens, start = np.concatenate([prompt, sampled]), len(prompt)
    mask = np.arange(len(tokens)) >= start
    trajectory = make_trajectory(
        id=f"{name}.{member}.0",
        task_id=task.id,
        group_id=name,
        member=member,
        length=len(tokens),
        tokens=tokens,
        logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        turns=(Turn(0, start, Role.PROMPT), Turn(start, len(tokens), Role.ASSISTANT, "stop")),
        steps=(),
    )
    return Lease(task, trajectory, ("manager",), None, True)


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
