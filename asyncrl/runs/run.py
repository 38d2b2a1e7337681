"""Reads a run's folder: its configuration, state, end, rows of metrics, spans, stores and kept episodes.

Every view reads runs through this file, which changes nothing. The run may be running or have ended, and its folder may
be a copy from another machine.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml

from asyncrl.config.changes import ConfigChange, by_key
from asyncrl.config.locations import CONFIG_FILE, SOLVED_FILE, START_WARNINGS_FILE, SUMMARY_FILE
from asyncrl.config.secrets import masked
from asyncrl.errors import ConfigError, StoreError
from asyncrl.machine.owner import owner_of
from asyncrl.observe.sinks import metrics_file
from asyncrl.replay.store.store import ENDPOINT_FILE
from asyncrl.replay.stored import StoredRun, shard_paths
from asyncrl.runs.environment import Environment, environments_of
from asyncrl.runs.from_config import read_config, settings_of
from asyncrl.runs.kept import KeptEpisodes
from asyncrl.runs.lines import LineFile, Row, Tail, each_line, each_row, measured, newest_rows, open_lines, sampled_rows
from asyncrl.runs.processes import ProcessRecord, read_records
from asyncrl.runs.settings import ViewSettings
from asyncrl.runs.trace.reading import Trace

COMPLETE = ("done", "solved")
"""The results of a run that has nothing left to train, and has exported its model."""
STORE = "replay"
"""The folder in a run's folder with the stores of its replay."""

_FileState = tuple[int, int, int]

# The loader in C is several times faster. Both load plain values only.
_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_HALF_PAIR = re.compile(r"\\(?:u|U0000)[dD][89a-fA-F]")
"""An escaped half of a surrogate pair."""


