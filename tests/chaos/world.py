"""A whole run that is as small and as quick to start as one can be: a random policy, short tasks, a coin for a rule."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from asyncrl.data.writing import write_tasks
from tests.helpers import make_task
from tests.learner.support import write_model

BATCH = 8
GROUP = 2
MAX_LAG = 1
TASKS = 64


@dataclass(frozen=True, slots=True)
class World:
    """The folder of the model that a run trains, and the file of its tasks."""

    model: Path
    tasks: Path

    @classmethod
    def make(cls, folder: Path) -> World:
        world = cls(write_model(folder / "model", layers=1), folder / "tasks.parquet")
        write_tasks(world.tasks, (make_task(index) for index in range(TASKS)))
        return world

    def overrides(self, shards: int) -> list[str]:
        """A run in which groups are filtered, evicted and dropped, and everything that is trained is kept."""
        return [
            f"model.path={self.model}",
            f"data.train={self.tasks}",
            "run.seed=7",
            "actor.concurrency=8",
            "actor.max_turns=1",
            "actor.max_turn_tokens=12",
            "actor.max_tokens=128",
            "actor.tools=[]",
            "actor.episode_timeout_s=20",
            "engine.slots=8",
            "engine.max_length=128",
            "scoring.rule=tests.chaos.rule.coin",
            "scoring.timeout_s=2",
            "scoring.batch_trajectories=4",
            f"learner.batch_size={BATCH}",
            f"learner.group_size={GROUP}",
            "learner.lr=1e-3",
            "learner.checkpoint_every=2",
            f"replay.max_lag={MAX_LAG}",
            "replay.lease_s=4",
            "replay.retention=all",
            "replay.sampler.kind=freshest",
            "replay.oversample=2",
            "replay.reissue_evicted=true",
            "replay.filter.zero_variance=true",
            f"replay.shards={shards}",
            "cluster.actors=2",
            "cluster.scorers=2",
            "cluster.learner_ranks=2",
            "cluster.max_restarts=100000",
            "cluster.restart_pause_s=1",
        ]
