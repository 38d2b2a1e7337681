"""Finds the runs that the page shows, and gives each of them a short key for the page's addresses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from asyncrl.config.locations import CONFIG_FILE
from asyncrl.errors import ConfigError
from asyncrl.observe.sinks import metrics_file
from asyncrl.runs.finding import find_folder, no_run
from asyncrl.runs.run import Run


@dataclass(frozen=True, slots=True)
class ShownRun:
    """A run that the dashboard shows.

    - `key`: its name in addresses, of letters, digits, dots, dashes and underscores;
    - `name`: its name for people, which may have any character that a folder's name may have.
    """

    key: str
    name: str
    run: Run

    @property
    def folder(self) -> Path:
        return self.run.folder


def shown_runs(names: Iterable[str]) -> Mapping[str, ShownRun]:
    """The runs that a command line names, by their keys. Each name is a folder, a name in runs/, or a folder of runs.

    Raises ConfigError: a name is not a run, or no run is named.
    """
    folders = list(dict.fromkeys(folder for name in names for folder in _folders(name)))
    if not folders:
        raise ConfigError("name the runs to show, such as runs/NAME")
    parents = {folder.parent for folder in folders}
    found: dict[str, ShownRun] = {}
    for folder in folders:
        name = folder.name if len(parents) == 1 else f"{folder.parent.name}/{folder.name}"
        key = _key(name, found)
        found[key] = ShownRun(key, name, Run(folder))
    return found


def _folders(name: str) -> list[Path]:
    if folder := find_folder(name, _is_run):
        return [folder.resolve()]
    within = sorted(each.resolve() for each in Path(name).glob("*") if _is_run(each))
    if not within:
        raise no_run(name, _is_run)
    return within


def _is_run(folder: Path) -> bool:
    return (folder / CONFIG_FILE).is_file() or metrics_file(folder, "").parent.is_dir()


def _key(name: str, taken: Mapping[str, ShownRun]) -> str:
    plain = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[:80]
    return next(key for key in _numbered(plain) if key not in taken)


def _numbered(plain: str) -> Iterator[str]:
    yield plain
    yield from (f"{plain}-{number}" for number in count(2))
