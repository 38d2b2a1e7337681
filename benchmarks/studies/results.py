"""The results of a study: a Parquet file with a row for each run and evaluation.

A run is in the file once it has ended, and is then not repeated. Commands in several checkouts may write one file.
"""

from __future__ import annotations

import datetime
import fcntl
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.record import RESULTS, machine
from benchmarks.studies.figures import Row
from benchmarks.studies.study import LR, Run

FOLDER = RESULTS / "studies"

_TEXTS = ("stage", "fingerprint", "rung", "status", "reason", "machine", "date")
_WHOLE = ("seed", "steps", "batch", "step", "samples", "parallel")
_NUMBERS = ("lr", "accuracy", "seconds", "lag_max", "idle", "entropy", "ess", "masked", "reward", "lag_mean")
_FURTHER = ("token_lag_mean", "k3", "evicted", "filtered", "dropped", "dead", "run_seconds", "processor_seconds")
_OF_SCORERS = ("agreement", "hack_alarms")
_LENGTHS = ("length_sampled", "length_trained", "length_evicted")


class ResultsError(ValueError):
    """The file of results cannot be read or written. The message names the file and the fix."""


class Results:
    """The file of one study with that many factors. `path` need not exist yet.

    Raises ResultsError: the file cannot be read, or has no results of a study.
    """

    def __init__(self, path: Path, factors: Iterable[str]) -> None:
        self.path = path
        texts = (*_TEXTS[:2], *factors, *_TEXTS[2:])
        self._schema = pa.schema(
            [(name, pa.string()) for name in texts]
            + [(name, pa.int64()) for name in _WHOLE]
            + [(name, pa.float64()) for name in (*_NUMBERS, *_FURTHER, *_OF_SCORERS, *_LENGTHS)]
        )
        self._rows = self._read()

    def read_again(self) -> None:
        """Read the rows that other commands have added. Raises ResultsError as the constructor does."""
        self._rows = self._read()

    def _read(self) -> list[Row]:
        if not self.path.exists():
            return []
        try:
            known = pq.read_table(self.path)
        except (pa.ArrowException, OSError) as error:
            raise ResultsError(
                f"{self.path} cannot be read: {error}; restore it, or move it away to run everything again"
            ) from error
        self._require_ours(known.schema)
        # A file of an earlier declaration may have other columns.
        return [{name: row.get(name) for name in self._schema.names} for row in known.to_pylist()]

    def _require_ours(self, found: pa.Schema) -> None:
        """Raises ResultsError: another program wrote the file."""
        wrong, fix = f"{self.path} has no results of a study", "move it away, or name another folder of results"
        if "fingerprint" not in found.names:
            raise ResultsError(f"{wrong}: there is no column fingerprint; {fix}")
        for column in self._schema:
            if column.name in found.names and found.field(column.name).type != column.type:
                kind = found.field(column.name).type
                raise ResultsError(f"{wrong}: its column {column.name} is {kind}, not {column.type}; {fix}")

    def require_writable(self) -> None:
        """Make the folder of the file. Raises ResultsError: no file can be written there."""
        folder = self.path.parent
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder) as tried:
                tried.write(b"tried")
        except OSError as error:
            raise ResultsError(
                f"the results cannot be written to {folder}: {error.strerror or error}; name another folder"
            ) from error

    def rows(self, fingerprint: str) -> list[Row]:
        """The rows of a run by rising step; none if it has not ended yet."""
        rows = [row for row in self._rows if row["fingerprint"] == fingerprint]
        return sorted(rows, key=lambda row: -1 if row["step"] is None else row["step"])

    def add(self, run: Run, rows: Sequence[Row], parallel: int, date: datetime.date) -> None:
        """Replace the rows of a run, and write the file."""
        about: Mapping[str, Any] = {
            "stage": run.stage,
            "fingerprint": run.fingerprint,
            **run.levels,
            "rung": run.task,
            "seed": run.seed,
            "steps": run.settings["learner.steps"],
            "batch": run.settings["learner.batch_size"],
            "lr": float(run.settings[LR]),
            "parallel": parallel,
            "machine": machine(),
            "date": date.isoformat(),
        }
        names = self._schema.names
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _alone_in(self.path.parent):
            # Keeps the rows that other commands have added meanwhile.
            self._rows = [row for row in self._read() if row["fingerprint"] != run.fingerprint]
            self._rows += [{name: {**row, **about}.get(name) for name in names} for row in rows]
            partial = self.path.with_suffix(".partial")
            pq.write_table(pa.Table.from_pylist(self._rows, schema=self._schema), partial, compression="zstd")
            partial.rename(self.path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Lock the folder against other processes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)
