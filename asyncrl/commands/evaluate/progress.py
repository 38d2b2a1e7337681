"""Shows the progress of an evaluation on the terminal. The numbers come from the replay's store."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from asyncrl.errors import StoreError
from asyncrl.machine.long_work import LongWork
from asyncrl.replay.store.records import EvaluationRecord
from asyncrl.runs.run import Run
from asyncrl.text import duration

VERSION = 0
"""The only policy version of an evaluation."""
REFRESH_S, LINE_S = 1.0, 10.0
REASON_CHARS = 200


class EvaluationProgress:
    """Shows one changing line on a terminal, and a new line every 10 seconds on other outputs. `update` may be called
    often."""

    def __init__(self, folder: Path) -> None:
        self._run = Run(folder)
        self._console = Console(stderr=True)
        self._status = self._console.status("starting")
        self._next = 0.0
        self._work: LongWork | None = None
        self._before = 0
        if self._console.is_terminal:
            self._status.start()

    def close(self) -> None:
        self._status.stop()

    def update(self) -> None:
        """Show the progress if the last update is long enough ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (REFRESH_S if self._console.is_terminal else LINE_S)
        try:
            line = self._line()
        except StoreError:
            line = "waiting for the replay"
        if self._console.is_terminal:
            self._status.update(escape(line))
        else:
            self._console.print(escape(line), soft_wrap=True, highlight=False)

    def _line(self) -> str:
        done, total, line = progress_line(self._run)
        if total and self._work is None:
            self._work = LongWork("evaluating", total - done, "attempts")
            self._before = done
        if self._work is None:
            return line
        self._work.done = done - self._before
        return line if self._work.left_s is None else f"{line}  {duration(self._work.left_s)} left"


def progress_line(run: Run) -> tuple[int, int, str]:
    """The number of finished attempts, the number of all attempts, and a line of progress with the newest failure.

    Raises StoreError: there is no store yet.
    """
    with run.stored() as stored:
        records = [record for record in stored.each(EvaluationRecord.load, VERSION) if record is not None]
        letters = stored.dead_letters()
    if not records:
        return 0, 0, "waiting for the model"
    done, total = sum(record.done for record in records), sum(record.total for record in records)
    failed, outcome = sum(record.failed for record in records), sum(record.outcome for record in records)
    line = (
        f"{done}/{total} attempts  mean outcome {outcome / (done - failed):.3f}"
        if done > failed
        else (f"{done}/{total} attempts")
    )
    if failed:
        line += f"  {failed} failed"
    if letters:
        name, newest = max(letters, key=lambda each: each[1].order)
        line += f"  {len(letters)} failures, the newest in {name}: {newest.reason[:REASON_CHARS]}"
    return done, total, line
