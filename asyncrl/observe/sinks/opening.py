"""Opens the sinks of a role's process: JSON lines, and the sinks that `observe.sinks` names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from asyncrl.config.schema import ObserveConfig
from asyncrl.observe.metrics import Fanout, Sink
from asyncrl.observe.sinks.background import Background
from asyncrl.observe.sinks.console import Console
from asyncrl.observe.sinks.json_lines import JsonLines, metrics_file
from asyncrl.observe.sinks.prometheus import Prometheus
from asyncrl.observe.sinks.source import Source
from asyncrl.observe.sinks.tensorboard import TensorBoard
from asyncrl.observe.sinks.trackio import Trackio
from asyncrl.observe.sinks.wandb import Wandb

SERVICES: dict[str, Callable[[Source], Sink]] = {"wandb": Wandb, "tensorboard": TensorBoard, "trackio": Trackio}
"""The sinks that may be slow, by name: their libraries write to a network or a disk."""


def open_metrics(source: Source, options: ObserveConfig, console: bool = True) -> Sink:
    """Open the sinks of one role's process: JSON lines always, and the sinks of `observe.sinks`; the console only with
    `console`.

    Raises ConfigError: a package that a sink needs is not installed, or observe.prometheus_host is an address of
    another machine.
    """
    return Fanout([*_own(source, options), *_shared(source, options, console)])


def open_learner_metrics(source: Source, options: ObserveConfig) -> tuple[Sink, Sink]:
    """Open the sinks of the learner's steps and of its evaluations. Each has its own file of JSON lines and its own
    endpoint for Prometheus, and both share all other sinks. Raises ConfigError as `open_metrics` does."""
    learner, evaluation = (replace(source, role=name) for name in ("learner", "evaluation"))
    shared = _shared(learner, options, console=True)
    steps, evaluations = (Fanout([*_own(each, options), *shared]) for each in (learner, evaluation))
    return steps, evaluations


def _own(source: Source, options: ObserveConfig) -> list[Sink]:
    """The sinks of one file of metrics."""
    sinks: list[Sink] = [JsonLines(metrics_file(source.run_dir, source.role))]
    if "prometheus" in options.sinks:
        sinks.append(Prometheus(source, options.prometheus_host))
    return sinks


def _shared(source: Source, options: ObserveConfig, console: bool) -> list[Sink]:
    """The sinks of all files of metrics that one process writes."""
    named = options.sinks
    services: list[Sink] = [Background(make(source)) for name, make in SERVICES.items() if name in named]
    return [Console(source.role), *services] if console and "console" in named else services
