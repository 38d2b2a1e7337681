"""`asyncrl inspect status`: the contents and the work of a run's replay, as plain values. `table` makes them readable.

The cost grows with the trajectories in progress, not with the length of the run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from asyncrl.ids import opening_order
from asyncrl.inspect.run import LiveReplay
from asyncrl.replay.counters import counters
from asyncrl.replay.planning import recorded_plan
from asyncrl.replay.records import ENDS, LIVE, GroupRecord, ReadyGroup, TicketRecord, TrajectoryRecord
from asyncrl.replay.store import Transaction
from asyncrl.replay.stored import StoredRun, shard_paths, sum_counters

K = TypeVar("K")

RECENT_PLANS = 10
FLOW = ("accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead", "refused", "tokens_thrown_away")
DEPTHS = ("pending", "tickets", "groups", "ready", "again")


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store at one moment: counters; the number of recorded plans; trajectories by state; lags of ready groups and of
    the trajectories in the newest plans; how many tickets each actor holds, and how many trajectories each scorer; the
    open ticket whose group was opened first, and its actor; bytes of the store's pages in use."""

    counters: dict[str, int]
    steps: int
    states: dict[str, int]
    ready_lags: dict[int, int]
    planned_lags: dict[int, int]
    held: dict[str, int]
    leased: dict[str, int]
    oldest_ticket: tuple[str, str] | None
    live_bytes: int


def summarise(tx: Transaction) -> StoreSummary:
    """One shard's store."""
    version = tx.counter("version")
    return StoreSummary(
        counters=counters(tx),
        steps=tx.count("plans"),
        states={**_live_states(tx), **{state.value: tx.counter(state) for state in ENDS}},
        ready_lags=Counter(version - ready.oldest for _, ready in tx.ordered("ready", ReadyGroup)),
        planned_lags=_planned_lags(tx),
        held=tx.holders("held"),
        leased=tx.holders("leased"),
        oldest_ticket=_oldest_ticket(tx),
        live_bytes=tx.live_bytes(),
    )


def _live_states(tx: Transaction) -> dict[str, int]:
    """A trajectory that is not at its end belongs to an open group or to a plan that no checkpoint covers."""
    names = {name for key, group in GroupRecord.all(tx) for name in group.ids(key)}
    for step in range(tx.counter("released_steps"), tx.count("plans")):
        names.update(recorded_plan(tx, step).ids)
    facts = [TrajectoryRecord.load(tx, name) for name in names]
    counts = Counter(each.state for each in facts if each is not None)
    return {state.value: counts[state] for state in LIVE}


def _planned_lags(tx: Transaction) -> Counter[int]:
    lags: Counter[int] = Counter()
    steps = tx.count("plans")
    for step in range(max(0, steps - RECENT_PLANS), steps):
        plan = recorded_plan(tx, step)
        facts = [TrajectoryRecord.load(tx, name) for name in plan.ids]
        lags.update(plan.version - each.oldest for each in facts if each is not None)
    return lags


def _oldest_ticket(tx: Transaction) -> tuple[str, str] | None:
    at_work = ((name, ticket.worker) for name, ticket in TicketRecord.all(tx) if ticket.worker)
    return min(at_work, key=_opening_order, default=None)


def _opening_order(ticket: tuple[str, str]) -> tuple[bool, str]:
    return opening_order(ticket[0])


def join(shards: Sequence[StoreSummary]) -> StoreSummary:
    """All shards as one."""
    return StoreSummary(
        counters=sum_counters([each.counters for each in shards]),
        steps=min(each.steps for each in shards),
        states=_sum([each.states for each in shards]),
        ready_lags=_sum([each.ready_lags for each in shards]),
        planned_lags=_sum([each.planned_lags for each in shards]),
        held=_sum([each.held for each in shards]),
        leased=_sum([each.leased for each in shards]),
        oldest_ticket=min(
            (each.oldest_ticket for each in shards if each.oldest_ticket), key=_opening_order, default=None
        ),
        live_bytes=sum(each.live_bytes for each in shards),
    )


def _sum(parts: Sequence[dict[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)


@dataclass(frozen=True, slots=True)
class StatusSample:
    """A run at `at` seconds: its stores, the statuses of the shards that run, and why the others do not."""

    at: float
    store: StoreSummary
    live: list[dict[str, Any]]
    problem: str


def sample(stored: StoredRun, live: LiveReplay, at: float) -> StatusSample:
    """All shards, now."""
    statuses, problem = live.statuses()
    return StatusSample(at, join(stored.each(summarise)), statuses, problem)


def describe(
    folder: Path, now: StatusSample, before: StatusSample | None, high_water_bytes: int | None
) -> dict[str, Any]:
    """The sample `now` as plain values; rates are per second since `before`. Where a shard does not run, the limit of
    the stores is the configured `high_water_bytes`.

    Keys: store, running (at least one shard), problem (why not all do), version, steps (plans so far), totals, rates
    (None without `before`), states, depths, admission and failed_handshakes (None unless it runs), lags, leases,
    oldest_ticket, disk, readers (processes that have read one snapshot for too long), failing (why tickets are few).
    """
    counters, high_water = now.store.counters, sum(each["high_water_bytes"] for each in now.live)
    return {
        "store": str(folder),
        "running": bool(now.live),
        "problem": now.problem or None,
        "version": counters["version"],
        "steps": now.store.steps,
        "totals": {name: counters[name] for name in FLOW},
        "rates": None if before is None else rates(before, now),
        "states": now.store.states,
        "depths": {name: counters[f"depth_{name}"] for name in DEPTHS},
        "admission": _admission(now.live),
        "failed_handshakes": sum(each["failed_handshakes"] for each in now.live) if now.live else None,
        "lags": {
            "ready_groups": dict(sorted(now.store.ready_lags.items())),
            "planned_trajectories": dict(sorted(now.store.planned_lags.items())),
        },
        "leases": _leases(now),
        "oldest_ticket": _ticket_at_work(now),
        "disk": {
            "file_bytes": sum((path / "data.mdb").stat().st_size for path in shard_paths(folder)),
            "live_bytes": now.store.live_bytes,
            "high_water_bytes": high_water_bytes if now.problem else high_water,
        },
        "readers": [reader for each in now.live for reader in each["readers"]],
        "failing": [each["failing"] for each in now.live if each["failing"]],
    }


def rates(before: StatusSample, now: StatusSample) -> dict[str, float]:
    """Changes a second of the totals and of the steps."""
    seconds = max(now.at - before.at, 1e-9)
    totals = {name: (now.store.counters[name] - before.store.counters[name]) / seconds for name in FLOW}
    return {**totals, "steps": (now.store.steps - before.store.steps) / seconds}


def _admission(live: list[dict[str, Any]]) -> dict[str, int] | None:
    if not live:
        return None
    return {name: sum(each[name] for each in live) for name in ("committed", "capacity")}


def _leases(now: StatusSample) -> list[dict[str, Any]]:
    """The leases of every worker, and the seconds since its last request where the replay runs."""
    found = []
    for kind, holds in (("actors", now.store.held), ("scorers", now.store.leased)):
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


def _ticket_at_work(now: StatusSample) -> dict[str, Any] | None:
    if now.store.oldest_ticket is None:
        return None
    ticket, actor = now.store.oldest_ticket
    return {"id": ticket, "actor": actor, "silence_s": _silence(now.live, "actors").get(actor)}
