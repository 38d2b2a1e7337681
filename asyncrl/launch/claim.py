"""Claims the folder of a run for `asyncrl train`: refuses to resume the run if the configuration describes another run,
and records the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from asyncrl.config import locations
from asyncrl.config.changes import changed_keys, values_of
from asyncrl.config.locations import CONFIG_FILE, SUMMARY_FILE, refuse_fine_tuning, steps_in_newest_checkpoint
from asyncrl.config.refusals import missing_data
from asyncrl.config.schema import DataConfig, LearnerConfig, TrainConfig
from asyncrl.config.secrets import shown, shown_value
from asyncrl.data.opening import RunTasks
from asyncrl.errors import ConfigError
from asyncrl.launch.preflight.tasks.same_files import check_same_files, task_files
from asyncrl.launch.preflight.tasks.same_tasks import names_tasks
from asyncrl.launch.run_folder import is_begun, set_aside
from asyncrl.runs.run import Run

log = logging.getLogger("asyncrl.train")


def check_resume(values: Mapping[str, Any], run_dir: Path, check_files: Callable[[], None]) -> None:
    """Refuse to resume a run if `values` change a key that must keep its value, or if `check_files` refuses the files
    of the run's tasks. A run that never began a step is not refused.

    Raises ConfigError: the resume is refused, or the folder holds a supervised fine-tuning (`asyncrl sft`).
    """
    refuse_fine_tuning(run_dir)
    try:
        changes_of(values, run_dir)
        check_files()
    except ConfigError:
        if is_begun(run_dir):
            raise


def check_begun_files(
    run_dir: Path, data: DataConfig, demonstrations: list[str] | None, tasks: Callable[[], RunTasks]
) -> None:
    """Refuse the run's files of tasks if they differ from those that the run began with. Missing files are left to
    other checks. Raises ConfigError: the files differ."""
    if not missing_data(data, demonstrations) and names_tasks(run_dir):
        check_same_files(run_dir, task_files(tasks()), begun=True)


def changes_of(after: Mapping[str, Any], run_dir: Path) -> list[str]:
    """Return a line for each key whose value in `after` differs from that of the run in the folder. The list is empty
    if the folder has no run.

    Raises ConfigError: the run cannot resume with these values.
    """
    run = Run(run_dir)
    if not run.config_file.exists():
        return []
    before = run.real_values()
    try:
        changed = changed_keys(before, after)
    except ConfigError as error:
        raise ConfigError(f"{run_dir} holds a run: {error}") from error
    return [f"{shown(key, after[key])} from now on; it was {shown_value(key, before[key])}" for key in changed]


def claim(config: TrainConfig, run_dir: Path) -> bool:
    """Write the run's configuration into its folder; return True if the folder holds an earlier part of the same run.

    Raises ConfigError: the run cannot resume with this configuration.
    """
    resumed = (run_dir / CONFIG_FILE).exists()
    for line in changes_of(values_of(config), run_dir):
        log.info("%s", line)
    locations.record_config(config, run_dir)
    return resumed


def make_room(values: Mapping[str, Any], run_dir: Path, check_tasks: Callable[[], None]) -> None:
    """Move aside the files of a run that never began a step, if it cannot resume with these values or if `check_tasks`
    refuses its tasks.

    So after a failed first start, the same run.name can be used with another configuration. Raises ConfigError: the run
    has begun, and cannot resume.
    """
    try:
        changes_of(values, run_dir)
        check_tasks()
    except ConfigError:
        if is_begun(run_dir):
            raise
        aside = set_aside(run_dir)
        log.info("the run in %s never began a step, so it starts over; its old files are in %s", run_dir, aside)
        check_tasks()  # No episode of the old tasks is left, so this records the files of the new tasks.


def is_past_its_steps(wanted: int, run_dir: Path) -> bool:
    """True, with a warning, if the run has done more steps than are `wanted`."""
    done = steps_in_newest_checkpoint(run_dir)
    if past := done > wanted:
        log.warning(
            "%s has done %d steps, so learner.steps=%d leaves nothing to do; to train further, set learner.steps to "
            "more than %d",
            *(run_dir, done, wanted, done),
        )
    return past


def forget_end(run_dir: Path) -> None:
    """Remove the summary of the run's earlier end, now that its roles start again. Otherwise, if this start is killed
    and so writes no summary, the earlier result would seem to be that of this start."""
    (run_dir / SUMMARY_FILE).unlink(missing_ok=True)


def is_finished(learner: LearnerConfig, values: Mapping[str, Any], run_dir: Path) -> bool:
    """True, with a message, if the run has ended after exactly `learner.steps` steps, and its exported model is there
    (with `learner.export`). False without `learner.steps`, because the steps are unknown then. Raises ConfigError: the
    folder holds a run with other values."""
    run, steps = Run(run_dir), learner.steps
    if steps is None or run.end() != "done" or steps_in_newest_checkpoint(run_dir) != steps:
        return False
    if learner.export and not (run_dir / "model").is_dir():
        return False
    changes_of(values, run_dir)
    log.info(
        "%s is done: it has trained all of its %d steps. To train it further, set learner.steps to more; to train "
        "again from the start, choose another run.name",
        *(run_dir, steps),
    )
    return True
