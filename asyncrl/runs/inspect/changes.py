"""`asyncrl inspect requeue`, `discard` and `skip-plan`: the commands that change a run. A running replay makes the
change itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from asyncrl.errors import ConfigError, RefusedError
from asyncrl.ids import shard_of
from asyncrl.replay.client.client import ReplayClient
from asyncrl.replay.store.store import Store, in_use
from asyncrl.replay.stored import StoredRun, shard_paths
from asyncrl.runs.from_config import read_replay_settings
from asyncrl.runs.run import Run
from asyncrl.runs.state.live import LiveReplay

REQUEUED = {"scoring": "is requeued: it is scored again", "task": "is requeued: its task runs again as a new group"}

Change = Callable[[ReplayClient, str], str]
"""Changes one dead letter, the record of a failed attempt, and returns a description of the change."""


@dataclass(frozen=True, slots=True)
class ChangeResult:
    """The result for one dead letter. If it was `refused`, nothing changed, and `text` says why."""

    id: str
    text: str
    refused: bool = False


def requeue(client: ReplayClient, name: str) -> str:
    return REQUEUED[client.requeue(name)]


def discard(client: ReplayClient, name: str) -> str:
    client.discard(name)
    return "is discarded"


def change_all(live: LiveReplay, names: Sequence[str], change: Change) -> Iterator[ChangeResult]:
    """Change dead letters through the replay, shard by shard. Raises UnavailableError: the replay does not run."""
    for shard in range(live.shards):
        if own := [name for name in names if shard_of(name, live.shards) == shard]:
            yield from live.call(shard, partial(_change_each, names=own, change=change))


def _change_each(client: ReplayClient, names: Sequence[str], change: Change) -> list[ChangeResult]:
    results = []
    for name in names:
        try:
            results.append(ChangeResult(name, change(client, name)))
        except RefusedError as error:
            results.append(ChangeResult(name, str(error), refused=True))
    return results


def skip_plan(run: Run, step: int, reason: str, connect: Callable[[StoredRun], LiveReplay]) -> int:
    """Make `step` train nothing, even after a restart: mark its plan, the list of its trajectories, on every shard.
    This is the last resort if the training of the step fails every time. Return the number of trajectories that become
    dead letters. A running replay makes the change; otherwise this function changes the store.

    Raises RefusedError: the step has no plan, or was trained; StoreError: the store cannot be opened;
    UnavailableError: a replay serves the store, but does not answer.
    """
    with run.stored() as stored:
        live = connect(stored)
        served = [shard for shard, path in enumerate(shard_paths(run.store)) if in_use(path)]
        dead = sum(live.call(shard, lambda client: client.skip_plan(step, reason)) for shard in served)
    # A process cannot have a store open for reading and for writing at the same time.
    return dead + sum(_skip_in_store(run, shard, step, reason) for shard in range(live.shards) if shard not in served)


def _skip_in_store(run: Run, shard: int, step: int, reason: str) -> int:
    # Only this function needs these imports, which load the reader of task files and take longer than all others.
    from asyncrl.replay.messages import Call
    from asyncrl.replay.protocol import SkipPlan
    from asyncrl.replay.service import ReplayService

    settings = run.settings()
    if settings is None:
        raise ConfigError(f"{run.store} has no configuration: start its replay, then try again")
    replay = settings.replay
    service = ReplayService(read_replay_settings(run.folder, shard), replay.lease_s, time.monotonic)
    path = shard_paths(run.store)[shard]
    call = Call("SkipPlan", 0, SkipPlan(step, reason))
    with closing(Store(path, int(replay.max_store_gb * 1e9), durable=True)) as store, store.transaction() as tx:
        reply = service.handle(tx, call)
    assert reply is not None
    return int(reply.body)
