"""The figures of a run of benchmarks.gpu_loop, from its metrics after the first steps."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.batches.selection import Selection
from asyncrl.runs.lines import read_lines

FIRST = 2
"""The number of first steps that no figure counts: engines start and kernels are compiled in them."""

PHASES = ("wait", "fetch", "proximal", "train", "publish", "checkpoint")
COUNTERS = {
    "updates": "weights_updates",
    "update_failures": "weights_refused",
    "requests": "segments",
    "requests_cut": "cut_segments",
    "requests_lost": "lost_segments",
    "recomputed_tokens": "recomputed_tokens",
    "server_faults": "server_faults",
    "episodes_failed": "failed",
}
"""Maps names in a result to counters of the actor. A counter that the actor does not have is left out."""

FLEET = (*COUNTERS.values(), "tokens", "idle_seconds", "weights_transfer_s", "weights_switch_s", "weights_bytes")
DROPPED = ("tokens_thrown_away", "evicted", "tokens_accepted")

Row = Mapping[str, Any]


def figures(run_dir: Path, bare_tokens_per_s: float) -> dict[str, Any]:
    """The figures of the run in a folder, from the end of step FIRST on. `fleet_to_bare` is the ratio of the fleet's
    rate to the bare client's. `fleet_idle` is the share of the time in which no server has a turn to sample, without
    the stops of pushes.

    Raises ValueError: the run has not done FIRST + 1 steps, or its actor has written no metrics.
    """
    learner = [row for row in read_lines(metrics_file(run_dir, "learner")) if "seconds/step" in row]
    if len(learner) <= FIRST:
        raise ValueError(f"{run_dir} has done {len(learner)} steps, and needs {FIRST + 1}: see its logs")
    actor = [row for row in read_lines(metrics_file(run_dir, "actor-0")) if "seconds" in row]
    replay = read_lines(metrics_file(run_dir, "replay"))
    steady, begin, end = learner[FIRST:], learner[FIRST - 1]["time"], learner[-1]["time"]
    if not actor:
        raise ValueError("the actor has written no metrics: see its log")
    # Sums over the whole run: a version is counted only once all of its episodes are decided.
    selection = Selection.from_values(replay[-1:])
    fleet, dropped = _over(actor, FLEET, begin, end), _over(replay, DROPPED, begin, end)
    trained = learner[-1]["trajectories_trained"] - learner[FIRST - 1]["trajectories_trained"]
    return {
        "steps": len(steady),
        "seconds": round(end - begin, 2),
        "samples_per_s": round(trained / (end - begin), 3),
        "trained_tokens_per_s": round(sum(row["tokens_sampled"] for row in steady) / (end - begin), 1),
        "fleet_tokens_per_s": round(fleet["tokens"] / (end - begin), 1),
        "fleet_to_bare": round(fleet["tokens"] / (end - begin) / bare_tokens_per_s, 3),
        "fleet_idle": round(fleet["idle_seconds"] / (end - begin), 3),
        "learner_idle": round(_seconds(steady, "wait", "fetch") / _seconds(steady, "step"), 3),
        "seconds_of_a_step": {phase: round(_seconds(steady, phase) / len(steady), 3) for phase in ("step", *PHASES)},
        "lags": _histogram(steady, "lag/"),
        "token_lags": _histogram(steady, "token_lag/", weight="tokens_sampled"),
        "push": {**_push(fleet), **_pauses(actor, begin, end)},
        "counts": {name: round(fleet[own]) for name, own in COUNTERS.items() if own in fleet},
        "thrown_away_tokens": dropped.get("tokens_thrown_away"),
        "thrown_away_share": _share(dropped),
        "evicted": dropped.get("evicted"),
        "decided": selection.described(),
        "chosen_by": selection.biased(),
        "missing_tokens_of_an_episode": _mean(actor, "agent/missing_tokens"),
        "mfu": {part: mfu for part in ("train", "step") if (mfu := _mean(steady, f"mfu/{part}")) is not None},
        "mismatch_k3": _mean(steady, "mismatch/k3"),
        "learner_peak_gb": max((row.get("memory/peak_gb", 0.0) for row in steady), default=0.0),
    }


def _share(dropped: Row) -> float | None:
    """The tokens thrown away as a share of the delivered tokens. None if the replay has written no metrics."""
    accepted = dropped.get("tokens_accepted")
    return round(dropped["tokens_thrown_away"] / accepted, 4) if accepted else None


def _over(rows: Sequence[Row], names: Sequence[str], begin: float, end: float) -> dict[str, float]:
    """The growth of each counter of `rows` from `begin` to `end`, interpolated between rows. A restarted process counts
    from 0, as a process does that starts, `seconds` before its first row."""
    times = [row["time"] for row in rows]
    started = times[0] - rows[0].get("seconds", 0.0) if rows else 0.0
    series = {name: np.array([row.get(name, 0.0) for row in rows]) for name in names if rows and name in rows[-1]}

    def grown(counter: np.ndarray[Any, Any]) -> float:
        steps = np.diff(counter, prepend=0.0)
        total = np.cumsum(np.where(steps < 0, counter, steps))
        return float(np.diff(np.interp([begin, end], [started, *times], [0.0, *total]))[0])

    return {name: grown(counter) for name, counter in series.items()}


def _push(fleet: Mapping[str, float]) -> dict[str, float]:
    """Seconds and bytes of a push. `switch_s` is the time from the actor's receipt of a version until the first server
    serves it. Servers generate for most of that time: `_pauses` has their stops."""
    pushes = fleet.get("weights_updates", 0.0)
    if not pushes:
        return {}
    return {
        "transfer_s": round(fleet["weights_transfer_s"] / pushes, 4),
        "switch_s": round(fleet["weights_switch_s"] / pushes, 4),
        "megabytes": round(fleet["weights_bytes"] / pushes / 1e6, 2),
    }


def _pauses(rows: Sequence[Row], begin: float, end: float) -> dict[str, float]:
    """Seconds of each stop of a server by a push between `begin` and `end`. A row has the number of pauses, their sum
    and the last pause since the process began. If there are three or more pauses between two rows, all but the last
    count as their mean."""
    taken: list[float] = []
    counted, total = 0, 0.0
    for row in rows:
        count, last = int(row.get("push_pauses", 0)), row.get("push_pause_last_s", 0.0)
        if count < counted:
            counted, total = 0, 0.0
        new, seconds = count - counted, row.get("push_pause_s", 0.0) - total
        if new and begin < row["time"] <= end:
            taken += [last, *[(seconds - last) / max(1, new - 1)] * (new - 1)]
        counted, total = count, total + seconds
    if not taken:
        return {}
    shares = {"median": np.median(taken), "p95": np.percentile(taken, 95), "max": np.max(taken)}
    return {"pauses": len(taken), **{f"pause_{name}_s": round(float(value), 4) for name, value in shares.items()}}


def _seconds(rows: Sequence[Row], *phases: str) -> float:
    return float(sum(row.get(f"seconds/{phase}", 0.0) for row in rows for phase in phases))


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [row[name] for row in rows if row.get(name) is not None]
    return statistics.fmean(values) if values else None


def _histogram(rows: Sequence[Row], prefix: str, weight: str = "") -> dict[int, float]:
    """The share of each lag over all rows, from the counts or shares in columns such as `lag/3`."""
    counts: dict[int, float] = {}
    for row in rows:
        for name, count in row.items():
            if name.startswith(prefix) and (lag := name.removeprefix(prefix)).isdigit():
                counts[int(lag)] = counts.get(int(lag), 0.0) + count * (row[weight] if weight else 1)
    total = sum(counts.values())
    return {lag: round(count / total, 4) for lag, count in sorted(counts.items()) if count}
