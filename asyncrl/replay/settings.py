"""The settings of one shard of the replay."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from asyncrl.ids import is_evaluation
from asyncrl.replay.batches.sampling import Fifo, Filters, Sampler
from asyncrl.replay.starts.admission import Admission
from asyncrl.replay.starts.feed import Feed
from asyncrl.replay.store.pinned import pinned_tasks
from asyncrl.replay.store.records import GroupRecord, TrajectoryRecord
from asyncrl.types import Task


def rules_only(data_source: str) -> tuple[str, ...]:
    """The kinds of scores that a task needs if only rules are configured."""
    return ("rules",)


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """The settings of one shard of the replay.

    - `batch_size`: this shard's part of a batch, in trajectories.
    - `publish_every`: the number of learner steps from one policy version to the next.
    - `high_water_bytes`: while the store has more bytes, no new groups start.
    - `full_bytes`: while trajectories and images take more bytes, no further trajectories are accepted. So there is
      still room for labels and plans.
    - `eval_attempts`: the number of attempts at each held-out task in an evaluation. A single attempt is greedy,
      several are sampled.
    - `evaluation_sample`: the number of episodes of an evaluation, over all shards, whose data is kept for a while.
    - `spare_batches`: the number of batches that may be complete, in addition to the learner's batch, before fewer
      episodes start (see `pacing`). `None`: only admission limits the episodes.
    - `wait_s`: the longest time for which a step waits for running groups that would become too old (see `old_groups`).
      0: no step waits. `None`: for at most the time that the learner takes to train a step, or
      less if it seldom lacks a full batch.
    - `masks_old`: true if tokens that are too old are masked, so that their group need not be thrown away (see
      `old_tokens`).
    - `greedy_sibling`: true if the first member of every group is sampled greedily.
    - `needs`: returns the kinds of scores that the tasks of a data source need.
    - `keep_steps`: the number of steps for which trajectories are kept after their training. Infinity keeps all
      trajectories, also untrained ones.
    - `longest_episode_s`: the longest time for which an actor may hold a ticket, which permits one episode.
    - `max_dead_letters`: the maximum number of dead letters (failed attempts) that are kept.
    - `max_dead_letter_bytes`: the maximum number of bytes that dead letters and their episodes take.
    - `max_failure_share`: the share of failures that ends the run (see `failure_limit`).
    - `run`: the folder of the run, quoted for a shell. Messages show it in commands.
    - `max_refused_groups`: the number of groups that filters refuse in a row before the run ends (see `filter_limit`).
      `None`: no limit.
    - `max_tokens`: the maximum number of tokens in one trajectory.
    - `vocabulary`: the number of token ids, if it is known. Every id must be below this number.
    """

    admission: Admission
    feed: Feed
    held_out: Sequence[Task]
    group_size: int
    batch_size: int
    publish_every: int
    max_attempts: int
    temperature: float
    high_water_bytes: int
    eval_attempts: int = 1
    evaluation_sample: int = 0
    greedy_sibling: bool = False
    needs: Callable[[str], tuple[str, ...]] = rules_only
    filters: Filters = field(default_factory=Filters)
    sampler: Sampler = field(default_factory=Fifo)
    reissue_evicted: bool = False
    spare_batches: float | None = None
    wait_s: float | None = 0.0
    masks_old: bool = False
    keep_steps: float = 0
    full_bytes: float = math.inf
    longest_episode_s: float = math.inf
    max_failure_share: float | None = None
    run: str = "RUN"
    max_refused_groups: int | None = None
    max_dead_letters: float = math.inf
    max_dead_letter_bytes: float = math.inf
    vocabulary: int | None = None
    max_tokens: float = math.inf
    seed: int = 0
    shard: int = 0
    shards: int = 1

    def pinned(self) -> dict[str, int]:
        """The values that must not change during the life of a store, since its rows, groups and ids depend on them."""
        tasks = pinned_tasks(self.feed.tasks, self.held_out)
        return {**tasks, "group_size": self.group_size, "shard": self.shard, "shards": self.shards}

    def task(self, group: GroupRecord, member: int | None = None) -> Task:
        """The task of a group. The task has its demonstration only for the `member` that is the demonstration."""
        task = self.feed.tasks[group.row] if group.training else self.held_out[group.row]
        shows = member is not None and group.is_demonstration(member)
        return task if shows or not task.demonstration else replace(task, demonstration=())

    def task_of(self, name: str, trajectory: TrajectoryRecord) -> Task | None:
        """The task of the trajectory with the id `name`. `None` if its record has no valid row."""
        tasks = self.held_out if is_evaluation(name) else self.feed.tasks
        return tasks[trajectory.row] if 0 <= trajectory.row < len(tasks) else None

    def temperature_of(self, group: GroupRecord, member: int) -> float:
        greedy = self.greedy_sibling and member == 0 if group.training else self.eval_attempts == 1
        return 0.0 if greedy else self.temperature

    def version_at(self, step: int) -> int:
        """The learner's policy version during step `step`."""
        return step // self.publish_every

    def oldest_allowed(self, version: int) -> int:
        """The oldest version whose tokens may be trained at `version`."""
        return version - self.admission.max_lag

    @property
    def keeps_all(self) -> bool:
        """True if all trajectories stay in the store, trained or not."""
        return math.isinf(self.keep_steps)

    def first_kept(self, released_steps: int) -> int:
        """The first step whose trajectories are kept, once the first `released_steps` are covered by a checkpoint."""
        return 0 if self.keeps_all else max(0, released_steps - int(self.keep_steps))
