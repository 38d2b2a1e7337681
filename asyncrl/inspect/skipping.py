"""`asyncrl replay skip-plan`: the last resort where the training of a recorded plan fails again and again."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import replace

from asyncrl.errors import ConfigError, UnavailableError
from asyncrl.inspect.target import Live, Target
from asyncrl.replay.store import Store
from asyncrl.replay.stored import StoredRun, shard_paths


def skip_plan(target: Target, step: int, reason: str, give_up_s: float) -> int:
    """Have the plan of `step` train nothing on every shard, for good; returns how many trajectories are dead letters
    now. Through the replay where it runs, else in its store.

    Raises RefusedError: there is no such plan, or it was trained; StoreError: the store cannot be opened.
    """
    dead, away = 0, []
    with closing(StoredRun(target.folder)) as stored:
        live = Live(target, stored, give_up_s)
        for shard in range(stored.shards):
            try:
                dead += live.ask(shard, lambda client: client.skip_plan(step, reason))
            except UnavailableError:
                away.append(shard)
    # A process cannot have a store open for reading and for writing.
    return dead + sum(_skip_in_store(target, shard, step, reason) for shard in away)


def _skip_in_store(target: Target, shard: int, step: int, reason: str) -> int:
    # Reads task files, which takes longer to import than all the rest.
    from asyncrl.replay.from_config import max_bytes, replay_settings
    from asyncrl.replay.protocol import Call, SkipPlan
    from asyncrl.replay.service import ReplayService

    if target.config is None:
        raise ConfigError(f"nobody wrote down the configuration of {target.folder}: start its replay, then try again")
    config = replace(target.config, replay=replace(target.config.replay, shard=shard))
    service = ReplayService(replay_settings(config), config.replay.lease_s, time.monotonic)
    path = shard_paths(target.folder)[shard]
    call = Call(SkipPlan.kind, 0, SkipPlan(step, reason))
    with closing(Store(path, max_bytes(config.replay), durable=True)) as store, store.transaction() as tx:
        reply = service.handle(tx, call)
    assert reply is not None
    return int(reply.body)