class Run:
    """The run in `folder`. Several threads may use this object.

    `store` is the folder of its replay's stores. An imported store may be elsewhere, and then has no configuration.
    """

    def __init__(self, folder: Path, store: Path | None = None) -> None:
        self.folder = folder
        self.store = store or folder / STORE
        self._settings: tuple[_FileState, ViewSettings] | None = None

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def owns_store(self) -> bool:
        """True if the store is that of the run in this folder; False for a store that was imported without its run."""
        return self.store.name == STORE

    # The configuration.

    @property
    def config_file(self) -> Path:
        return self.folder / CONFIG_FILE

    def settings(self) -> ViewSettings | None:
        """The settings that views need; `None` without a configuration, which `asyncrl train` writes. Calling this
        again is cheap: an unchanged file is not parsed again.

        Raises ConfigError: the configuration is damaged, or of another version of asyncrl; OSError: it cannot be
        read.
        """
        if not self.owns_store or not self.config_file.is_file():
            return None
        status = self.config_file.stat()
        state = status.st_ino, status.st_size, status.st_mtime_ns
        if self._settings is None or self._settings[0] != state:
            self._settings = state, settings_of(read_config(self.folder))
        return self._settings[1]

    def values(self) -> dict[str, Any]:
        """The value of every key, for people. Secrets are masked, and keys that the run's version of asyncrl lacked
        have their defaults. Raises ConfigError: the file cannot be read."""
        return masked(self.real_values())

    def real_values(self) -> dict[str, Any]:
        """The value of every key, for programs: secrets are not masked."""
        with self._readable():
            return by_key(self._written())

    def written_config(self) -> str:
        """The text of the configuration, with masked secrets. Raises ConfigError: the file cannot be read."""
        with self._readable():
            return yaml.safe_dump(masked(self._written()), sort_keys=False, allow_unicode=True)

    def _written(self) -> Any:
        text = self.config_file.read_text()
        try:
            return yaml.load(text, _LOADER)
        except yaml.YAMLError:
            # The loader in C refuses half of a surrogate pair, which a name may have. The other loader is used only
            # then, since it takes a second for very deeply nested lists.
            if not _HALF_PAIR.search(text):
                raise
            return yaml.safe_load(text)

    @contextmanager
    def _readable(self) -> Iterator[None]:
        try:
            yield
        except (OSError, yaml.YAMLError, UnicodeDecodeError, RecursionError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.config_file} cannot be read: {error}") from error

    # The state and the end.

    def is_running(self) -> bool:
        """True if a launcher runs the run of this folder now."""
        with suppress(OSError):
            return owner_of(self.folder) is not None
        return False

    def end(self) -> str:
        """The result that the launcher wrote at the end of the run: done, solved (the policy solves the tasks, so that
        nothing is left to learn), stopped or failed. Empty while the run is running, and if no launcher wrote a result.
        """
        result = "" if self.is_running() else self.summary().get("result")
        return result if isinstance(result, str) else ""

    def solved(self) -> str:
        """The learner's sentence about the end of the run, if it ended the run because the policy solves the tasks;
        else empty."""
        with suppress(FileNotFoundError):
            return (self.folder / SOLVED_FILE).read_text(errors="replace")
        return ""

    def summary(self) -> Mapping[str, Any]:
        """The summary that the launcher wrote when the run ended last; empty if it wrote none."""
        return _json(self.folder / SUMMARY_FILE)

    def start_warnings(self) -> list[str]:
        """The warnings that the newest start of the run has logged; empty if a launcher recorded none."""
        found = _json(self.folder / START_WARNINGS_FILE).get("warnings")
        return [text for text in found if isinstance(text, str)] if isinstance(found, list) else []

    def processes(self) -> dict[str, ProcessRecord]:
        """The host, the process and the restarts of each role, as the supervisor wrote them; empty if the roles were
        started by hand."""
        with suppress(OSError):
            return read_records(self.folder)
        return {}

    def environments(self) -> list[Environment]:
        """The newest start of the run on each of its hosts."""
        return environments_of(self.folder)

    # The rows of metrics: each role has a file.

    def metrics_files(self) -> dict[str, str]:
        """Map each role that has written metrics to a text that changes when the role's file changes."""
        try:
            with os.scandir(metrics_file(self.folder, "").parent) as entries:
                files = [entry for entry in entries if entry.name.endswith(".jsonl") and entry.is_file()]
                found = [(entry.name, entry.stat()) for entry in files]
        except FileNotFoundError:
            return {}
        return {name.removesuffix(".jsonl"): f"{status.st_ino}:{status.st_size}" for name, status in sorted(found)}

    def roles(self, pattern: str = "*") -> list[str]:
        """The roles that have written metrics and whose name fits the pattern, such as `actor-*`."""
        return [name for name in self.metrics_files() if fnmatchcase(name, pattern)]

    def lines(self, role: str) -> Iterator[bytes]:
        """Every line of a role's file, which may have any content."""
        return each_line(metrics_file(self.folder, role))

    def rows(self, role: str) -> Iterator[Row]:
        """Every row of a role, one at a time in memory, with its numbers only."""
        return measured(each_row(metrics_file(self.folder, role)))

    def raw_rows(self, role: str) -> Iterator[Row]:
        """Every row of a role with all of its content."""
        return each_row(metrics_file(self.folder, role))

    def sampled_rows(self, role: str) -> list[Row]:
        """Rows of a role, evenly spread over its file, with their numbers only."""
        return list(measured(sampled_rows(metrics_file(self.folder, role))))

    def spread_rows(self, role: str, count: int) -> list[Row]:
        """Sample at most `count` rows of a role at equal distances in its file, with the first and the last one, and
        with their numbers only. The cost does not grow with the file."""
        with self.open_rows(role) as file:
            return [] if file is None else list(measured(file.sampled(file.whole, count)))

    def oldest_rows(self, role: str, count: int) -> list[Row]:
        """The first rows of a role, with their numbers only."""
        with self.open_rows(role) as file:
            return [] if file is None else list(measured(file.oldest(count)))

    def newest_rows(self, role: str, count: int) -> list[Row]:
        """The rows among the last lines of a role, with their numbers only."""
        return list(measured(newest_rows(metrics_file(self.folder, role), count)))

    def newest_values(self, role: str) -> Row:
        """The last row of a role with all of its values, including texts; empty if the role has no row."""
        return next(iter(newest_rows(metrics_file(self.folder, role), 1)), {})

    def tail(self, role: str, recent: int = 1) -> Tail:
        """A reader of all numbers that a role has written and will write. It keeps the newest `recent` rows."""
        return Tail(metrics_file(self.folder, role), recent, only_numbers=True)

    def raw_tail(self, role: str) -> Tail:
        """A reader of all values, including texts, that a role has written and will write."""
        return Tail(metrics_file(self.folder, role))

    def open_rows(self, role: str) -> AbstractContextManager[LineFile | None]:
        """Open the file of a role, to read parts of it; `None` if the role has no file."""
        return open_lines(metrics_file(self.folder, role))

    # Stores, kept episodes and spans.

    @contextmanager
    def stored(self) -> Iterator[StoredRun]:
        """Open the stores until the `with` block ends. Raises StoreError: there are none, or they cannot be read."""
        with closing(StoredRun(self.store)) as stored:
            yield stored

    def changes(self) -> list[ConfigChange]:
        """The changes of the configuration in mid-run, in order; empty without a store that can be read."""
        with suppress(StoreError, OSError), self.stored() as stored:
            return stored.changes()
        return []

    def endpoints(self) -> Sequence[str]:
        """The addresses that the shards of the replay wrote when they started; empty if an address is missing."""
        with suppress(StoreError, FileNotFoundError):
            return [(path / ENDPOINT_FILE).read_text() for path in shard_paths(self.store)]
        return []

    def kept(self) -> KeptEpisodes:
        """The episodes that the learner kept for people."""
        return KeptEpisodes(self.folder)

    def trace(self) -> Trace:
        """The spans of all roles. Raises ConfigError: there are none."""
        return Trace(self.folder)


def _json(path: Path) -> Mapping[str, Any]:
    """The object in a file of JSON; empty if it has none."""
    with suppress(OSError, ValueError, RecursionError):
        found = json.loads(path.read_text())
        return found if isinstance(found, dict) else {}
    return {}
