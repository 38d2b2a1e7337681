"""Lets the learner use all shards of the replay like one replay: a batch has one part from each shard.

The shard of a trajectory follows from its id. While a shard cannot be reached, only calls that need it wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any, TypeVar

from asyncrl.config.changes import ConfigChange
from asyncrl.errors import ConfigError, RefusedError, TasksSolvedError
from asyncrl.ids import shard_of
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.held_out.tally import SAMPLE, SOURCES, joined
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Task, Trajectory

T = TypeVar("T")


class ShardedReplay:
    """Sends the requests of a learner rank to all shards at the same time, with one client per shard."""

    def __init__(self, clients: Sequence[ReplayClient]) -> None:
        self._clients = clients
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="shard")

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def configure(self, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
        """Record the learner's configuration. Returns all changes of the run so far. Only the first shard stores them.
        The changes hold from the first step that some shard has not planned, since this step cannot have been trained.
        Raises ConfigError: see `ReplayClient.configure`."""
        try:
            planned = min(self._all(lambda client: client.status()["depth_plans"]))
        except RefusedError as error:
            # The replay is that of another run.
            raise ConfigError(str(error)) from error
        return self._clients[0].configure(values, time, planned)

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        """Have the replay plan only episodes whose labels meet the newest needs. Each key of `needs` is the first step
        to which its value applies. Every shard has planned the steps before the newest key. A shard that has also
        planned that step withdraws its part if the labels do not meet the needs."""
        first = max(needs)
        self._all(lambda client: client.require(needs[first], first))

    def plan(self, step: int) -> BatchPlan | None:
        """The plan of a step, joined from the parts of all shards. `None` while a shard has none. A shard whose tasks
        are solved has no part in a step for which another shard has groups. Raises TasksSolvedError: the tasks of all
        shards are solved."""
        parts = self._all(lambda client: _part(client, step))
        solved = [part for part in parts if isinstance(part, TasksSolvedError)]
        plans = [part for part in parts if isinstance(part, BatchPlan)]
        if len(solved) + len(plans) < len(parts):
            return None
        if solved and not any(plan.ids for plan in plans):
            raise solved[0]
        # Every rank gets the same plan, since a shard records that it has no part.
        return self._joined(lambda client: client.plan_at_once(step)) if solved else join_plans(plans)

    def plan_ahead(self, step: int) -> BatchPlan | None:
        """The plan of a step that the learner has not reached. `None` if there is none yet; does not wait."""
        return self._joined(lambda client: client.plan_ahead(step))

    def _joined(self, ask: Callable[[ReplayClient], BatchPlan | None]) -> BatchPlan | None:
        plans = [part for part in self._all(ask) if part is not None]
        return join_plans(plans) if len(plans) == len(self._clients) else None

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """The labels of the trajectories `ids`, in their order. Raises RefusedError: some are no longer stored."""
        return self._by_id(ids, lambda client, own: client.labels(own))

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """The trajectories of `ids`, in their order. Raises RefusedError: one is no longer stored."""
        return self._by_id(ids, lambda client, own: client.fetch(own))

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The bytes of an image of a trajectory. `name` is the image's digest. Raises RefusedError: the image is not
        stored."""
        return self._clients[shard_of(trajectory, len(self._clients))].image(trajectory, name)

    def task(self, name: str) -> Task | None:
        """The task of the trajectory `name`. `None` if its shard does not know it."""
        return self._clients[shard_of(name, len(self._clients))].task(name)

    def published(self, version: int) -> None:
        """Tell all shards that the learner has published `version`."""
        self._all(lambda client: client.published(version))

    def checkpointed(self, steps: int, kept: int) -> None:
        """Tell all shards that a checkpoint covers the first `steps` steps, and that every kept checkpoint covers the
        first `kept` steps."""
        self._all(lambda client: client.checkpointed(steps, kept))

    def evaluate(self, version: int) -> None:
        """Have the held-out tasks run with policy version `version` or a newer one."""
        self._all(lambda client: client.evaluate(version))

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """The result of an evaluation over all shards. `None` while it is incomplete."""
        parts = self._all(lambda client: client.evaluation(version, wait))
        done = [part for part in parts if part is not None]
        return join_evaluations(done) if len(done) == len(self._clients) else None

    def finished(self) -> None:
        """Tell all shards that the learner has done the last step of the run."""
        self._all(ReplayClient.finished)

    def _all(self, ask: Callable[[ReplayClient], T]) -> list[T]:
        return list(self._threads.map(ask, self._clients))

    def _by_id(self, ids: Sequence[str], ask: Callable[[ReplayClient, Sequence[str]], Sequence[T]]) -> list[T]:
        own: dict[int, list[str]] = defaultdict(list)
        for name in ids:
            own[shard_of(name, len(self._clients))].append(name)
        parts = self._threads.map(lambda shard: ask(self._clients[shard], own[shard]), own)
        found = dict(zip(chain.from_iterable(own.values()), chain.from_iterable(parts), strict=True))
        return [found[name] for name in ids]


def _part(client: ReplayClient, step: int) -> BatchPlan | TasksSolvedError | None:
    """A shard's part of a plan, or its message that its tasks are solved. `None` if it has neither yet."""
    try:
        return client.plan(step)
    except TasksSolvedError as error:
        return error


def _demonstrations(plans: Sequence[BatchPlan]) -> list[int]:
    firsts = accumulate((len(plan.ids) for plan in plans), initial=0)
    return [first + index for first, plan in zip(firsts, plans, strict=False) for index in plan.demonstrations]


def join_plans(plans: Sequence[BatchPlan]) -> BatchPlan:
    """Join the shards' parts of a step's plan, in the order of the shards. The plan is skipped if a part is skipped."""
    masks = any(plan.trained for plan in plans)
    firsts = [plan.first_trained or [0] * len(plan.ids) for plan in plans]
    return BatchPlan(
        step=plans[0].step,
        version=plans[0].version,
        ids=[name for plan in plans for name in plan.ids],
        group_ids=[name for plan in plans for name in plan.group_ids],
        tokens=[count for plan in plans for count in plan.tokens],
        sampled=[count for plan in plans for count in plan.sampled],
        weights=[weight for plan in plans for weight in plan.weights],
        skipped=next((plan.skipped for plan in plans if plan.skipped), ""),
        shared=[count for plan in plans for count in plan.shared or [0] * len(plan.ids)],
        demonstrations=_demonstrations(plans),
        first_trained=[version for part in firsts for version in part] if masks else [],
        trained=[count for plan in plans for count in plan.trained_tokens] if masks else [],
    )


def join_evaluations(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join the shards' parts of an evaluation's result. Means are weighted by the counts of the parts."""
    count = sum(part["count"] for part in parts)
    scored = [part for part in parts if part["count"]]
    means = {
        name: sum(part[name] * part["count"] for part in scored) / count if count else float("nan")
        for name in ("outcome", "accuracy", "reward")
    }
    sums = {name: sum(part[name] for part in parts) for name in ("count", "failed", "tokens", "newer_tokens")}
    newest = max(part["newest_version"] for part in parts)
    sample = [name for part in parts for name in part[SAMPLE]]
    sources = joined([part[SOURCES] for part in parts])
    return {**means, **sums, "newest_version": newest, SAMPLE: sample, SOURCES: sources}
