"""All that a report and a comparison read of one run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import yaml

from asyncrl.config.changes import by_key
from asyncrl.config.locations import CONFIG_FILE, SUMMARY_FILE, refuse_fine_tuning
from asyncrl.config.secrets import masked
from asyncrl.errors import ConfigError
from asyncrl.machine.owner import owner_of
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.environment import Environment, environments_of
from asyncrl.runs.inspect.run import require_run
from asyncrl.runs.lines import Row, measured, sampled_rows
from asyncrl.runs.summary import RunSummary, resume_command, summarise

RUNNING, UNFINISHED = "running", "unfinished"
OF_LEARNER = ("learner", "evaluation")
NO_ADDRESS = ("network.", "run.dir")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """A run as its folder tells it.

    `values` is the configuration by key, with defaults for keys that the run's version did not have; `written` is that
    of its file as text. Secrets are masked in both. `steps` and `evaluations` are rows of the learner, thinned out;
    `roles` has those of the other processes by name. `state` is that of the summary, or says that the run runs, or that
    it ended without one.
    """

    folder: Path
    values: Mapping[str, Any]
    written: str
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    roles: Mapping[str, Sequence[Row]]
    environments: Sequence[Environment]
    state: str
    summary: RunSummary

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def differing(self) -> list[tuple[str, Any, Any]]:
        """The keys whose value is not the default: key, value, default. Addresses are left out."""
        defaults = by_key({})
        return [
            (key, value, defaults[key])
            for key, value in self.values.items()
            if value != defaults[key] and not key.startswith(NO_ADDRESS)
        ]

    def start(self) -> float:
        """When the first process wrote its first row, in seconds since 1970; 0 without any."""
        return min((rows[0]["time"] for rows in (self.steps, *self.roles.values()) if rows), default=0.0)


def read_run(name: str) -> ReportedRun:
    """The run that `name` names, by its folder or by its name in runs/. Raises ConfigError: there is none, it is
    a fine-tuning, or its configuration cannot be read."""
    folder = require_run(name)
    refuse_fine_tuning(folder)
    try:
        written = (folder / CONFIG_FILE).read_text()
        nested = yaml.safe_load(written)
        values = masked(by_key(nested))
        written = yaml.safe_dump(masked(nested), sort_keys=False, allow_unicode=True)
    except (OSError, yaml.YAMLError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} cannot be read: {error}") from error
    steps, evaluations = (_rows(metrics_file(folder, role)) for role in OF_LEARNER)
    files = sorted((folder / "metrics").glob("*.jsonl"))
    state, summary = _summary(folder, values, steps[-1]["step"] + 1 if steps else 0)
    return ReportedRun(
        folder=folder,
        values=values,
        written=written,
        steps=[row for row in steps if "reward/mean" in row],
        evaluations=sorted(evaluations, key=lambda row: row["step"]),
        roles={path.stem: _rows(path) for path in files if path.stem not in OF_LEARNER},
        environments=environments_of(folder),
        state=state,
        summary=summary,
    )


def _rows(path: Path) -> list[Row]:
    return list(measured(sampled_rows(path)))


def _summary(folder: Path, values: Mapping[str, Any], done: int) -> tuple[str, RunSummary]:
    """The state of a run that has `done` so many steps, and its summary: the one in its folder if that has all of them,
    else one of now. A learner that was killed with its launcher has more steps than the summary of an earlier end."""
    running = _runs(folder)
    written = folder / SUMMARY_FILE
    if not running and written.exists():
        try:
            found = msgspec.json.decode(written.read_bytes(), type=RunSummary)
            if found.steps == done:
                return found.result, found
        except msgspec.DecodeError as error:
            log.info("%s is of another version of asyncrl, and made anew: %s", written, error)
    state = RUNNING if running else UNFINISHED
    planned = values["learner.steps"]
    return state, summarise(folder, int(planned or 0), state, "", resume_command(folder))


def _runs(folder: Path) -> bool:
    try:
        return owner_of(folder) is not None
    except OSError:
        return False
