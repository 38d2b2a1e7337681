"""All shards of the replay as one, for the learner: a batch is made of one part from each.

Every id tells its shard, so nothing is looked up. While a shard cannot be reached, only the calls that
need it wait.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, chain
from typing import Any, TypeVar

from asyncrl.config.changes import ConfigChange
from asyncrl.ids import shard_of
from asyncrl.replay.client import ReplayClient
from asyncrl.replay.tally import SAMPLE, SOURCES, joined
from asyncrl.types import BatchPlan, LabelNeeds, Labels, Task, Trajectory

T = TypeVar("T")


class ShardedReplay:
    """The requests of a learner rank to all shards, each over its own client, at the same time."""

    def __init__(self, clients: Sequence[ReplayClient]) -> None:
        self._clients = clients
        self._threads = ThreadPoolExecutor(len(clients), thread_name_prefix="shard")

    def close(self) -> None:
        self._threads.shutdown()
        for client in self._clients:
            client.close()

    def configure(self, values: Mapping[str, Any], time: int) -> list[ConfigChange]:
        """Record the learner's configuration; returns every change that the run had. The first shard alone keeps them:
        no rank trained a step that this shard has not planned."""
        return self._clients[0].configure(values, time)

    def require(self, needs: Mapping[int, LabelNeeds]) -> None:
        """Have only episodes planned whose labels meet the newest `needs`: each has its first step. Earlier steps have
        their plans."""
        first = max(needs)
        self._all(lambda client: client.require(needs[first], first))

    def plan(self, step: int) -> BatchPlan | None:
        """The parts of all shards, joined; None while one has none."""
        return self._joined(lambda client: client.plan(step))

    def plan_ahead(self, step: int) -> BatchPlan | None:
        """The plan of a step after the learner's, if there is one already; does not wait for it."""
        return self._joined(lambda client: client.plan_ahead(step))

    def _joined(self, ask: Callable[[ReplayClient], BatchPlan | None]) -> BatchPlan | None:
        plans = [part for part in self._all(ask) if part is not None]
        return join_plans(plans) if len(plans) == len(self._clients) else None

    def labels(self, ids: Sequence[str]) -> list[Labels]:
        """Labels of trajectories, in the order of `ids`. Raises RefusedError: some are no longer stored."""
        return self._by_id(ids, lambda client, own: client.labels(own))

    def fetch(self, ids: Sequence[str]) -> list[Trajectory]:
        """Trajectories, in the order of `ids`. Raises RefusedError: one is no longer stored."""
        return self._by_id(ids, lambda client, own: client.fetch(own))

    def image(self, trajectory: str, name: bytes) -> bytes:
        """The image of this digest that a trajectory shows. Raises RefusedError: it is no longer stored."""
        return self._clients[shard_of(trajectory, len(self._clients))].image(trajectory, name)

    def task(self, name: str) -> Task | None:
        """The task of which the trajectory `name` is an episode; None: its shard does not know it."""
        return self._clients[shard_of(name, len(self._clients))].task(name)

    def published(self, version: int) -> None:
        """The learner has published `version`."""
        self._all(lambda client: client.published(version))

    def checkpointed(self, steps: int, kept: int) -> None:
        """A checkpoint covers the first `steps` steps, and every one that is kept the first `kept`."""
        self._all(lambda client: client.checkpointed(steps, kept))

    def evaluate(self, version: int) -> None:
        """Have the held-out tasks run with `version` or newer."""
        self._all(lambda client: client.evaluate(version))

    def evaluation(self, version: int, wait: bool = True) -> Mapping[str, Any] | None:
        """The result of an evaluation over all shards; None while it is not complete."""
        parts = self._all(lambda client: client.evaluation(version, wait))
        done = [part for part in parts if part is not None]
        return join_evaluations(done) if len(done) == len(self._clients) else None

    def finished(self) -> None:
        """The learner has done the last step of the run."""
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


def _demonstrations(plans: Sequence[BatchPlan]) -> list[int]:
    firsts = accumulate((len(plan.ids) for plan in plans), initial=0)
    return [first + index for first, plan in zip(firsts, plans, strict=False) for index in plan.demonstrations]


def join_plans(plans: Sequence[BatchPlan]) -> BatchPlan:
    """One plan out of the shards' parts of a step, in the order of the shards; skipped where one part is."""
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
    )


def join_evaluations(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One result out of the shards' parts of an evaluation: means weigh by their counts."""
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
