"""Groups of answers that a reward manager judges, with a tokenizer of their own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from pathlib import Path

import numpy as np

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
