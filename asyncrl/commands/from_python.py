"""asyncrl from Python: `asyncrl.train` and `asyncrl.Run`, for scripts and notebooks.

They check what the commands check, and refuse with the same messages. A run that was started here is like any other:
`asyncrl dashboard`, `asyncrl status` and `asyncrl stop` work on its folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config import locations
from asyncrl.config.compose import read
from asyncrl.config.load import log_to_stderr
from asyncrl.config.quoting import as_word
from asyncrl.errors import ConfigError
from asyncrl.launch import local
from asyncrl.runs.finding import require_run

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")


class RunView:
    """A run, given by its folder or by its name under `runs`. The run may be running.

    Methods return tables of Apache Arrow, which `.to_pandas()` and `polars.from_arrow` convert.

    Raises ConfigError: there is no such run.
    """

    def __init__(self, folder: str | Path) -> None:
        self._reader = require_run(str(folder))

    @property
    def folder(self) -> Path:
        """The folder of the run. `folder / "model"` has the exported policy once the run is done."""
        return self._reader.folder

    @property
    def config(self) -> dict[str, Any]:
        """The value of every key of docs/configuration.md, with masked secrets."""
        return self._reader.values()

    @property
    def is_running(self) -> bool:
        """True if the run is running now, on any host that has its folder."""
        return self._reader.is_running()

    @property
    def result(self) -> str:
        """done, stopped or failed. Empty while the run is running, and if its launcher wrote no result."""
        return self._reader.end()

    @property
    def summary(self) -> Mapping[str, Any]:
        """The numbers of the summary that the launcher wrote when it last ended; empty if it wrote none."""
        return self._reader.summary()

    @property
    def roles(self) -> list[str]:
        """The roles that have metrics, such as `learner`, `actor-0` and `evaluation`."""
        return self._reader.roles()

    def metrics(self, role: str = "learner") -> pa.Table:
        """The metrics of a role: a row for each report, and a column for each number (docs/metrics.md).

        If a report lacks a number, the value is null.

        Raises ConfigError: the run has no metrics of that role yet.
        """
        if role not in self.roles:
            known = ", ".join(self.roles) or "none yet"
            raise ConfigError(f"{self.folder} has no metrics of {role!r}; it has those of {known}")
        return _table(self._reader.rows(role))

    def evaluations(self) -> pa.Table:
        """The results of the evaluations on `data.eval`; no rows before the first one."""
        return _table(self._reader.rows("evaluation"))

    def episodes(self, states: Collection[str] = ()) -> pa.Table:
        """The stored episodes with the columns of `asyncrl inspect export` (docs/replay.md), texts included.

        With `states`, such as `{"trained"}`, only the episodes in one of these states are returned.

        Raises StoreError: the run has no replay yet.
        """
        from asyncrl.runs.decoding import decoder, ids_as_text
        from asyncrl.runs.inspect.parquet import trajectory_table

        decode = decoder(self._reader)
        with self._reader.stored() as stored:
            return trajectory_table(stored, states, None if decode is ids_as_text else decode)

    def kept(self) -> pa.Table:
        """The episodes that were kept for people, with step, reward and kind; `asyncrl dashboard` shows them."""
        import pyarrow as pa
        from msgspec.structs import asdict

        return pa.Table.from_pylist([asdict(row) for row in self._reader.kept().rows()])

    def __repr__(self) -> str:
        state = "running" if self.is_running else self.result or "not running"
        return f"Run({str(self.folder)!r}: {state})"


def train(values: Mapping[str, Any] | None = None, *words: str, config_dir: str | Path | None = None) -> RunView:
    """Train to the end, as `asyncrl train` does, and return the run. A second call with the same `run.name` resumes it.

    `values` have keys of docs/configuration.md, such as `{"model.path": "...", "learner.steps": 20}`; `words` are
    written as on a command line, such as `"algorithm=dapo"`, and win. Interrupting the call (Ctrl-C, or the kernel's
    stop) stops the run cleanly first, with a checkpoint.

    Raises ConfigError and DataError: with a line for each mistake; AsyncrlError: the run failed.
    """
    given = [as_word(key, value) for key, value in (values or {}).items()]
    config = read([*given, *words], None if config_dir is None else Path(config_dir))
    log_to_stderr()
    interruptible(partial(local.train, config))
    return RunView(locations.run_dir(config.run))


def interruptible(work: Callable[[threading.Event], T]) -> T:
    """Call `work` in a thread, since a notebook's own thread has an event loop, and return its result.

    `work` gets an event, which a KeyboardInterrupt sets. The KeyboardInterrupt is raised once `work` has returned.
    """
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="asyncrl") as pool:
        try:
            # Within the block: `work` may already run when an interrupt comes before `submit` has returned.
            return pool.submit(work, stop).result()
        except KeyboardInterrupt:
            stop.set()
            raise


def _table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A table with a column for each name of any row."""
    import pyarrow as pa

    found = list(rows)
    names = dict.fromkeys(name for row in found for name in row)
    return pa.table({name: [row.get(name) for row in found] for name in names})
