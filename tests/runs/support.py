"""Folders of small runs, as `asyncrl train` leaves them."""

from __future__ import annotations

from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.changes import ConfigChange, with_values
from asyncrl.config.locations import CONFIG_FILE
from asyncrl.config.schema import TrainConfig
from asyncrl.observe.sinks import JsonLines, metrics_file
from asyncrl.replay.store.changes import set_changes
from asyncrl.replay.store.store import Store


def write_run(folder: Path, rewards: list[float], values: dict[str, Any] | None = None, start: float = 100.0) -> Path:
    """A run of a step for each reward, of 2 seconds, 8 trajectories and 80 sampled tokens each, with an evaluation
    before and after them."""
    given = {"model.path": "owner/base", "data.train": ["hf://datasets/owner/tasks"], **(values or {})}
    config = with_values(TrainConfig(), {"run.name": folder.name, "learner.steps": len(rewards), **given})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(yaml.safe_dump(asdict(config), sort_keys=False))
    now = [start]
    learner, evaluation, actor, replay = (
        JsonLines(metrics_file(folder, name), lambda: now[0]) for name in ("learner", "evaluation", "actor-0", "replay")
    )
    for step, reward in enumerate(rewards):
        now[0] += 2.0
        learner.log(step, learner_row(step, reward))
        actor.log(step, {"tokens": 100.0 * (step + 1), "seconds": 2.0 * (step + 1), "idle_seconds": 0.5, "idle": 0.25})
        trained = {"accepted": 8 * (step + 1), "labelled": 8 * (step + 1), "trained": 8 * step, "evicted": 1}
        replay.log(step, {**trained, "learner_waited_for_labels_s": 0.5 * step, "depth_ready": 4, "depth_pending": 2})
    for step, accuracy in ((0, 0.25), (len(rewards), 0.75)):
        means = {"eval/outcome": accuracy, "eval/accuracy": accuracy, "eval/reward": accuracy}
        evaluation.log(step, {**means, "eval/count": 64, "eval/failed": 0})
    return folder


def learner_row(step: int, reward: float) -> dict[str, float]:
    return {
        "reward/mean": reward,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "outcome/mean": reward / 2,
        "lag/mean": 0.5,
        "lag/max": 1,
        "lag/0": 4.0,
        "lag/1": 4.0,
        "length/mean": 10.0,
        "length/max": 20.0,
        "trajectories_trained": 8.0 * (step + 1),
        "tokens_sampled": 80.0,
        "tokens": 160.0,
        "groups/zero_variance": 0.0,
        "grad_norm": 1.0,
        "updates_skipped": 0.0,
        "mismatch/kl": 1e-3,
        "seconds/step": 2.0,
        "seconds/wait": 0.5,
        "seconds/train": 1.5,
        "idle": 0.25,
    }


def write_changes(folder: Path, *changes: ConfigChange) -> None:
    """The store of a run whose configuration changed in mid-run."""
    with closing(Store(folder / "replay", 1 << 24, durable=False)) as store, store.transaction() as tx:
        set_changes(tx, list(changes))
