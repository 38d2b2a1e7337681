"""Reads the values of one run that a report or a comparison shows."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncrl.config.changes import ConfigChange, by_key, with_steps
from asyncrl.config.locations import refuse_fine_tuning
from asyncrl.config.option import as_yaml
from asyncrl.runs.environment import Environment
from asyncrl.runs.finding import require_run
from asyncrl.runs.lines import Row
from asyncrl.runs.run import Run
from asyncrl.runs.summary import RunSummary, resume_command, summarise

RUNNING, UNFINISHED = "running", "unfinished"
OF_LEARNER = ("learner", "evaluation")
NO_ADDRESS = ("network.", "run.dir")

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The values of a run that a report shows.

    - `values`: the configuration by key, with masked secrets, and with defaults for keys that the run's version of
      asyncrl did not have;
    - `written`: the text of the configuration, with masked secrets;
    - `steps`, `evaluations`: sampled rows of the learner;
    - `roles`: sampled rows of all other processes, by name;
    - `changes`: the changes of the configuration during the run, in order;
    - `state`: the result in the summary, "running", or "unfinished" for a run that ended without a summary.
    """

    run: Run
    values: Mapping[str, Any]
    written: str
    steps: Sequence[Row]
    evaluations: Sequence[Row]
    roles: Mapping[str, Sequence[Row]]
    environments: Sequence[Environment]
    state: str
    summary: RunSummary
    changes: Sequence[ConfigChange] = ()

    @property
    def folder(self) -> Path:
        return self.run.folder

    @property
    def name(self) -> str:
        return self.run.name

    def differing(self) -> list[tuple[str, Any, Any]]:
        """The keys whose value is not the default, or changed: key, value, default. Addresses are left out."""
        defaults, changed = by_key({}), {each.key for each in self.changes}
        return [
            (key, value, defaults[key])
            for key, value in self.values.items()
            if (value != defaults[key] or key in changed) and not key.startswith(NO_ADDRESS)
        ]

    def text_of(self, key: str) -> str:
        """The value of a key for people, with its steps if it changed in mid-run."""
        return with_steps(key, as_yaml(self.values[key]), self.changes)

    def marks(self) -> list[tuple[float, str]]:
        """The steps at which the configuration changed, and the changes as text."""
        return [(each.step, f"from step {each.step}: {each.text}") for each in self.changes]

    def start(self) -> float:
        """The time at which the first process wrote its first row, in seconds since 1970; 0 without a row."""
        return min((rows[0]["time"] for rows in (self.steps, *self.roles.values()) if rows), default=0.0)


def read_run(name: str) -> ReportedRun:
    """Read the run that `name` names, by its folder or by its name in runs/. Raises ConfigError: it does not exist, it
    is a fine-tuning, or its configuration cannot be read."""
    run = require_run(name)
    refuse_fine_tuning(run.folder)
    values, written = run.values(), run.written_config()
    steps, evaluations = (run.sampled_rows(role) for role in OF_LEARNER)
    state, summary = _summary(run, values["learner.steps"], steps[-1]["step"] + 1 if steps else 0)
    return ReportedRun(
        run=run,
        values=values,
        written=written,
        steps=[row for row in steps if "reward/mean" in row],
        evaluations=sorted(evaluations, key=lambda row: row["step"]),
        roles={role: run.sampled_rows(role) for role in run.roles() if role not in OF_LEARNER},
        environments=run.environments(),
        state=state,
        summary=summary,
        changes=run.changes(),
    )


def _summary(run: Run, planned: int | None, done: int) -> tuple[str, RunSummary]:
    """The state of a run that has done `done` steps, and its summary: the written one if it covers all of them, else a
    new one. If the learner was killed together with its launcher, the written summary is of an earlier end, and
    covers fewer steps.
    """
    running, written = run.is_running(), run.summary()
    if written and not running:
        try:
            found = msgspec.convert(written, RunSummary)
            if found.steps == done:
                return found.result, found
        except msgspec.ValidationError as error:
            log.info("another version of asyncrl wrote the summary of %s; it is made again: %s", run.folder, error)
    state = RUNNING if running else UNFINISHED
    return state, summarise(run, planned or 0, state, "", resume_command(run))
