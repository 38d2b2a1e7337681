"""The sinks of a role's process, as the configuration names them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

from asyncrl.config import locations
from asyncrl.config.schema import TrainConfig
from asyncrl.config.secrets import masked
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
"""What may be slow, by the names of `observe.sinks`: libraries that write to a network or a disk."""


def open_metrics(config: TrainConfig, role: str, console: bool = True) -> Sink:
    """The sinks of one role's process: JSON lines always, and those of `observe.sinks`; the console only with
    `console`.

    Raises ConfigError: a package that a sink needs is not installed, or observe.prometheus_host is of another machine.
    """
    source = _source(config, role)
    return Fanout([*_own(config, source), *_shared(config, source, console)])


def open_learner_metrics(config: TrainConfig) -> tuple[Sink, Sink]:
    """Sinks of the learner's steps and of its evaluations: each has a file with one line a step and an endpoint for
    Prometheus, and both share the others. Raises ConfigError as `open_metrics` does."""
    source = _source(config, "learner")
    shared = _shared(config, source, console=True)
    steps, evaluations = (
        Fanout([*_own(config, replace(source, role=name)), *shared]) for name in ("learner", "evaluation")
    )
    return steps, evaluations


def _source(config: TrainConfig, role: str) -> Source:
    return Source(
        locations.run_dir(config.run),
        role,
        config.observe.project,
        masked(asdict(config)),
        lambda: locations.run_identity(config.run).id,
    )


def _own(config: TrainConfig, source: Source) -> list[Sink]:
    """The sinks of one file of metrics."""
    sinks: list[Sink] = [JsonLines(metrics_file(source.run_dir, source.role))]
    if "prometheus" in config.observe.sinks:
        sinks.append(Prometheus(source, config.observe.prometheus_host))
    return sinks


def _shared(config: TrainConfig, source: Source, console: bool) -> list[Sink]:
    """The sinks of all files of metrics that one process writes."""
    named = config.observe.sinks
    services: list[Sink] = [Background(make(source)) for name, make in SERVICES.items() if name in named]
    return [Console(source.role), *services] if console and "console" in named else services
