"""What goes on in a run, in a few values and sentences."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lmdb

from asyncrl.config.locations import PROCESSES_FILE, SUMMARY_FILE
from asyncrl.config.option import as_yaml, part_text
from asyncrl.config.schema import AlgorithmConfig, TrainConfig
from asyncrl.config.secrets import masked
from asyncrl.dashboard.plain import plain
from asyncrl.dashboard.series import LONGEST_TEXT, metrics_files
from asyncrl.dashboard.stores import ReplayStores
from asyncrl.errors import AsyncrlError, ConfigError
from asyncrl.machine.owner import owner_of
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.inspect.run import ConfigFile
from asyncrl.runs.lines import finite, measured, newest_rows
from asyncrl.runs.stalls import Wait
from asyncrl.runs.warnings import WINDOW, learning_warnings
from asyncrl.runs.watch import RunWatch
from asyncrl.text import reason_of


def run_state(folder: Path) -> dict[str, Any]:
    """Whether somebody runs the folder now; else how it ended, `stopped` if it did not say."""
    with suppress(OSError):
        if owner_of(folder) is not None:
            return {"state": "running"}
    return {"state": str(_json(folder / SUMMARY_FILE).get("result", "stopped"))}


class Overviews:
    """What goes on in each run, with who waits for whom. `clock` gives seconds since 1970."""

    def __init__(self, stores: ReplayStores, clock: Callable[[], float] = time.time) -> None:
        self._stores, self._clock = stores, clock
        self._watches: dict[Path, RunWatch] = {}

    def of(self, folder: Path) -> dict[str, Any]:
        """The overview of the run, with `waits_text`, a sentence that is empty where nobody waits, and `advice`, None
        where there is too little to advise from. A role that is silent or down is a warning, and its `fault` says so.
        `now` is the time of this look.
        """
        watch = self._watches.setdefault(folder, RunWatch(folder))
        found = {**overview(folder, watch.config), "now": self._clock()}
        try:
            with self._stores.alone():
                stalls = watch.look()
        except (AsyncrlError, OSError, lmdb.Error) as error:
            return {**found, "problems": list(dict.fromkeys([*found["problems"], str(error)]))}
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            # A damaged row of metrics may have texts in place of numbers.
            problem = f"who waits for whom is not known: {reason_of(error)}"
            return {**found, "problems": [*found["problems"], problem]}
        return {**_with_faults(found, stalls.faults), "waits_text": stalls.text, "advice": stalls.advice}


def overview(folder: Path, configuration: ConfigFile) -> dict[str, Any]:
    """Keys: `state`; `folder`; `configuration`, the main choices by key; `steps` and `max_lag`, those of the
    configuration, or None; `roles`, by name their host, pid (0: none now) and restarts; `dead`, how many episodes could
    not be scored or were left out; `warnings`, sentences; `problems`, what could not be read."""
    problems: list[str] = []
    config = None
    try:
        config = configuration.read()
    except ConfigError as error:
        problems.append(str(error))
    names = [name for name in metrics_files(folder) if name.startswith("replay")]
    replays = [row for name in names for row in newest_rows(metrics_file(folder, name), 1)]
    failing = [str(row["failing"])[:LONGEST_TEXT] for row in replays if row.get("failing")]
    return {
        **run_state(folder),
        "folder": str(folder),
        "configuration": masked(_choices(config)) if config else {},
        "steps": config.learner.total_steps if config else None,
        "max_lag": config.replay.max_lag if config else None,
        "dead": sum(finite(row.get("dead")) or 0 for row in replays),
        "roles": _roles(folder),
        "warnings": [*_warnings(folder), *failing],
        "problems": problems,
    }


def _with_faults(found: Mapping[str, Any], faults: Mapping[str, Wait]) -> dict[str, Any]:
    told = {
        name: {**role, "fault": faults[name].does if name in faults else None} for name, role in found["roles"].items()
    }
    return {**found, "roles": told, "warnings": [*map(str, faults.values()), *found["warnings"]]}


def _choices(config: TrainConfig) -> dict[str, Any]:
    return {
        "model.path": config.model.path,
        **_algorithm(config.algorithm),
        "learner.lr": config.learner.lr,
        "learner.group_size": config.learner.group_size,
        "replay.max_lag": config.replay.max_lag,
        "engine.kind": config.engine.kind,
    }


def _algorithm(chosen: AlgorithmConfig) -> dict[str, str]:
    """The advantage, the loss, and whatever else is not as by default: a preset is known by its parts alone."""
    usual = asdict(AlgorithmConfig())
    return {
        f"algorithm.{name}": part_text(value) if _is_part(value) else as_yaml(value)
        for name, value in asdict(chosen).items()
        if name in ("advantage", "loss") or value != usual[name]
    }


def _is_part(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, dict) and "name" in value)


def _roles(folder: Path) -> dict[str, Any]:
    return {name: plain(role) for name, role in _json(folder / PROCESSES_FILE).items() if isinstance(role, dict)}


def _warnings(folder: Path) -> list[str]:
    rows = list(measured(newest_rows(metrics_file(folder, "learner"), WINDOW)))
    return list(learning_warnings(rows, str(folder)).values())


def _json(path: Path) -> Mapping[str, Any]:
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
