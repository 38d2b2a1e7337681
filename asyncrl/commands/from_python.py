"""asyncrl from Python: `asyncrl.train`, `asyncrl.evaluate` and `asyncrl.Run`, for scripts and notebooks.

They check what the commands check, and refuse with the same messages. A run that was started from Python is like any
other: `asyncrl dashboard`, `asyncrl status` and `asyncrl stop` work on its folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from asyncrl.config import locations
from asyncrl.config.compose import read
from asyncrl.config.load import log_to_stderr
from asyncrl.config.quoting import as_word
from asyncrl.errors import ConfigError
from asyncrl.launch import local
from asyncrl.machine.process import stopped_by_ctrl_c
from asyncrl.runs.finding import require_run

if TYPE_CHECKING:
    import pyarrow as pa

    from asyncrl.commands.evaluate.results import EvaluatedSource, EvaluationResult

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
        """`done`, `solved`, `stopped` or `failed`. Empty while the run is running, or if its launcher wrote no
        result."""
        return self._reader.end()

    @property
    def summary(self) -> Mapping[str, Any]:
        """The numbers of the summary that the launcher wrote when the run last ended; empty if it wrote none."""
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
        """The results of the evaluations on `data.eval`; no rows before the first evaluation."""
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
        """The episodes whose text was kept for reading (`observe.keep_episodes`), with step, reward and kind; `asyncrl
        dashboard` shows them."""
        import pyarrow as pa
        from msgspec.structs import asdict

        return pa.Table.from_pylist([asdict(row) for row in self._reader.kept().rows()])

    def __repr__(self) -> str:
        state = "running" if self.is_running else self.result or "not running"
        return f"Run({str(self.folder)!r}: {state})"


@dataclass(frozen=True, slots=True)
class EvaluationView:
    """A complete evaluation in `folder`, which is like the folder of a run. `result` has the numbers of its tables.

    Methods return tables of Apache Arrow.
    """

    folder: Path
    result: EvaluationResult

    def table(self) -> pa.Table:
        """A row for each data source, and a last row `all`: counts, means, and the estimates at each k, such as pass@4.

        A value is null if no attempt, or no task, gives it.
        """
        return _table(
            {"source": name, **_row(source)}
            for name, source in (*self.result.sources.items(), ("all", self.result.total))
        )

    def episodes(self) -> pa.Table:
        """The scored attempts, with the columns of `RunView.episodes`."""
        return RunView(self.folder).episodes({"evaluated"})

    def __repr__(self) -> str:
        total = self.result.total
        accuracy = "none scored" if total.accuracy is None else f"accuracy {total.accuracy:.3f}"
        return f"Evaluation({str(self.folder)!r}: {total.tasks} tasks, {accuracy})"


def train(values: Mapping[str, Any] | None = None, *words: str, config_dir: str | Path | None = None) -> RunView:
    """Train to the end, as `asyncrl train` does, and return the run. A second call with the same `run.name` resumes it.

    `values` have keys of docs/configuration.md, such as `{"model.path": "...", "learner.steps": 20}`. A function or
    class is replaced by its dotted path, as in `{"scoring.rule": rewards.score}`. `words` are written as on a command
    line, such as `"algorithm=dapo"`, and win over `values`. If the call is interrupted (by Ctrl-C, or by a notebook's
    stop button), it stops the run cleanly, with a checkpoint, before it ends.

    Raises ConfigError or DataError: the configuration or the data cannot be used; the message has a line for each
    mistake. Raises AsyncrlError: the run failed.
    """
    given = [as_word(key, value) for key, value in (values or {}).items()]
    config = read([*given, *words], None if config_dir is None else Path(config_dir))
    log_to_stderr()
    interruptible(partial(local.train, config))
    return RunView(locations.run_dir(config.run))


def evaluate(
    target: str | Path,
    values: Mapping[str, Any] | None = None,
    *words: str,
    data: str | Path | None = None,
    n: int = 8,
    step: int | None = None,
    threshold: float = 1.0,
    config_dir: str | Path | None = None,
) -> EvaluationView:
    """Evaluate a run or a model on `data` as `asyncrl evaluate` does: `n` attempts at each task, greedy if `n` is 1.

    `target` is the folder or name of a run, or the folder or hub name of a model. Without `data` the tasks are those of
    the run's data.eval. `step` is the number of steps after which the checkpoint of a run was written; by default the
    newest checkpoint is evaluated. An attempt is right if its outcome is at least `threshold`. `values` and `words`
    change keys, as for `train`. A second call with the same arguments resumes the evaluation, or reads it if it is
    finished.

    Raises ConfigError, DataError and CheckpointError: the arguments, the data or the checkpoint cannot be used;
    AsyncrlError: the evaluation failed.
    """
    from asyncrl.commands.evaluate import evaluation

    given = [*(as_word(key, value) for key, value in (values or {}).items()), *words]
    folder = None if config_dir is None else Path(config_dir)
    request = evaluation.requested(str(target), None if data is None else str(data), n, step, given, folder)
    log_to_stderr()
    return EvaluationView(*interruptible(partial(evaluation.evaluate, request, step, threshold)))


def interruptible(work: Callable[[threading.Event], T]) -> T:
    """Call `work` in a new thread, and return its result. In a notebook the caller's thread already runs an event loop.

    `work` gets an event, which Ctrl-C sets. KeyboardInterrupt is raised once `work` has returned, or on another Ctrl-C.
    """
    stop, future = threading.Event(), Future[T]()

    def run() -> None:
        try:
            future.set_result(work(stop))
        except BaseException as error:  # noqa: BLE001 - `result` raises it again
            future.set_exception(error)

    with stopped_by_ctrl_c(stop):
        threading.Thread(target=run, name="asyncrl").start()
        return future.result()


def _row(source: EvaluatedSource) -> dict[str, Any]:
    """The numbers of a data source by column."""
    means = {
        "outcome": source.mean_outcome,
        "accuracy": source.accuracy,
        "reward": source.mean_reward,
        "process": source.mean_process,
        "length": source.mean_length,
    }
    estimates = {"pass": source.pass_at, "best": source.best_at, "maj": source.maj_at}
    at = {f"{name}@{k}": value for name, values in estimates.items() for k, value in values.items()}
    return {"tasks": source.tasks, "scored": source.scored, "failed": source.failed, **means, **at}


def _table(rows: Iterable[Mapping[str, Any]]) -> pa.Table:
    """A table with a column for each name of any row."""
    import pyarrow as pa

    found = list(rows)
    names = dict.fromkeys(name for row in found for name in row)
    return pa.table({name: [row.get(name) for row in found] for name in names})
