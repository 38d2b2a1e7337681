"""Shows the progress of work that may take long: a bar on a terminal, or a line every LINE_S seconds elsewhere.

If the amount of work is known, bar and line show the remaining time. A bar always shows the elapsed time, too. Work
that takes less than LINE_S seconds writes no line.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

from asyncrl.text import duration

if TYPE_CHECKING:
    from rich.console import Console

    from asyncrl.machine.activity import Activity

log = logging.getLogger(__name__)

T = TypeVar("T")
Advance = Callable[[float], None]

LINE_S = 10.0


class LongWork:
    """Work that may take long, and its progress.

    - `what`: the work, such as "loading the model"
    - `total`: the amount of work in `unit`; 0 or infinite: the amount is not known
    - `clock`: gives seconds
    """

    def __init__(self, what: str, total: float, unit: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._what, self._unit, self._clock = what, unit, clock
        self.total = total if 0 < total < float("inf") else 0.0
        self._began = clock()
        self.done = 0.0

    @property
    def seconds(self) -> float:
        return self._clock() - self._began

    @property
    def left_s(self) -> float | None:
        """The remaining seconds at the mean speed so far. None: they are not known."""
        if not self.done or not self.total:
            return None
        return max(0.0, self.total - self.done) * self.seconds / self.done

    @property
    def text(self) -> str:
        """The progress, such as "loading the model: 12 of 30 GB, 20 s left"."""
        of = f" of {_amount(self.total)}" if self.total else ""
        left = "" if self.left_s is None else f", {duration(self.left_s)} left"
        return f"{self._what}: {_amount(self.done)}{of} {self._unit}{left}"


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"


@contextmanager
def long_work(
    what: str,
    total: float,
    unit: str,
    activity: Activity | None = None,
    say: Callable[[str], None] | None = None,
    console: Console | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Advance]:
    """Show the progress of the block, which calls the yielded function with each finished amount.

    Lines go to `say`, or else to the log. If `console` (None: standard error) is a terminal, it shows a bar instead.
    With the `activity` of a role, views of the run show the work, and there is no bar.
    """
    work = LongWork(what, total, unit, clock)
    with ExitStack() as stack:
        bar = stack.enter_context(_bar(work, console) if activity is None else _shown_in(activity, work))
        show = bar or _lines(work, say or log.info)

        def advance(amount: float) -> None:
            work.done += amount
            show()
            if activity is not None:
                activity.work = work.text

        yield advance


def tracked(items: Iterable[T], what: str, total: float, unit: str, activity: Activity | None = None) -> Iterator[T]:
    """Yield the items, and show progress, in which each item counts 1."""
    rest = iter(items)
    with long_work(what, total, unit, activity) as advance, suppress(StopIteration):
        while True:
            # No variable here keeps an item, which may be large, while the next is made.
            yield next(rest)
            advance(1)


@contextmanager
def unmeasured_work(
    what: str,
    activity: Activity | None = None,
    say: Callable[[str], None] | None = None,
    every_s: float = LINE_S,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[None]:
    """Show that a block works at `what`, although the block reports no progress. A thread writes the elapsed time every
    `every_s` seconds."""
    began, ended = clock(), threading.Event()
    before = activity.work if activity is not None else ""

    def tell() -> None:
        while not ended.wait(every_s):
            text = f"{what}: for {duration(clock() - began)} so far"
            if activity is not None:
                activity.work = text
            (say or log.info)(text)

    if activity is not None:
        activity.work = what
    thread = threading.Thread(target=tell, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if activity is not None:
            activity.work = before


def print_line(line: str) -> None:
    """Print a line of progress, for commands, which have no log."""
    sys.stderr.write(f"{line}\n")


@contextmanager
def _shown_in(activity: Activity, work: LongWork) -> Iterator[None]:
    before, activity.work = activity.work, work.text
    try:
        yield None
    finally:
        activity.work = before


def _lines(work: LongWork, say: Callable[[str], None]) -> Callable[[], None]:
    """Return a function that writes the progress, at most every LINE_S seconds."""
    said_s = 0.0

    def show() -> None:
        nonlocal said_s
        if work.seconds - said_s >= LINE_S:
            said_s = work.seconds
            say(work.text)

    return show


@contextmanager
def _bar(work: LongWork, console: Console | None) -> Iterator[Callable[[], None] | None]:
    """Yield a function that draws the progress, or None without a terminal."""
    # Imported only here: processes that show no bar start faster without it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = console or Console(stderr=True)
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(work.text, total=work.total or None)
        yield lambda: progress.update(task, completed=work.done, description=work.text)
