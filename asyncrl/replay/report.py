"""What the replay tells about itself: counters and depths for people, and an audit for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.errors import StoreError
from asyncrl.replay.records import LIVE, Evaluation, Facts, State
from asyncrl.replay.rules import Rules
from asyncrl.replay.store import Transaction

COUNTERS = (
    "version",
    "committed",
    "accepted",
    "labelled",
    "trained",
    "evicted",
    "filtered",
    "dropped",
    "dead",
    "late",
    "duplicates",
    "failures",
    "scoring_failures",
    "late_labels",
    "tickets_redelivered",
    "leases_redelivered",
    "groups_reissued",
    "plans_skipped",
    "tasks_passed_over",
    "tokens_thrown_away",
    "damaged",
    "refused",
    "dead_letters_dropped",
)
DEPTHS = ("pending", "tickets", "groups", "data", "waiting", "ready", "plans", "dead", "again")


def status(tx: Transaction, rules: Rules) -> dict[str, int]:
    """Counters, and how many tickets, trajectories and groups wait where."""
    return {
        **counters(tx),
        "store_bytes": tx.live_bytes(),
        "dead_letter_bytes": tx.counter("dead_letter_bytes"),
        "high_water_bytes": rules.high_water_bytes,
        "capacity": rules.admission.capacity(tx.counter("version")),
    }


def counters(tx: Transaction) -> dict[str, int]:
    """Every counter, those of filters by their reasons, and the depths of the tables."""
    return {
        **{name: tx.counter(name) for name in COUNTERS},
        **tx.counters("filtered/"),
        **{f"depth_{table}": tx.count(table) for table in DEPTHS},
    }


def evaluation(tx: Transaction, version: int) -> dict[str, Any] | None:
    """The result of a complete evaluation; None while there is none. A task that failed has no score and no weight."""
    result = Evaluation.load(tx, version)
    if result is None or result.done < result.total:
        return None
    scored = result.done - result.failed
    return {
        "accuracy": result.outcome / scored if scored else float("nan"),
        "mean_reward": result.reward / scored if scored else float("nan"),
        "count": scored,
        "failed": result.failed,
        "tokens": result.tokens,
        "newer_tokens": result.newer_tokens,
        "newest_version": result.newest,
    }


def audit(tx: Transaction, uses: int) -> dict[str, Any]:
    """Every trajectory ever accepted for training, by state; `lost` are live ones without readable data,
    `trained_twice` counts how often ids stand in more than `uses` plans, `largest_lag` is that of any planned
    trajectory. Plans that were skipped count as none."""
    states: Counter[str] = Counter()
    lost = 0
    for key, value in tx.items("facts"):
        facts = Facts(*value)
        if facts.state == State.EVALUATED or facts.group.startswith("e"):
            continue
        states[facts.state] += 1
        lost += facts.state in LIVE and not _readable(tx, key.decode())
    plans = [plan for _, plan in tx.items("plans") if not plan.get("skipped")]
    planned = Counter(name for plan in plans for name in plan["ids"])
    lags = [plan["version"] - Facts.of(tx, name).oldest for plan in plans for name in plan["ids"]]
    return {
        "states": dict(states),
        "lost": lost + tx.counter("accepted") - states.total(),
        "trained_twice": sum(max(0, times - uses) for times in planned.values()),
        "planned": len(planned),
        "largest_lag": max(lags, default=0),
    }


def _readable(tx: Transaction, trajectory: str) -> bool:
    try:
        return tx.get_bytes("data", trajectory) is not None
    except StoreError:
        return False
