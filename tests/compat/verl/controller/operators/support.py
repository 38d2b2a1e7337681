"""A configuration for a tiny model that trains within a second a step, and its tasks."""

from __future__ import annotations

from pathlib import Path

from asyncrl.config.compose import read
from asyncrl.config.schema import TrainConfig
from asyncrl.data.writing import write_tasks
from tests.helpers import make_task
from tests.learner.support import write_model

GROUP = 4
GROUPS = 2
TASKS = 12


def words(folder: Path, *changes: str) -> list[str]:
    """The command line of such a run; `folder` gets its model and tasks."""
    write_tasks(folder / "tasks.parquet", (make_task(index) for index in range(TASKS)))
    return [
        f"model.path={write_model(folder / 'model')}",
        f"data.train={folder / 'tasks.parquet'}",
        "run.seed=7",
        "algorithm=grpo",
        "actor.max_turns=1",
        "actor.max_turn_tokens=12",
        "actor.max_tokens=96",
        "actor.tools=[]",
        "engine.max_length=96",
        "scoring.rule=tests.compat.verl.controller.operators.rule.even_share",
        f"learner.batch_size={GROUP * GROUPS}",
        f"learner.group_size={GROUP}",
        "learner.lr=1e-3",
        "learner.steps=3",
        "learner.checkpoint_every=3",
        "learner.eval_every=0",
        *changes,
    ]


def config(folder: Path, *changes: str) -> TrainConfig:
    return read(words(folder, *changes))
