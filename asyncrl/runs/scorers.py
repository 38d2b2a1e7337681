"""The metrics of scorers. A scorer has a worker for each shard of the replay. With several shards, each worker writes
its own file."""

from __future__ import annotations

import math
from collections.abc import Iterable

_SHARD = "-shard-"


def files_of_scorer(name: str, shards: int) -> list[str]:
    """The roles under which the workers of a scorer write their metrics."""
    return [name] if shards == 1 else [f"{name}{_SHARD}{shard}" for shard in range(shards)]


def process_of(role: str) -> str:
    """The name of the process that writes the metrics of `role`."""
    return role.partition(_SHARD)[0]


def idle_of_workers(shares: Iterable[float]) -> float:
    """The share of time in which a scorer was idle, from the shares of its workers.

    The workers run at the same time, and the scorer is idle while all of them are idle. The times at which each worker
    was idle are unknown, so this assumes that the workers are idle independently of each other.
    """
    return math.prod(shares)
