"""Describes the state, configuration, roles and warnings of a run in a few values and sentences."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lmdb
from msgspec import to_builtins

from asyncrl.config.changes import with_steps
from asyncrl.config.option import as_yaml, part_text
from asyncrl.config.schema import AlgorithmConfig
from asyncrl.config.secrets import masked, shown_value
from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.series import LONGEST_TEXT
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.runs.elapsed import elapsed_s
from asyncrl.runs.health.evidence import read_evidence, recent_shares
from asyncrl.runs.health.health import judge
from asyncrl.runs.health.trends import Trend
from asyncrl.runs.lines import finite
from asyncrl.runs.pace import PACE_STEPS, pace
from asyncrl.runs.run import Run
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.state.stalls import Wait
from asyncrl.runs.state.watch import RunWatch
from asyncrl.runs.table import is_fine_tuning, state_of
from asyncrl.text import reason_of


class Overviews:
    """The overview of each run, with its chain of waits. `clock` gives seconds since 1970."""

    def __init__(self, stores: ReplayStores, clock: Callable[[], float] = time.time) -> None:
        self._stores, self._clock = stores, clock
        self._watches: dict[Path, RunWatch] = {}

    def of(self, run: Run) -> dict[str, Any]:
        """Look at a run. The answer has what `overview` finds, and more:

        - `now`: the time of this look;
        - `waits_text`: a sentence that says which role waits for which; empty if no role waits;
        - `advice`: `None` until enough steps are done, and while a fault stops the run;
        - `fault` of each role: a few words if the role is silent or does not run, else `None`. Each fault gives a
          warning, and so does each of the newest errors of roles.
        """
        watch = self._watches.setdefault(run.folder, RunWatch(run))
        found = {**overview(run), "now": self._clock()}
        if is_fine_tuning(run):
            # A fine-tuning has no replay and only one role, so no role waits for another.
            return {**_warned(found, watch.errors()), "waits_text": "", "advice": None}
        try:
            with self._stores.alone():
                stalls, changes = watch.look(), run.changes()
        except (AsyncrlError, OSError, lmdb.Error) as error:
            return {**found, "problems": list(dict.fromkeys([*found["problems"], str(error)]))}
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A damaged row of metrics may have texts instead of numbers.
            problem = f"it is unknown which role waits for which: {reason_of(error)}"
            return {**found, "problems": [*found["problems"], problem]}
        configuration = {key: with_steps(key, value, changes) for key, value in found["configuration"].items()}
        found = _warned(_with_faults(found, stalls.faults), stalls.errors)
        found = {**found, "configuration": configuration}
        return {**found, "waits_text": stalls.text, "advice": stalls.advice}


def changes_of(run: Run, stores: ReplayStores) -> list[dict[str, Any]]:
    """The changes of the configuration in mid-run: the first `step` that uses the change, the `key`, and the values
    `old` and `new` as text."""
    with stores.alone():
        found = run.changes()
    return [
        {
            "step": each.step,
            "key": each.key,
            **{name: shown_value(each.key, getattr(each, name)) for name in ("old", "new")},
        }
        for each in found
    ]


def overview(run: Run) -> dict[str, Any]:
    """The overview without the chain of waits.

    - `configuration`: the main choices by key;
    - `steps`, `max_lag`: from the configuration; `None` if it could not be read;
    - `roles`: the host, pid (0: no process now) and restarts of each role by name;
    - `dead_letters`: the number of dead letters: failed attempts at episodes, and trajectories that were given up;
    - `warnings`, `remarks`: sentences about the run's health;
    - `shares`: shares of the newest episodes and of the newest tool calls, by name;
    - `trends`: the first and the last value of rewards and held-out results, and their `way` ("up" or "down") if they
      differ by more than their noise;
    - `problems`: the reasons why something could not be read.
    """
    problems: list[str] = []
    settings = None
    try:
        settings = run.settings()
    except ConfigError as error:
        problems.append(str(error))
    evidence = read_evidence(run, run.is_running())
    health = judge(evidence)
    replays = [run.newest_values(role) for role in run.roles("replay*")]
    failing = [str(row["failing"])[:LONGEST_TEXT] for row in replays if row.get("failing")]
    return {
        "state": state_of(run),
        "folder": str(run.folder),
        "configuration": masked(_choices(settings, is_fine_tuning(run))) if settings else {},
        "steps": settings.steps if settings else None,
        **progress_of(run, settings.steps if settings else None),
        "max_lag": settings.replay.max_lag if settings else None,
        "dead_letters": sum(finite(row.get("depth_dead")) or 0 for row in replays),
        "roles": plain(to_builtins(run.processes())),
        "warnings": [*health.warnings, *failing],
        "remarks": health.remarks,
        "shares": plain(recent_shares(evidence.actors)),
        "trends": plain({name: _trend(trend) for name, trend in health.trends.items()}),
        "problems": problems,
    }


def progress_of(run: Run, steps: int | None) -> dict[str, Any]:
    """The progress and the speed of a run, as its console and its summary show them. An unknown value is None.

    - `done`: the steps that are done; `step_s`: the seconds of a step; `left_s`: the seconds that the remaining steps
      will take;
    - `elapsed_s`: the seconds for which the run has run;
    - `tokens_per_s`: sampled tokens a second: now while the run is running, else the mean over the run.
    """
    found, running = pace(run.newest_rows("learner", PACE_STEPS), steps), run.is_running()
    return {
        "done": found.done,
        "step_s": found.step_s,
        "left_s": found.left_s if running else None,
        "elapsed_s": elapsed_s(run),
        "tokens_per_s": _sampled_now(run) if running else _sampled_mean(run),
    }


def _sampled_now(run: Run) -> float | None:
    newest = [run.newest_values(role).get("tokens_per_s") for role in run.roles("actor-*") if role in run.processes()]
    rates = [rate for each in newest if (rate := finite(each)) is not None]
    return sum(rates) if rates else None


def _sampled_mean(run: Run) -> float | None:
    speed = run.summary().get("speed")
    return finite(speed.get("tokens_per_s")) if isinstance(speed, dict) else None


def _with_faults(found: Mapping[str, Any], faults: Mapping[str, Wait]) -> dict[str, Any]:
    told = {
        name: {**role, "fault": faults[name].does if name in faults else None} for name, role in found["roles"].items()
    }
    return {**found, "roles": told, "warnings": [*map(str, faults.values()), *found["warnings"]]}


def _warned(found: Mapping[str, Any], errors: Sequence[str]) -> dict[str, Any]:
    return {**found, "warnings": [*(f"error of {each}" for each in errors), *found["warnings"]]}


def _choices(settings: ViewSettings, fine_tuning: bool) -> dict[str, Any]:
    if fine_tuning:
        return {
            "model.path": settings.model.path,
            "learner.lr": settings.learning_rate,
            "learner.batch_size": settings.batch_size,
        }
    return {
        "model.path": settings.model.path,
        **_algorithm(settings.algorithm),
        "learner.lr": settings.learning_rate,
        "learner.group_size": settings.group_size,
        "replay.max_lag": settings.replay.max_lag,
        "engine.kind": settings.engine,
    }


def _algorithm(chosen: AlgorithmConfig) -> dict[str, str]:
    """The advantage, the loss, and all other parts that differ from the default."""
    usual = asdict(AlgorithmConfig())
    return {
        f"algorithm.{name}": part_text(value) if _is_part(value) else as_yaml(value)
        for name, value in asdict(chosen).items()
        if name in ("advantage", "loss") or value != usual[name]
    }


def _is_part(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and "name" in value)


def _trend(trend: Trend) -> dict[str, Any]:
    return {"first": trend.first, "last": trend.last, "way": trend.way}
