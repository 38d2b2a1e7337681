"""Computes the shares of time in which the processes of a run had nothing to do, from the rows of their metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from statistics import fmean
from typing import Any

from asyncrl.runs.lines import measured
from asyncrl.runs.run import Run
from asyncrl.runs.scorers import idle_of_workers, process_of

Rows = Sequence[Mapping[str, Any]]

CAUSES = ("labels", "episodes", "store", "old_groups")
"""The things for which the learner may wait, as the replay counts them."""
MOST_STEPS, FEWEST_STEPS = 20, 5
MOST_ROWS = 500
"""The largest number of a role's rows that is read. Of more rows a sample is read. A role writes a row every five
seconds."""


def totals(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> dict[str, float]:
    """Sum a role's counters over all of its starts. They begin at 0 at each start. A row may lack some counters."""
    ended, newest = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    for row in rows:
        for name in names:
            value = row.get(name, 0.0)
            if value < newest[name]:
                ended[name] += newest[name]
            newest[name] = value
    return {name: ended[name] + newest[name] for name in names}


def growth(rows: Rows, names: Sequence[str]) -> dict[str, float]:
    """The growth of a role's counters from the first of the rows to the last."""
    if not rows:
        return dict.fromkeys(names, 0.0)
    return {name: max(0.0, total - rows[0].get(name, 0.0)) for name, total in totals(rows, names).items()}


def learner_idle(steps: Rows) -> float:
    """The share of the steps' time in which the learner had nothing to do."""
    return float(sum(row["idle"] * row["seconds/step"] for row in steps)) / step_seconds(steps)


def step_seconds(steps: Rows) -> float:
    """The seconds of all steps."""
    return max(1e-9, float(sum(row["seconds/step"] for row in steps)))


def waited_for(cause: str) -> str:
    """The name of the counter with which the replay measures how long the learner waited for `cause`, one of CAUSES."""
    return f"learner_waited_for_{cause}_s"


@dataclass(frozen=True, slots=True)
class IdleShares:
    """The shares of time during the newest `steps` steps of a run.

    - `learner_idle`: the share in which the learner had nothing to do;
    - `waited`: the share in which the learner waited for each of CAUSES, as the shard with the longest wait counted
      it;
    - `phases`: the share of each phase of a step;
    - `actors`, `scorers`: the number of these processes that have written rows during these steps;
    - `actors_idle`, `scorers_idle`: the mean share in which these processes were idle; None without such processes;
    - `loops_busy`: the mean share in which the event loops of actors used their cores; None if it is unknown;
    - `too_old`: the tokens that were evicted or masked as too old, as a share of the accepted ones;
    - `pending`: the mean number of tickets (permissions to run an episode) that waited for an actor;
    - `scheduler_busy`: the mean share of a core that the busiest scheduler of an actor's servers took; None: unknown;
    - `without_graphs`: the mean number of servers that decoded without CUDA graphs;
    - `queued`: the mean number of requests that waited in servers;
    - `cores`: the number of cores, if the run has only one host and no GPUs; else None.
    """

    steps: int
    learner_idle: float
    waited: Mapping[str, float]
    phases: Mapping[str, float]
    actors: int = 0
    actors_idle: float | None = None
    loops_busy: float | None = None
    scorers: int = 0
    scorers_idle: float | None = None
    too_old: float = 0.0
    pending: float = 0.0
    scheduler_busy: float | None = None
    without_graphs: float = 0.0
    queued: float = 0.0
    cores: int | None = None


def idle_shares(run: Run) -> IdleShares | None:
    """The shares over the newest steps; `None` if there are fewer than FEWEST_STEPS."""
    steps = [row for row in run.newest_rows("learner", MOST_STEPS) if {"seconds/step", "idle"} <= row.keys()]
    if len(steps) < FEWEST_STEPS:
        return None
    seconds, since = step_seconds(steps), steps[0]["time"] - steps[0]["seconds/step"]

    def rows(roles: str) -> dict[str, Rows]:
        found = {role: _rows_since(run, role, since) for role in run.roles(roles)}
        return {role: rows for role, rows in found.items() if rows}

    replays, actors = list(rows("replay*").values()), list(rows("actor-*").values())
    scorers = _scorers_idle(rows("scoring-*"))
    waited = [growth(each, [waited_for(cause) for cause in CAUSES]) for each in replays]
    flows = [growth(each, ["tokens_accepted", "tokens_evicted", "tokens_masked"]) for each in replays]
    accepted = sum(each["tokens_accepted"] for each in flows)
    too_old = sum(each["tokens_evicted"] + each["tokens_masked"] for each in flows)
    phases = {name.removeprefix("seconds/") for row in steps for name in row if name.startswith("seconds/")}
    return IdleShares(
        steps=len(steps),
        learner_idle=learner_idle(steps),
        waited={cause: max((each[waited_for(cause)] for each in waited), default=0.0) / seconds for cause in CAUSES},
        phases={
            name: sum(row.get(f"seconds/{name}", 0.0) for row in steps) / seconds for name in sorted(phases - {"step"})
        },
        actors=len(actors),
        actors_idle=_mean(actors, "idle"),
        loops_busy=_mean(actors, "loop_busy"),
        scorers=len(scorers),
        scorers_idle=fmean(scorers) if scorers else None,
        too_old=too_old / accepted if accepted else 0.0,
        cores=_cores(run),
        pending=_sum_of_means(replays, "depth_pending"),
        scheduler_busy=max(_means(actors, "scheduler_busy"), default=None),
        without_graphs=_sum_of_means(actors, "servers_without_graphs"),
        queued=_sum_of_means(actors, "servers_queued"),
    )


def _rows_since(run: Run, role: str, since: float) -> Rows:
    """The rows of a role from the time `since` on, or a sample of them with the last one."""
    with run.open_rows(role) as file:
        if file is None:
            return []
        span = file.between(since, inf)
        rows = list(islice(file.rows(span), MOST_ROWS + 1))
        if len(rows) > MOST_ROWS:
            rows = file.sampled(span, MOST_ROWS)
    return [row for row in measured(rows) if row["time"] >= since]


def _scorers_idle(workers: Mapping[str, Rows]) -> list[float]:
    """The share of time in which each scorer was idle, from the rows of the workers of all scorers."""
    shares = defaultdict[str, list[float]](list)
    for role, rows in workers.items():
        shares[process_of(role)] += _means([rows], "idle")
    return [idle_of_workers(each) for each in shares.values() if each]


def _cores(run: Run) -> int | None:
    """The number of cores, if the run has only one host and no GPUs. None if it has GPUs or several hosts, or if the
    number is unknown."""
    hosts = run.environments()
    return hosts[0].cores if len(hosts) == 1 and not hosts[0].gpus and hosts[0].cores else None


def _means(roles: Sequence[Rows], name: str) -> list[float]:
    """The mean of a value for each process whose rows have it."""
    return [fmean(values) for rows in roles if (values := [row[name] for row in rows if name in row])]


def _mean(roles: Sequence[Rows], name: str) -> float | None:
    """The mean of the metric `name` over processes; None if no process has written it."""
    means = _means(roles, name)
    return fmean(means) if means else None


def _sum_of_means(roles: Sequence[Rows], name: str) -> float:
    return sum(fmean(row.get(name, 0.0) for row in rows) for rows in roles)
