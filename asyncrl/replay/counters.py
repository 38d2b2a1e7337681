"""Reports the replay's counters and the sizes of its tables, and audits the store."""

from __future__ import annotations

from collections import Counter
from typing import Any

from asyncrl.config.schema.scoring import GROUP_KIND
from asyncrl.errors import StoreError
from asyncrl.ids import is_evaluation
from asyncrl.replay.batches.planning import recorded_plan
from asyncrl.replay.groups import is_done
from asyncrl.replay.settings import ReplaySettings
from asyncrl.replay.store.records import LIVE, GroupRecord, TrajectoryRecord, TrajectoryState
from asyncrl.replay.store.transaction import Transaction
from asyncrl.types import BatchPlan

COUNTERS = (
    *("version", "committed", "accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead", "late"),
    *("duplicates", "failures", "scoring_failures", "late_labels", "tickets_redelivered", "leases_redelivered"),
    *("groups_reissued", "plans_skipped", "tasks_passed_over", "tokens_thrown_away", "damaged", "refused"),
    *("internal_errors", "dead_letters_dropped", "tokens_accepted", "tokens_labelled", "tokens_trained"),
    *("tokens_evicted", "tokens_filtered", "tokens_dropped", "tokens_dead", "tokens_masked", "wait_limits_reached"),
)
DEPTHS = ("pending", "tickets", "groups", "data", "waiting", "ready", "plans", "dead", "again")


def status(tx: Transaction, settings: ReplaySettings) -> dict[str, int]:
    """All counters, the sizes of the tables, and the bytes of the store with their limit."""
    return {
        **counters(tx),
        "store_bytes": tx.live_bytes(),
        "dead_letter_bytes": tx.counter("dead_letter_bytes"),
        "high_water_bytes": settings.high_water_bytes,
    }


def counters(tx: Transaction) -> dict[str, int]:
    """All counters, including one for each reason for which filters refused groups. The number of entries in each table
    is `depth_TABLE`."""
    return {
        **{name: tx.counter(name) for name in COUNTERS},
        **tx.counters("filtered/"),
        **{f"depth_{table}": tx.count(table) for table in DEPTHS},
        "depth_waiting": tx.count("waiting") + _other_members(tx),
    }


def _other_members(tx: Transaction) -> int:
    """The number of waiting trajectories that the table `waiting` does not count. A group that is scored whole is one
    entry of this table."""
    groups = [GroupRecord.load(tx, name) for name in tx.queue("waiting", str, GROUP_KIND)]
    return sum(len(group.attempts) - 1 for group in groups if group is not None)


def unreported(tx: Transaction, steps: int) -> dict[str, int]:
    """The amounts by which the counters `trained` and `tokens_trained` will grow once a checkpoint of the first `steps`
    steps is reported. A learner that stops saves a checkpoint, but reports it only after it was started again. The
    amounts are 0 if the checkpoint belongs to another run."""
    is_foreign = steps > tx.count("plans") or tx.counter("imported")
    planned = range(0) if is_foreign else range(tx.counter("released_steps"), steps)
    plans = [recorded_plan(tx, step) for step in planned]
    covered = Counter(name for plan in plans if not plan.skipped for name in plan.ids)
    trained = tokens = 0
    for name, times in covered.items():
        record = TrajectoryRecord.of(tx, name)
        if is_done(tx, record, record.trained + times):
            trained, tokens = trained + 1, tokens + record.trained_tokens
    return {"trained": trained, "tokens_trained": tokens}


def audit(tx: Transaction, uses: int) -> dict[str, Any]:
    """Audit all trajectories that were accepted for training.

    - `states`: the number of these trajectories in each state
    - `lost`: the number of trajectories without readable data although their state is not final, plus the number of
      accepted trajectories without a record
    - `trained_twice`: the number of plans that contain a trajectory, minus its allowed `uses`, summed over the
      trajectories for which this difference is positive
    - `planned`: the number of trajectories in plans
    - `largest_lag`: the largest lag of a trained token of a planned trajectory

    Skipped plans do not count.
    """
    states: Counter[str] = Counter()
    lost = 0
    for key, record in tx.items("trajectories", TrajectoryRecord):
        if record.state is TrajectoryState.EVALUATED or is_evaluation(record.group):
            continue
        states[record.state.value] += 1
        lost += record.state in LIVE and not _readable(tx, key.decode())
    plans = [plan for _, plan in tx.items("plans", BatchPlan) if not plan.skipped]
    planned = Counter(name for plan in plans for name in plan.ids)
    lags = [TrajectoryRecord.of(tx, name).trained_lag_at(plan.version) for plan in plans for name in plan.ids]
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
