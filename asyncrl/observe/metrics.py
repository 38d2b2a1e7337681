"""The interface through which every role reports its metrics, and the interface of their destinations, the sinks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from asyncrl.errors import InvariantError

logger = logging.getLogger(__name__)

Value = float | str
TRAINED_EPISODES, HELD_OUT_EPISODES = "episodes", "held_out_episodes"
"""The names of the tables of episodes in services."""


class Metrics(Protocol):
    """Takes named values at a step: numbers, or text for people. docs/metrics.md has every name."""

    def log(self, step: int, values: Mapping[str, Value]) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Histogram:
    """The number of values in each bin: `counts` [bins]. Bin i is from `edges[i]` to `edges[i + 1]`. Raises
    InvariantError: `edges` [bins + 1] do not ascend, or have another length."""

    counts: tuple[float, ...]
    edges: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.edges) != len(self.counts) + 1 or any(a >= b for a, b in pairwise(self.edges)):
            raise InvariantError(f"{len(self.counts)} bins need {len(self.counts) + 1} edges that rise: {self.edges}")


@dataclass(frozen=True, slots=True)
class LoggedEpisode:
    """One episode for people: its facts by name, and its text as messages with a `role` and a `content` each."""

    facts: Mapping[str, Value]
    messages: Sequence[Mapping[str, str]]

    @property
    def text(self) -> str:
        """All messages as one text."""
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


class Sink:
    """A destination of metrics. A sink implements the calls that it supports; by default a call does nothing.

    A call may raise any exception, and `Fanout` counts it. `lost` counts the calls that the sink itself dropped.
    """

    lost = 0

    def resumed(self, step: int) -> None:
        """Expect the values of this step and of later steps again, since an earlier process may have logged them."""

    def repeats(self, step: int) -> None:
        """Expect the values of this step again, in place of those that were logged, if there are any."""

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Take named values at a step."""

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Take distributions by name."""

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        """Take a sample of episodes: those that a step trained (`table` is TRAINED_EPISODES), or those of an evaluation
        (HELD_OUT_EPISODES)."""

    def model(self, step: int, folder: Path) -> None:
        """Take the model that was exported after `step` steps: the files of `folder`, which is not deleted."""

    def end(self) -> None:
        """Begin to close, without waiting. A call of `close` follows."""

    def close(self) -> None:
        """Close the sink. A second call does nothing."""

    def abandon(self) -> None:
        """End the wait of a hanging `close`. Another thread calls this, before the process ends."""


class Fanout(Sink):
    """Passes everything on to several sinks.

    A sink that fails never ends the process. The failed call is lost, counted by the metric `metrics/lost` in later
    rows, and logged the first time. A value that is neither text nor a number within the range of floats is lost in the
    same way. The other values of its row are kept.
    """

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self._sinks = sinks
        self._raised = Failures()
        self._refused = 0

    @property
    def lost(self) -> int:  # type: ignore[override]
        """The number of calls that failed or that a sink dropped, and of values that no sink can take."""
        return self._refused + self._raised.count + sum(sink.lost for sink in self._sinks)

    def resumed(self, step: int) -> None:
        self._each(lambda sink: sink.resumed(step))

    def repeats(self, step: int) -> None:
        self._each(lambda sink: sink.repeats(step))

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        plain = _plain(values)
        if refused := values.keys() - plain.keys():
            if not self._refused:
                logger.warning("metrics are lost: %s are not valid numbers; metrics/lost counts them", sorted(refused))
            self._refused += len(refused)
        lost = self.lost
        # If `values` has a count from an outer Fanout, that count replaces this one, since it may include more losses.
        counted = {"metrics/lost": float(lost), **plain} if lost else plain
        self._each(lambda sink: sink.log(step, counted))

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        self._each(lambda sink: sink.histograms(step, histograms))

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        self._each(lambda sink: sink.episodes(step, episodes, table))

    def model(self, step: int, folder: Path) -> None:
        self._each(lambda sink: sink.model(step, folder))

    def end(self) -> None:
        self._each(lambda sink: sink.end())

    def close(self) -> None:
        # Sinks that hang are waited for together: a stopped role has no time to wait for each in turn.
        self.end()
        self._each(lambda sink: sink.close())

    def _each(self, action: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            self._raised.catch(sink, action)


def _plain(values: Mapping[str, Any]) -> dict[str, Value]:
    """The values that every sink can take: texts, and numbers that fit a float. A number of another type, such as a
    scalar of numpy, becomes a float."""
    found: dict[str, Value] = {}
    for name, value in values.items():
        if isinstance(value, str):
            found[name] = value
            continue
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            continue
        found[name] = value if isinstance(value, int | float) else number
    return found


class Failures:
    """Counts the calls in which sinks raised an error, and logs the first error of each sink."""

    def __init__(self) -> None:
        self.count = 0
        self._known: set[int] = set()

    def catch(self, sink: Sink, action: Callable[[Sink], None]) -> None:
        try:
            action(sink)
        except Exception as error:  # noqa: BLE001 - the library of a sink may raise anything
            self.count += 1
            if id(sink) not in self._known:
                self._known.add(id(sink))
                name = type(sink).__name__
                logger.warning("metrics are lost: %s failed with %r; metrics/lost counts further failures", name, error)
