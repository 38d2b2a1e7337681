"""Checks, before anything starts, that the built-in rules can use the ground truths of the tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from asyncrl.config.schema import ModelConfig, ScoringConfig
from asyncrl.config.schema.tools import SandboxConfig
from asyncrl.errors import DataError, ScoringError
from asyncrl.types import NO_VERSION, Finish, Role, Task, Trajectory, Turn

if TYPE_CHECKING:
    from asyncrl.data.reading import TaskFile
    from asyncrl.scoring.rules.registry import RuleSet

RULE_S = 120.0
"""The time limit in seconds when a rule is tried: the first use of a rule may load libraries from a cold disk."""

_EPISODE = Trajectory(
    id="preflight",
    task_id="preflight",
    group_id="preflight",
    member=0,
    tokens=np.zeros(2, np.int32),
    logprobs=np.zeros(2, np.float32),
    version_runs=np.array([[0, NO_VERSION], [1, 0]], np.int32),
    turns=(Turn(0, 1, Role.PROMPT), Turn(1, 2, Role.ASSISTANT, "stop")),
    steps=(),
    finish=Finish.COMPLETED,
)
"""An episode whose answer is empty."""


def check_truths(
    scoring: ScoringConfig,
    model: ModelConfig,
    sandbox: SandboxConfig,
    files: Sequence[TaskFile],
    columns: Mapping[str, str],
) -> None:
    """Raises DataError: a built-in rule cannot use the ground truth of the first row of a data source, or a reward
    function of TRL takes a column that this row lacks. `columns` is `data.columns`."""
    from asyncrl.config.schema.scoring import needs
    from asyncrl.sandbox.sandboxes import open_sandbox
    from asyncrl.scoring.rules.registry import BUILT_IN, load_rules, rule_names

    rules = load_rules(scoring, sandbox=open_sandbox(sandbox))
    lines, known = [], []
    rows = [(file, row, task) for file in files for row, task in file.by_source().items()]
    for file, row, task in rows:
        place = file.place(row)
        if "rules" not in needs(scoring, task.data_source):
            continue
        try:
            check_columns(rules, file, row, columns)
        except DataError as error:
            lines.append(str(error))
        # Rules of the user's own need a real episode (`episode.py`).
        if set((names := rule_names(scoring, task.data_source)).split(",")) <= set(BUILT_IN):
            known.append((place, task, names))
    lines += _unusable(known, scoring, model, sandbox) if known else []
    if lines:
        raise DataError("\n".join(lines))


def check_columns(rules: RuleSet, tasks: TaskFile, row: int, columns: Mapping[str, str]) -> None:
    """Raises DataError: a reward function of TRL takes a column that the task at `row` lacks. The message has the
    columns of the task's file, and the whole setting `data.columns` to write if a column has a similar name."""
    from asyncrl.data.recognised import alike, columns_line
    from asyncrl.scoring.rules.trl import MissingColumnError

    try:
        rules.check(tasks[row])
    except MissingColumnError as error:
        names = tasks.columns_at(row) or error.columns
        # For a reward function, `data.columns` cannot give another column the name `prompt`.
        found = {each: None if each == "prompt" else alike(each, names) for each in error.missing}
        known = {field: column for field, column in found.items() if column is not None}
        default = "give the parameter a default value"
        fix = (
            f"add {columns_line({**columns, **known})}, or {default}"
            if len(known) == len(found)
            else f"none has such a name; add {', '.join(each for each in found if each not in known)} to the file, "
            f"rename the parameter to one of these columns and name it in data.columns (docs/data.md), or {default}"
        )
        raise DataError(
            f"{tasks.place(row)}: {error.function} takes {', '.join(error.missing)}; the file has the columns "
            f"{', '.join(sorted(names))}: {fix}"
        ) from error


def _unusable(
    known: Sequence[tuple[str, Task, str]], scoring: ScoringConfig, model: ModelConfig, sandbox: SandboxConfig
) -> list[str]:
    """Return a line for each ground truth that the built-in rules of its task cannot use. `known` has the place of each
    task, the task, and the names of these rules."""
    from asyncrl.scoring.rules.base import RuleInput
    from asyncrl.scoring.verifier import Verifier

    lines = []
    patient = replace(scoring, timeout_s=max(scoring.timeout_s, RULE_S))
    with closing(Verifier(patient, model, sandbox)) as verifier:
        for place, task, names in known:
            try:
                verifier.score(RuleInput(task, _EPISODE, answer="", response=""))
            except ScoringError as error:
                lines.append(f"{place} has a ground truth that the rule {names} cannot use: {error}")
    return lines
