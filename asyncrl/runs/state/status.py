"""`asyncrl inspect status`: describes the contents and the work of a run's replay as plain values. `table` makes them
readable.

The cost grows with the trajectories in progress and the dead letters, not with the length of the run.
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import to_builtins

from asyncrl.config.locations import steps_in_newest_checkpoint
from asyncrl.ids import is_evaluation, opening_order
from asyncrl.replay.batches import cohorts
from asyncrl.replay.batches.planning import recorded_plan
from asyncrl.replay.batches.selection import Selection, sum_selections
from asyncrl.replay.counters import counters, unreported
from asyncrl.replay.store.records import (
    ENDS,
    LIVE,
    GroupRecord,
    ReadyGroup,
    TicketRecord,
    TrajectoryRecord,
    TrajectoryState,
)
from asyncrl.replay.store.transaction import Transaction
from asyncrl.replay.stored import StoredRun, shard_paths, sum_counters
from asyncrl.runs.failures import count_letters
from asyncrl.runs.health.evidence import read_evidence
from asyncrl.runs.health.health import judge
from asyncrl.runs.progress import RunProgress, newest_shares
from asyncrl.runs.run import Run
from asyncrl.runs.state.live import LiveReplay

RECENT_PLANS = 10
TOO_OLD = "too old"
"""The only reason for which a trajectory is evicted: it exceeds `replay.max_lag`."""
FLOW = (
    *("accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead"),
    *("failures", "scoring_failures", "refused", "tokens_thrown_away", "tokens_masked"),
)
TOKENS = ("accepted", "labelled", "trained", "evicted", "filtered", "dropped", "dead")
DEPTHS = ("pending", "tickets", "groups", "ready", "again")


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store at one moment.

    - `counters` include `live_bytes`, the bytes of its pages in use.
    - `counts` of trajectories: `states` counts them by state, `planned_trajectories` those of the newest plans by lag,
      `scorers` by the scorer that holds them, and `evicted` by reason.
    - `counts` of groups: `ready_groups` by lag, `filtered` by reason, and `groups`: open groups by the work that
      they wait for (`playing`, `scoring`, and the same for held-out tasks).
    - Other `counts`: `actors` counts the tickets (permissions to run an episode) of each actor, and `dead_letters`
      counts the records of failed attempts by what failed.
    - `steps` is the number of recorded plans.
    - `oldest_ticket` is the open ticket whose group was opened first, with its actor.
    - `learner_step` is the step that the learner requested last.
    - `selection` counts the decided episodes (`asyncrl.replay.batches.selection`).
    - `needs` has for each actor the oldest policy version that may start at least one of the training episodes that it
      holds.
    """

    counters: dict[str, int]
    counts: dict[str, Counter[Any]]
    steps: int
    oldest_ticket: tuple[str, str] | None
    learner_step: int = 0
    selection: Selection = field(default_factory=Selection)
    needs: Mapping[str, int] = field(default_factory=dict)


def summarise(tx: Transaction, kept_steps: int = 0) -> StoreSummary:
    """Summarise one shard's store. Trajectories that a checkpoint of `kept_steps` steps covers count as trained, even
    if the learner has not reported the checkpoint to the replay."""
    version, steps = tx.counter("version"), tx.count("plans")
    states, groups = _open_groups(tx)
    kept = unreported(tx, kept_steps)
    held = [(name, ticket) for name, ticket in TicketRecord.all(tx) if ticket.worker]
    needs: dict[str, int] = {}
    for _, ticket in held:
        if not is_evaluation(ticket.group):
            needs[ticket.worker] = min(ticket.version, needs.get(ticket.worker, ticket.version))
    states |= {state.value: tx.counter(state) for state in ENDS}
    states[TrajectoryState.PLANNED] -= kept["trained"]
    states[TrajectoryState.TRAINED] += kept["trained"]
    counts: dict[str, Counter[Any]] = {
        "states": Counter(states),
        "ready_groups": Counter(version - ready.oldest for _, ready in tx.items("ready", ReadyGroup)),
        "planned_trajectories": _planned_lags(tx),
        "actors": Counter(tx.holders("held")),
        "scorers": Counter(tx.holders("leased")),
        "dead_letters": count_letters(tx),
        "evicted": Counter({TOO_OLD: tx.counter(TrajectoryState.EVICTED)}),
        "filtered": Counter({name.partition("/")[2]: count for name, count in tx.counters("filtered/").items()}),
        "groups": groups,
    }
    totals = {**counters(tx), "live_bytes": tx.live_bytes()}
    totals |= {name: totals[name] + count for name, count in kept.items()}
    selection = cohorts.selection(tx)
    oldest = _oldest([(name, ticket.worker) for name, ticket in held])
    return StoreSummary(totals, counts, steps, oldest, tx.counter("learner_step"), selection, needs)


