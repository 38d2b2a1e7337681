"""Describes every metric that asyncrl writes. docs/metrics.md is made from it (`make docs`), and sinks, the dashboard
and the report read units and meanings here. A role may also log metrics that a user's code returns."""

from __future__ import annotations

from asyncrl.observe.registry import actor, evaluation, every_file, learner, replay, scoring
from asyncrl.observe.registry.metric import Kind, Metric

__all__ = ["BY_WRITER", "EVERY_FILE", "Kind", "Metric", "describe"]

EVERY_FILE = every_file.METRICS
BY_WRITER = {
    "learner": learner.METRICS,
    "evaluation": evaluation.METRICS,
    "actor": actor.METRICS,
    "scoring": scoring.METRICS,
    "replay": replay.METRICS,
}
"""The metrics by their writer: the first word of the name of a file in `runs/NAME/metrics/`."""


def describe(writer: str, name: str) -> Metric | None:
    """Find the description of a metric. The result is None if the metric is not one of asyncrl's. `writer` is the name
    of a file without its ending, such as `learner` or `actor-0`."""
    fitting = [metric for metric in (*BY_WRITER.get(writer.partition("-")[0], ()), *EVERY_FILE) if metric.fits(name)]
    return max(fitting, key=lambda metric: (not metric.is_family, metric.fixed_characters), default=None)
