"""Where a store stands at one moment. The cost is that of what is under way, not of what the run has ever done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from asyncrl.replay.counters import counters
from asyncrl.replay.planning import recorded_plan
from asyncrl.replay.records import ENDS, LIVE, GroupRecord, ReadyGroup, TicketRecord, TrajectoryRecord
from asyncrl.replay.store import Transaction
from asyncrl.replay.stored import sum_counters

K = TypeVar("K")

RECENT_PLANS = 10


@dataclass(frozen=True, slots=True)
class Standing:
    """Counters; how many plans are recorded; trajectories by state; lags of the groups that are ready and of the
    trajectories in the newest plans; how many tickets each actor holds, and how many trajectories each scorer; the
    ticket at work whose group was opened first, and its actor; bytes of the store's pages in use."""

    counters: dict[str, int]
    steps: int
    states: dict[str, int]
    ready_lags: dict[int, int]
    planned_lags: dict[int, int]
    held: dict[str, int]
    leased: dict[str, int]
    oldest_ticket: tuple[str, str] | None
    live_bytes: int


def standing(tx: Transaction) -> Standing:
    """Where one shard stands."""
    version = tx.counter("version")
    return Standing(
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
    """What is not at its end is in an open group, or in a plan that no checkpoint covers."""
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
    return min(at_work, key=_opened, default=None)


def _opened(ticket: tuple[str, str]) -> tuple[bool, str]:
    """The order in time of the feed's groups; those of evaluations and of tasks that run again come behind."""
    return not ticket[0].startswith("t"), ticket[0]


def join(shards: Sequence[Standing]) -> Standing:
    """All shards as one."""
    return Standing(
        counters=sum_counters([each.counters for each in shards]),
        steps=min(each.steps for each in shards),
        states=_sum([each.states for each in shards]),
        ready_lags=_sum([each.ready_lags for each in shards]),
        planned_lags=_sum([each.planned_lags for each in shards]),
        held=_sum([each.held for each in shards]),
        leased=_sum([each.leased for each in shards]),
        oldest_ticket=min((each.oldest_ticket for each in shards if each.oldest_ticket), key=_opened, default=None),
        live_bytes=sum(each.live_bytes for each in shards),
    )


def _sum(parts: Sequence[dict[K, int]]) -> dict[K, int]:
    total: Counter[K] = Counter()
    for part in parts:
        total.update(part)
    return dict(total)