def join(shards: Sequence[StoreSummary]) -> StoreSummary:
    """The summary of all shards together."""
    counts: dict[str, Counter[Any]] = {name: Counter() for name in shards[0].counts}
    for shard in shards:
        for name, found in shard.counts.items():
            counts[name].update(found)
    oldest = _oldest([each.oldest_ticket for each in shards if each.oldest_ticket])
    steps, learner_step = min(each.steps for each in shards), min(each.learner_step for each in shards)
    totals = sum_counters([each.counters for each in shards])
    selection = sum_selections(each.selection for each in shards)
    return StoreSummary(totals, counts, steps, oldest, learner_step, selection)


def _oldest(tickets: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    return min(tickets, key=lambda ticket: opening_order(ticket[0]), default=None)


def _open_groups(tx: Transaction) -> tuple[dict[str, int], Counter[str]]:
    """Count the trajectories in each state that is not final, and the open groups by the work that they wait for. A
    trajectory in such a state belongs to an open group, or to a plan that no checkpoint covers."""
    facts: dict[str, TrajectoryRecord | None] = {}
    groups: Counter[str] = Counter()
    for key, group in GroupRecord.all(tx):
        members = {name: TrajectoryRecord.load(tx, name) for name in group.ids(key)}
        facts |= members
        if not all(group.labelled):
            waits_for = "scoring" if all(members.values()) else "playing"
            groups[waits_for if group.training else f"held_out_{waits_for}"] += 1
    for step in range(tx.counter("released_steps"), tx.count("plans")):
        facts |= {name: TrajectoryRecord.load(tx, name) for name in recorded_plan(tx, step).ids if name not in facts}
    counts = Counter(each.state for each in facts.values() if each is not None)
    return {state.value: counts[state] for state in LIVE}, groups


def _planned_lags(tx: Transaction) -> Counter[int]:
    lags: Counter[int] = Counter()
    steps = tx.count("plans")
    for step in range(max(0, steps - RECENT_PLANS), steps):
        plan = recorded_plan(tx, step)
        facts = [TrajectoryRecord.load(tx, name) for name in plan.ids]
        # The lag of an episode without a trained token is -1.
        found = (each.trained_lag_at(plan.version) for each in facts if each is not None)
        lags.update(lag for lag in found if lag >= 0)
    return lags


@dataclass(frozen=True, slots=True)
class StatusSample:
    """A run at one moment.

    - `at`: the moment, in seconds;
    - `store`: the summary of all stores together;
    - `shards`: the summary of each shard's store;
    - `answers`: the status of each shard; None for a shard that does not answer;
    - `problem`: the reasons why shards do not answer; empty if all do.
    """

    at: float
    store: StoreSummary
    shards: Sequence[StoreSummary]
    answers: Sequence[dict[str, Any] | None]
    problem: str

    @property
    def live(self) -> list[dict[str, Any]]:
        """The statuses of the shards that answer."""
        return [each for each in self.answers if each is not None]


def sample(stored: StoredRun, live: LiveReplay, at: float) -> StatusSample:
    """Sample all shards now."""
    answers, problem = live.statuses()
    shards = stored.each(summarise, steps_in_newest_checkpoint(stored.folder.parent))
    return StatusSample(at, join(shards), shards, answers, problem)


def describe(
    run: Run, now: StatusSample, before: StatusSample | None, progress: RunProgress, steps: int | None
) -> dict[str, Any]:
    """Give the sample `now` as plain values; rates are per second since `before`. `steps` comes from the configuration.
    Keys that need explanation:

    - `progress`: `RunProgress.values` and `steps`; if the run is not running, the values of actors are left out, except
      the shares of their newest episodes and tool calls.
    - `warnings`, `remarks`: sentences about the run's health.
    - `running`: true if at least one shard answers.
    - `problem`: the reason why a shard does not answer, or how the run ended; `None` if there is neither.
    - `steps`: the number of recorded plans.
    - `tokens`: the numbers of sampled tokens, by the final state of their trajectories.
    - `decided`: the number and the means of the decided episodes, by their end. `by_length`: for each end, the number
      of episodes by length. The entry N counts those with N to 2N - 1 sampled tokens.
    - `rates`: `None` without `before`.
    - `admission`, `failed_handshakes`: `None` unless the run is running.
    - `readers`: processes that have read one snapshot for too long.
    - `failing`: the reasons why few tickets are issued.
    - `processes`: host, pid and restarts of each role, while the run is running. The pid of a role that does not run
      is 0.
    """
    store, live = now.store, now.live
    processes = run.processes() if live else {}
    return {
        **_judged(run, bool(live), progress.values(processes), steps),
        "store": str(run.store),
        "running": bool(live),
        "problem": (now.problem if live else _ended(run) or now.problem) or None,
        "version": store.counters["version"],
        "steps": store.steps,
        "totals": {name: store.counters[name] for name in FLOW},
        "tokens": {name: store.counters[f"tokens_{name}"] for name in TOKENS},
        "decided": store.selection.described(),
        "by_length": store.selection.by_length(),
        "rates": None if before is None else _rates(before, now),
        **{name: dict(store.counts[name]) for name in ("states", "dead_letters", "evicted", "filtered")},
        "depths": {name: store.counters[f"depth_{name}"] for name in DEPTHS},
        "admission": {name: _total(live, name) for name in ("committed", "capacity")} if live else None,
        "failed_handshakes": _total(live, "failed_handshakes") if live else None,
        "lags": {name: dict(sorted(store.counts[name].items())) for name in ("ready_groups", "planned_trajectories")},
        "leases": [lease for kind in ("actors", "scorers") for lease in _leases(now, kind)],
        "oldest_ticket": _oldest_ticket(now),
        "disk": {
            "file_bytes": sum((path / "data.mdb").stat().st_size for path in shard_paths(run.store)),
            "live_bytes": store.counters["live_bytes"],
            "high_water_bytes": None if now.problem else _total(live, "high_water_bytes"),
        },
        "readers": [reader for each in live for reader in each["readers"]],
        "failing": [each["failing"] for each in live if each["failing"]],
        "processes": to_builtins(processes),
    }


def _judged(run: Run, is_running: bool, progress: Mapping[str, Any], steps: int | None) -> dict[str, Any]:
    """The progress of the run, and the sentences about its health."""
    evidence = read_evidence(run, is_running=is_running)
    health = judge(evidence)
    # For an ended run, the shares of its last episodes are shown, because a warning may mention them.
    shares = {} if is_running else newest_shares(evidence.actors)
    return {
        "progress": {**progress, **shares, "steps": steps},
        "warnings": health.warnings,
        "remarks": health.remarks,
    }


def _total(live: Sequence[Mapping[str, Any]], name: str) -> int:
    """The sum of a value over the shards that answer."""
    return sum(each[name] for each in live)


def _oldest_ticket(now: StatusSample) -> dict[str, Any] | None:
    if now.store.oldest_ticket is None:
        return None
    ticket, actor = now.store.oldest_ticket
    return {"id": ticket, "actor": actor, "silence_s": _silence(now.live, "actors").get(actor)}


def _ended(run: Run) -> str:
    """The end of the run and the next commands, for people; empty while the run is running, and without a summary."""
    folder = shlex.quote(str(run.folder))
    report = f"asyncrl report {folder} shows its results"
    match run.end():
        case "done":
            return f"the run is done: {report}"
        case "solved":
            return f"the run has solved its tasks: {report}"
        case "stopped" | "failed" as result:
            ended = "has stopped" if result == "stopped" else "failed"
            return f"the run {ended}: asyncrl resume {folder} continues it, and {report}"
    return ""


def _rates(before: StatusSample, now: StatusSample) -> dict[str, float]:
    """The changes per second of the totals and of the number of steps."""
    seconds = max(now.at - before.at, 1e-9)
    totals = {name: (now.store.counters[name] - before.store.counters[name]) / seconds for name in FLOW}
    return {**totals, "steps": (now.store.steps - before.store.steps) / seconds}


def _leases(now: StatusSample, kind: str) -> list[dict[str, Any]]:
    """The number of items that every worker holds, and the seconds since its last request if the replay runs."""
    holds, silence = now.store.counts[kind], _silence(now.live, kind)
    return [
        {"kind": kind, "worker": worker, "holds": holds[worker], "silence_s": silence.get(worker)}
        for worker in sorted(holds.keys() | silence.keys())
    ]


def _silence(live: list[dict[str, Any]], kind: str) -> Mapping[str, float]:
    """The seconds since each worker's last request to any shard."""
    found: dict[str, float] = {}
    for status in live:
        for worker, seconds in status["silence_s"][kind].items():
            found[worker] = min(seconds, found.get(worker, seconds))
    return found
