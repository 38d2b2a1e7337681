"""`asyncrl replay status`: what a run's replay holds and does, as plain values. `table` makes it readable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncrl.inspect.standing import Standing, join, standing
from asyncrl.inspect.target import Live
from asyncrl.replay.stored import StoredRun, shard_paths

FLOW = ("accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead", "refused", "tokens_thrown_away")
DEPTHS = ("pending", "tickets", "groups", "ready", "again")


@dataclass(frozen=True, slots=True)
class Look:
    """One look at a run at `at` seconds: what the stores say, what the shards say that run, and why others do not."""

    at: float
    standing: Standing
    live: list[dict[str, Any]]
    problem: str


def look(stored: StoredRun, live: Live, at: float) -> Look:
    """Look at all shards."""
    statuses, problem = live.statuses()
    return Look(at, join(stored.each(standing)), statuses, problem)


def describe(folder: Path, now: Look, before: Look | None, high_water_bytes: int | None) -> dict[str, Any]:
    """What `now` shows; rates are those since `before`, per second. `high_water_bytes` is the configuration's, where a
    shard does not run.

    Keys: store, running (at least one shard), problem (why not all do), version, steps (plans so far), totals, rates
    (None without `before`), states, depths, admission and failed_handshakes (None unless it runs), lags, leases,
    oldest_ticket, disk, readers (processes that have read one snapshot for too long), failing (why tickets are few).
    """
    counters, high_water = now.standing.counters, sum(each["high_water_bytes"] for each in now.live)
    return {
        "store": str(folder),
        "running": bool(now.live),
        "problem": now.problem or None,
        "version": counters["version"],
        "steps": now.standing.steps,
        "totals": {name: counters[name] for name in FLOW},
        "rates": None if before is None else rates(before, now),
        "states": now.standing.states,
        "depths": {name: counters[f"depth_{name}"] for name in DEPTHS},
        "admission": _admission(now.live),
        "failed_handshakes": sum(each["failed_handshakes"] for each in now.live) if now.live else None,
        "lags": {
            "ready_groups": dict(sorted(now.standing.ready_lags.items())),
            "planned_trajectories": dict(sorted(now.standing.planned_lags.items())),
        },
        "leases": _leases(now),
        "oldest_ticket": _oldest_ticket(now),
        "disk": {
            "file_bytes": sum((path / "data.mdb").stat().st_size for path in shard_paths(folder)),
            "live_bytes": now.standing.live_bytes,
            "high_water_bytes": high_water_bytes if now.problem else high_water,
        },
        "readers": [reader for each in now.live for reader in each["readers"]],
        "failing": [each["failing"] for each in now.live if each["failing"]],
    }


def rates(before: Look, now: Look) -> dict[str, float]:
    """Changes a second of the totals and of the steps."""
    seconds = max(now.at - before.at, 1e-9)
    totals = {name: (now.standing.counters[name] - before.standing.counters[name]) / seconds for name in FLOW}
    return {**totals, "steps": (now.standing.steps - before.standing.steps) / seconds}


def _admission(live: list[dict[str, Any]]) -> dict[str, int] | None:
    if not live:
        return None
    return {name: sum(each[name] for each in live) for name in ("committed", "capacity")}


def _leases(now: Look) -> list[dict[str, Any]]:
    """What every worker holds, and the seconds since it was heard, where the replay runs."""
    found = []
    for kind, holds in (("actors", now.standing.held), ("scorers", now.standing.leased)):
        silence = _silence(now.live, kind)
        found += [
            {"kind": kind, "worker": worker, "holds": holds.get(worker, 0), "silence_s": silence.get(worker)}
            for worker in sorted(holds.keys() | silence.keys())
        ]
    return found


def _silence(live: list[dict[str, Any]], kind: str) -> Mapping[str, float]:
    """The shortest silence of each worker towards any shard."""
    found: dict[str, float] = {}
    for status in live:
        for worker, seconds in status["silence_s"][kind].items():
            found[worker] = min(seconds, found.get(worker, seconds))
    return found


def _oldest_ticket(now: Look) -> dict[str, Any] | None:
    if now.standing.oldest_ticket is None:
        return None
    ticket, actor = now.standing.oldest_ticket
    return {"id": ticket, "actor": actor, "silence_s": _silence(now.live, "actors").get(actor)}
