"""Measures the time from the start of a replay with a large store to its first answer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from asyncrl.ids import feed_group, ticket_id
from asyncrl.replay.store.records import TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.store import Store
from benchmarks.serving import load, replay


def measure(folder: Path, facts: int) -> dict[str, Any]:
    """Seconds with an empty store, and with the records of `facts` trajectories."""
    empty_s = start(folder)
    fill(folder, facts)
    return {"facts": facts, "empty_s": empty_s, "full_s": start(folder), "load": load()}


def start(folder: Path) -> float:
    """Seconds from the start of the process to its first answer."""
    started = time.perf_counter()
    with replay(folder):
        return time.perf_counter() - started


def fill(folder: Path, facts: int) -> None:
    """Write records of trained and released trajectories."""
    store = Store(folder / "run" / "replay", 1 << 32, durable=False)
    with store.transaction() as tx:
        for number in range(facts):
            group, member = feed_group(number // 8), number % 8
            TrajectoryRecord(group, member, 8192, 4096, 0, TrajectoryState.TRAINED, plans=1, trained=1).save(
                tx, ticket_id(group, member, 0)
            )
        for name in ("accepted", "labelled", TrajectoryState.TRAINED, "committed"):
            tx.add(name, facts)
    store.close()
