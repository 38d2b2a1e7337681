"""What the replay tells about itself: counters and depths for people, and an audit for tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.replay.episodes import is_live
from asyncrl.replay.groups import Rules
from asyncrl.replay.records import Evaluation, Facts, State
from asyncrl.replay.store import Transaction

COUNTERS = (
    "version",
    "committed",
    "accepted",
    "labelled",
    "trained",
    "evicted",
    "dropped",
    "dead",
    "late",
    "duplicates",
    "failures",
    "scoring_failures",
    "late_labels",
    "tickets_redelivered",
    "leases_redelivered",
    "tokens_thrown_away",
    "refused",
)


def status(tx: Transaction, rules: Rules) -> dict[str, Any]:
    """Counters, and how many tickets, trajectories and groups wait where."""
    tables = ("pending", "tickets", "groups", "data", "waiting", "ready", "plans", "dead")
    return {
        **{name: tx.counter(name) for name in COUNTERS},
        **{f"depth_{table}": tx.count(table) for table in tables},
        "store_bytes": tx.live_bytes(),
        "capacity": rules.admission.capacity(tx.counter("version")),
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
    }


def audit(tx: Transaction) -> dict[str, Any]:
    """Every trajectory ever accepted for training, by state; `lost` are live ones without data, `trained_twice` ids
    that stand in two plans."""
    states: Counter[str] = Counter()
    lost = 0
    for key, value in tx.items("facts"):
        facts = Facts(*value)
        if facts.state == State.EVALUATED or not facts.group.startswith("t"):
            continue
        states[facts.state] += 1
        lost += is_live(facts) and tx.get_bytes("data", key.decode()) is None
    planned = Counter(name for _, plan in tx.items("plans") for name in plan["ids"])
    return {
        "states": dict(states),
        "lost": lost + tx.counter("accepted") - states.total(),
        "trained_twice": sum(times - 1 for times in planned.values()),
        "planned": len(planned),
    }
