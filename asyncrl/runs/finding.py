"""Finds the run that a command names: by its folder, or by its name in `runs/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from asyncrl.config.locations import CONFIG_FILE, refuse_fine_tuning
from asyncrl.errors import ConfigError, StoreError
from asyncrl.machine.owner import owner_of
from asyncrl.observe.spans import FOLDER as SPANS
from asyncrl.runs.run import STORE, Run

RUNS = Path("runs")
"""The folder in which runs are found by their names."""


def find_folder(name: str, fits: Callable[[Path], bool]) -> Path | None:
    """The first of the folders `name` and `runs/NAME` that fits; `None` if neither does."""
    return next(filter(fits, (Path(name), RUNS / name)), None)


def known_runs(fits: Callable[[Path], bool]) -> str:
    """The end of a message that names the folders in `runs/` that fit; empty if none does."""
    found = sorted(str(folder) for folder in RUNS.glob("*") if fits(folder))
    return f"; there are {', '.join(found)}" if found else ""


def no_run(name: str, fits: Callable[[Path], bool]) -> ConfigError:
    """The error for a `name` that no run has. It names the folders in `runs/` that fit."""
    return ConfigError(f"{name} is not a run: name the folder of a run, which has a {CONFIG_FILE}{known_runs(fits)}")


def _has_config(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file()


def _has_store(folder: Path) -> bool:
    return (folder / STORE).is_dir()


def find_run(name: str) -> Run | None:
    """The run that `name` names; `None` if no folder of that name has a configuration."""
    folder = find_folder(name, _has_config)
    return None if folder is None else Run(folder)


def starting_run(name: str) -> Run | None:
    """The run that `name` names if a process is starting it right now, else `None`."""
    folder = find_folder(name, lambda folder: owner_of(folder) is not None)
    return None if folder is None else Run(folder)


def require_run(name: str) -> Run:
    """The run that `name` names. Raises ConfigError: it does not exist, or no training has started in it."""
    run = find_run(name)
    if run is None:
        if starting := starting_run(name):
            raise ConfigError(
                f"{starting.folder} is starting and has no {CONFIG_FILE} yet: try again once its roles run"
            )
        raise no_run(name, _has_config)
    return run


def run_with_store(name: str | None, store: str | None = None) -> Run:
    """The run that a command line names by its folder, by its name or by the folder of its store.

    Raises ConfigError: no run is named, it does not exist, or it is a fine-tuning; StoreError: it has no store.
    """
    if store is not None:
        run = Run(Path(store).parent, Path(store))
    elif name is None:
        raise ConfigError(f"name the run, such as runs/NAME, or its store with --store{known_runs(_has_store)}")
    else:
        is_plain_name = len(Path(name).parts) == 1 and not Path(name).is_dir()
        run = Run(find_folder(name, _has_store) or (RUNS / name if is_plain_name else Path(name)))
    try:
        require_store(run, name, store)
    except StoreError as error:
        # Every command refuses a missing run with the same exit status.
        if store is None and not (_has_config(run.folder) or owner_of(run.folder)):
            raise ConfigError(str(error)) from None
        raise
    return run


def require_store(run: Run, name: str | None = None, store: str | None = None) -> None:
    """Check that a run has a store. An error names the run and the store by `name` and `store`, the words of the
    command line. Raises ConfigError: the run is a fine-tuning; StoreError: it has no store."""
    if not run.store.is_dir():
        refuse_fine_tuning(run.folder)
        raise StoreError(_why_no_store(run, name or str(run.folder), store))


def _why_no_store(run: Run, name: str, store: str | None) -> str:
    logs = run.folder / "logs"
    if owner_of(run.folder) is not None:
        return f"{run.folder} is starting: its replay has no store yet; try again in a moment, or see {logs}"
    if store is not None:
        return f"there is no store {run.store}: name one, such as runs/NAME/replay{known_runs(_has_store)}"
    if _has_config(run.folder):
        see = f"; see {logs}" if logs.is_dir() else ""
        return f"there is no store {run.store}: it was never made, or has been removed{see}"
    return f"{name} is not a run: name the folder of a run, such as runs/NAME, or its name{known_runs(_has_store)}"


def run_with_spans(name: str) -> Run:
    """The run that `name` names. Raises ConfigError: it has no spans, or is a fine-tuning."""
    folder = find_folder(name, lambda folder: (folder / SPANS).is_dir())
    if folder is None:
        for each in (Path(name), RUNS / name):
            refuse_fine_tuning(each)
        raise ConfigError(f"{name} is not a run with spans: name the folder of a run that has a folder {SPANS}")
    return Run(folder)
