"""Shows rows of values: on a terminal a bar and a table that change in place, elsewhere a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from asyncrl.runs.pace import StepPace
from asyncrl.text import duration, printable, shortened

REFRESH_S = 0.5
LINE_S = 10.0
BAR_CHARS = 40
LONGEST_VALUE = 160
"""The maximum number of characters of a value in a line. Reasons of failures may be as long as a page."""

Rows = Sequence[tuple[str, str]]


class LiveRows:
    """Shows rows of names and values until its `with` block ends. `console` is standard error by default. `clock` gives
    seconds."""

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console or Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._clock = clock
        self._next = 0.0

    def __enter__(self) -> LiveRows:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def is_due(self) -> bool:
        """True if it is time to show new values; the caller then shows them."""
        if self._clock() < self._next:
            return False
        self._next = self._clock() + (REFRESH_S if self._console.is_terminal else LINE_S)
        return True

    def show(self, pace: StepPace, rows: Rows) -> None:
        """Show the newest values. On a terminal they replace the values that were shown before."""
        if self._console.is_terminal:
            self._live.update(Group(_bar(pace), _table(rows)), refresh=True)
        else:
            line = "  ".join(f"{name} {escape(printable(shortened(value, LONGEST_VALUE)))}" for name, value in rows)
            self._console.print(line, soft_wrap=True, highlight=False)

    def tell(self, text: str, style: str = "yellow") -> None:
        """Print a text that stays, above the table or between the lines."""
        self._console.print(printable(text), style=style, soft_wrap=True, markup=False, highlight=False)


def _bar(pace: StepPace) -> Table:
    """A bar of the steps, with the share that is done and the time left."""
    share, left_s = pace.share or 0.0, pace.left_s
    left = "" if left_s is None else f"{duration(left_s)} left"
    bar = Table.grid(padding=(0, 1))
    bar.add_row("", ProgressBar(total=1.0, completed=share, width=BAR_CHARS), f"{share:.0%}", f"[dim]{left}")
    return bar


def _table(rows: Rows) -> Table:
    table = Table(show_header=False, box=None)
    for name, value in rows:
        table.add_row(f"[dim]{name}", escape(printable(value)))
    return table
