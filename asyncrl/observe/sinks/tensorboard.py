"""Writes event files for TensorBoard into runs/NAME/tensorboard/ROLE: scalars, histograms and text.

TensorBoard's own writer writes the files: torch's writer would load torch into roles that do not need it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import yaml

from asyncrl.observe.metrics import TRAINED_EPISODES, Histogram, LoggedEpisode, Sink, Value
from asyncrl.observe.sinks.source import Source, need


class TensorBoard(Sink):
    """Writes event files for TensorBoard. Raises ConfigError: the package is not installed."""

    def __init__(self, source: Source, clock: Callable[[], float] = time.time) -> None:
        need("tensorboard", "tensorboard")
        self._folder = source.run_dir / "tensorboard" / source.role
        self._config = source.config
        self._clock = clock
        self._opened: Any = None

    def resumed(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        # Because of this event, readers ignore the values that earlier files have for this step and later steps.
        event = Event(session_log=SessionLog(status=SessionLog.START), step=step, wall_time=self._clock())
        self._writer.add_event(event)

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        made = [
            _text(name, value) if isinstance(value, str) else Summary.Value(tag=name, simple_value=value)
            for name, value in values.items()
        ]
        self._write(step, made)

    def histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        found = histograms.items()
        self._write(step, [Summary.Value(tag=f"histogram/{name}", histo=_bins(each)) for name, each in found])

    def episodes(self, step: int, episodes: Sequence[LoggedEpisode], table: str = TRAINED_EPISODES) -> None:
        self._write(step, [_text(f"{table}/{number}", each.text) for number, each in enumerate(episodes)])

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    @property
    def _writer(self) -> Any:
        if self._opened is None:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._folder.mkdir(parents=True, exist_ok=True)
            self._opened = EventFileWriter(str(self._folder))
            self._write(0, [_text("configuration", yaml.safe_dump(dict(self._config), sort_keys=False))])
        return self._opened

    def _write(self, step: int, values: Sequence[Any]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._writer.add_event(Event(step=step, wall_time=self._clock(), summary=Summary(value=values)))


def _bins(histogram: Histogram) -> Any:
    """A histogram for TensorBoard: the upper edge of each bin, and moments, which are computed from the middles of
    bins."""
    from tensorboard.compat.proto.summary_pb2 import HistogramProto

    edges, counts = histogram.edges, histogram.counts
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    return HistogramProto(
        min=edges[0],
        max=edges[-1],
        num=sum(counts),
        sum=sum(count * middle for count, middle in zip(counts, middles, strict=True)),
        sum_squares=sum(count * middle**2 for count, middle in zip(counts, middles, strict=True)),
        bucket_limit=edges,
        bucket=(0.0, *counts),
    )


def _text(tag: str, text: str) -> Any:
    """A text for TensorBoard, which shows texts as Markdown: indented lines are shown unchanged."""
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING

    indented = "\n".join(f"    {line}" for line in text.splitlines())
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    tensor = TensorProto(dtype=DT_STRING, string_val=[indented.encode(errors="replace")])
    return Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
