"""Metrics that every file has."""

from __future__ import annotations

from asyncrl.observe.registry.metric import made_by

gauge, counter, _ = made_by("any")

METRICS = (
    gauge("step", "", "what the row is about: see each file below"),
    gauge("time", "s", "when the row was written, since 1970"),
    counter("metrics/lost", "rows", "rows that a sink could not take, since the start; only if there are any"),
)
